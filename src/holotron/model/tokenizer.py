"""Tokenizers: how a checkpoint's is loaded, and one made here that holds whole pieces of what a policy writes most.

A 50 k vocabulary at the pilot's width would be larger than the rest of the model. Here: 256 bytes, the family's
special tokens, pieces given by the caller (JSON skeletons, chat markers), and one token for each `,"x":N` and
`,"y":N` with N in 0..1000, so that a click takes a handful of tokens. Decoding gives plain text back, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from holotron.model.config import ConfigError
from holotron.model.hub import read_json

PAD, BOS, EOS = "<pad>", "<s>", "<SPECIAL_12>"
SYSTEM, ROLE = "<SPECIAL_10>", "<SPECIAL_11>"
IMAGE, IMAGE_START, IMAGE_END = "<image>", "<img>", "</img>"
SPECIALS = (PAD, BOS, EOS, SYSTEM, ROLE, IMAGE, IMAGE_START, IMAGE_END)
COORDINATES = 1001
# The letters' part of the Tekken expression, and the digits' part of the one some conversions wrote in its place.
_TEKKEN, _MISCONVERTED = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{N}{1,3}"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint folder, from its tokenizer.json alone; code that its files name is never run.

    Its chat template is read too, from chat_template.jinja, tokenizer_config.json or chat_template.json, in this order.
    Raises ConfigError.
    """
    values = read_json(folder, "tokenizer.json")
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, fix_mistral_regex=_is_mistral_style(values)
        )
    except Exception as error:  # the tokenizers library raises bare Exception for what it cannot read
        raise ConfigError(f"{folder}/tokenizer.json cannot be used: {error}") from error
    if not tokenizer.chat_template and (folder / "chat_template.json").exists():
        tokenizer.chat_template = read_json(folder, "chat_template.json").get("chat_template")
    return tokenizer


def _is_mistral_style(values: dict[str, Any]) -> bool:
    """Whether the pre-tokenizer splits by the Tekken expression, or by the one it was misconverted to.

    transformers 5 mends the second (`fix_mistral_regex`) in folders whose config.json names a Mistral model or none.
    It replaces whatever pre-tokenizer it finds there, so tokenizers of another kind must not ask for it.
    """
    steps = values.get("pre_tokenizer") or {}
    first = (steps.get("pretokenizers") or [{}])[0] if steps.get("type") == "Sequence" else steps
    pattern = (first.get("pattern") or {}).get("Regex", "") if first.get("type") == "Split" else ""
    return _TEKKEN in pattern or _MISCONVERTED in pattern


def build_tokenizer(pieces: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """A tokenizer with ids: bytes 0..255, specials, pieces in order, x tokens, y tokens.

    Raises ValueError for a piece that is empty, repeated, or the spelling of a special or coordinate token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    coordinates = [f',"{axis}":{n}' for axis in "xy" for n in range(COORDINATES)]
    seen = set(SPECIALS) | set(coordinates)
    for piece in pieces:
        if not piece or piece in seen:
            raise ValueError(f"tokenizer piece {piece!r} is empty, repeated or reserved")
        seen.add(piece)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p in (*pieces, *coordinates)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token of the vocabulary. Raises ValueError if it has none."""
    found = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(found, int):
        raise ValueError(f"the tokenizer has no token {token!r}")
    return found


def coordinate_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """First ids of the x and y runs, for `HolotronConfig.coordinate_tokens`."""
    first = {axis: token_id(tokenizer, f',"{axis}":0') for axis in "xy"}
    for axis, start in first.items():
        if token_id(tokenizer, f',"{axis}":{COORDINATES - 1}') != start + COORDINATES - 1:
            raise ValueError(f"the {axis} coordinate tokens are not contiguous in this tokenizer")
    return first
