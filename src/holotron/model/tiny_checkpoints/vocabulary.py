"""Byte-level tokenizers with the special tokens of each generation of releases, where possible at their own ids."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# A few merges, so that cutting a text in two and joining the tokens is not the same as tokenizing it whole.
_MERGES = (("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("<", "/"), ("Ġ", "a"))
_MISTRAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]",
)  # fmt: skip
_CHATML = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>",
)  # fmt: skip
_RESERVED = 32  # releases keep a thousand ids for special tokens; here the first 32


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Special tokens before and after the text tokens, in the order of their ids; `template` is a chat template."""

    first: tuple[str, ...]
    last: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str | None
    template: str

    def id(self, token: str) -> int:
        """The id of a special token. Raises ValueError if there is none such."""
        if token in self.first:
            return self.first.index(token)
        return self.text_end + self.last.index(token)

    @property
    def text_end(self) -> int:
        """The first id after the bytes and merged pieces."""
        return len(self.first) + 256 + len(_MERGES)

    def __len__(self) -> int:
        return self.text_end + len(self.last)

    def tokenizer(self, template: str) -> PreTrainedTokenizerFast:
        """The tokenizer, with the text of its chat template."""
        pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
        ids = {token: i for i, token in enumerate([*self.first, *pieces, *self.last])}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(_MERGES)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*self.first, *self.last)])
        named = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad}
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer,
            chat_template=template,
            clean_up_tokenization_spaces=False,
            **{name: token for name, token in named.items() if token},
        )


def _reserve(*specials: str) -> tuple[str, ...]:
    return (*specials, *(f"<SPECIAL_{i}>" for i in range(len(specials), _RESERVED)))


_OMNI = (
    *_reserve(*_MISTRAL, *_CHATML, "<image>", "<img>", "</img>", "<video>")[:27],
    "<so_embedding>",
    *(f"<SPECIAL_{i}>" for i in range(28, _RESERVED)),
)
_VL = ("<image>", "<img>", "</img>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>", "<video>")
_QWEN = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip

TEXT_V2 = Vocabulary(_reserve(*_MISTRAL), (), "<s>", "<SPECIAL_12>", None, "nemotron_v2.jinja")
VL_V2 = Vocabulary(_reserve(*_MISTRAL), _VL, "<s>", "<SPECIAL_12>", None, "nemotron_v2.jinja")
TEXT_V3 = Vocabulary(_reserve(*_MISTRAL, *_CHATML), (), "<s>", "<|im_end|>", None, "chatml.jinja")
OMNI_V3 = Vocabulary(_OMNI, (), "<s>", "<|im_end|>", None, "chatml.jinja")
QWEN3 = Vocabulary((), _QWEN, None, "<|im_end|>", "<|endoftext|>", "chatml.jinja")
