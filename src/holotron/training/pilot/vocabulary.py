"""The pilot's tokenizer: bytes, and whole pieces of what the `holotron3` contract makes it read and write."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from holotron.contract import holotron3
from holotron.contract.tool_schema import TOOL_NAMES
from holotron.model.tokenizer import EOS, IMAGE, IMAGE_END, IMAGE_START, ROLE, SYSTEM, build_tokenizer
from holotron.tasks.oracles import THOUGHTS

USER_TURN, ASSISTANT_TURN = f"{ROLE}User\n", f"{ROLE}Assistant\n"

# The system turn becomes one token: the pilot knows a single contract by heart and cannot read a prompt.
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}" + SYSTEM + "{%- else -%}"
    "{{- '" + ROLE + "Assistant\\n' if message.role == 'assistant' else '" + ROLE + "User\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'text' -%}{{- part.text -}}{%- else -%}"
    "" + IMAGE_START + IMAGE + IMAGE_END + "{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message.role == 'assistant' -%}" + EOS + "{%- endif -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + ROLE + "Assistant\\n' -}}{%- endif -%}"
)

_NEXT = '","tool_call":{"tool_name":"'


def pieces() -> list[str]:
    """Everything the pilot reads or writes often, longest spans first being found by the tokenizer itself."""
    pointing = ("click", "double_click", "move_to", "drag_to", "scroll")
    other = [name for name in TOOL_NAMES if name not in pointing and name != "write"]
    return [
        USER_TURN,
        ASSISTANT_TURN,
        holotron3.TASK,
        holotron3.OBSERVATION_OPEN,
        holotron3.OBSERVATION_CLOSE,
        holotron3.OBSERVATION_OPEN + holotron3.EVICTED + holotron3.OBSERVATION_CLOSE,
        holotron3.ANSWER_NOW,
        *(holotron3.TOOL_OUTPUT_OPEN.format(name=name) for name in TOOL_NAMES),
        *(holotron3.ERROR_OPEN.format(name=name) for name in TOOL_NAMES),
        "ok" + holotron3.TOOL_OUTPUT_CLOSE,
        holotron3.TOOL_OUTPUT_CLOSE,
        holotron3.ERROR_CLOSE,
        '{"note":null,"thought":"',
        '{"note":"',
        '","thought":"',
        *THOUGHTS,
        *(f'{_NEXT}{name}","element":"' for name in pointing),
        f'{_NEXT}write","content":"',
        *(f'{_NEXT}{name}"' for name in other),
        ',"button":"left"}}',
        ',"button":"right"}}',
        ',"button":"middle"}}',
        '","press_enter":false,"overwrite":false}}',
        '","press_enter":true,"overwrite":false}}',
        '","press_enter":false,"overwrite":true}}',
        '","press_enter":true,"overwrite":true}}',
        *(f',"direction":"{d}","scroll_size":10}}}}' for d in ("up", "down", "left", "right")),
        '"}}',
        "}}",
    ]


def build_pilot_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(pieces(), CHAT_TEMPLATE)
