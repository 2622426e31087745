"""Byte-level tokenizers with the special tokens of either generation, and chat templates as checkpoints bring them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Merges that would reach across the end of a header or into a delimiter, if nothing kept them apart.
MERGES = (("Ċ", "Ċ"), ("Ċ", "Ġ"), ("<", "/"), ("t", "h"), ("th", "e"), (">", "Ċ"))
V2 = ("<unk>", "<s>", "</s>", "[INST]", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_13>", "<SPECIAL_14>")
V2_IMAGES = ("<image>", "<img>", "</img>", "<video>")
V3 = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
V3_IMAGES = ("<image>", "<img>", "</img>", "<video>", "<so_embedding>")


def byte_tokenizer(
    specials: tuple[str, ...], eos: str, template: str | None = None, pad: str | None = None, bos: str | None = "<s>"
) -> PreTrainedTokenizerFast:
    """Ids: specials in order, then bytes, then merges."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    vocabulary = {token: i for i, token in enumerate([*specials, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token},
    )


# As the v2 text models do it: text contents alone, switches alone, no word of reasoning_content, a last turn that
# opens like a prompt and whose calls are a turn of their own.
V2_STYLE = """
{%- set ns = namespace(think=true) -%}
{%- for m in messages if m.role in ['user', 'system'] -%}
{%- if '/think' in m.content %}{% set ns.think = true %}{% elif '/no_think' in m.content %}{% set ns.think = false %}
{%- endif -%}{%- endfor -%}
{{- bos_token + '<SPECIAL_10>System\n' -}}
{%- for m in messages -%}
{%- set words = (m.content or '').replace('/think', '').replace('/no_think', '').strip() -%}
{%- if m.role == 'system' -%}{{- words -}}{%- endif -%}
{%- if loop.first -%}{{- '\n' -}}{%- endif -%}
{%- if m.role == 'user' or m.role == 'tool' -%}{{- '<SPECIAL_11>User\n' + words + '\n' -}}{%- endif -%}
{%- if m.role == 'assistant' -%}
{%- set said = (m.content or '').strip() -%}
{%- if not loop.last and '</think>' in said -%}{%- set said = said.split('</think>')[1].strip() -%}{%- endif -%}
{%- if said or not loop.last -%}
{{- '<SPECIAL_11>Assistant\n' + ('' if not loop.last else '<think>\n' if ns.think else '<think></think>') + said -}}
{{- '\n<SPECIAL_12>\n' -}}
{%- endif -%}
{%- if m.tool_calls -%}
{{- '<SPECIAL_11>Assistant\n<TOOLCALL>[' -}}
{%- for c in m.tool_calls -%}{{- '{"name": "' + c.function.name + '", "arguments": ' -}}
{{- c.function.arguments | tojson + '}' -}}{%- endfor -%}{{- ']</TOOLCALL>\n<SPECIAL_12>\n' -}}
{%- endif -%}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<SPECIAL_11>Assistant\n' + ('<think>\n' if ns.think else '<think></think>') -}}
{%- endif -%}"""

# As Qwen 3 does it: a prompt ends with the header alone, so that the model writes <think> itself.
OPEN_HEADER = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content else '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}
{{- part.text if part.type == 'text' else '<img><image></img>' -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""

# No special token opens a turn, so text could pretend to; and nothing switches.
PLAIN_HEADER = """
{%- for m in messages -%}
{{- '### ' + m.role + ':\n' + m.content + ('</s>' if m.role == 'assistant' else '') + '\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '### assistant:\n' -}}{%- endif -%}"""
