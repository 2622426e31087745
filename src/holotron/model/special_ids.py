"""The ids that a model's code must know, resolved from its tokenizer and held against what its configs state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from holotron.model.config import ConfigError
from holotron.model.hub import read_json

# Tokens that end a reply in some checkpoint of the family; configs may name any of them that the tokenizer has.
END_TEXTS = ("<SPECIAL_12>", "<|im_end|>", "</s>", "<|endoftext|>")
_SUB_CONFIGS = ("llm_config", "text_config")
# field -> (config keys for the token's text, the text where no key is there, config keys for its id)
_PLACEHOLDERS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "image": (("img_context_token",), "<image>", ("img_context_token_id", "image_token_id")),
    "image_start": (
        ("img_start_token",),
        "<img>",
        ("img_start_token_id", "image_start_token_id", "vision_start_token_id"),
    ),
    "image_end": (("img_end_token",), "</img>", ("img_end_token_id", "image_end_token_id", "vision_end_token_id")),
    "video": (("video_context_token",), "<video>", ("video_context_token_id", "video_token_id")),
    "audio": (
        ("sound_context_token", "audio_context_token"),
        "<so_embedding>",
        ("sound_context_token_id", "audio_token_id"),
    ),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class SpecialIds:
    """Token ids. `stop` holds every id that ends a reply, `eos` is the tokenizer's own of them; `pad` ends no turn.

    None is a token that this tokenizer lacks.
    """

    bos: int | None
    eos: int
    stop: frozenset[int]
    pad: int
    image: int | None = None
    image_start: int | None = None
    image_end: int | None = None
    video: int | None = None
    audio: int | None = None
    think: int | None = None
    think_end: int | None = None

    @classmethod
    def resolve(
        cls,
        tokenizer: PreTrainedTokenizerFast,
        config_values: Mapping[str, Any],
        generation_values: Mapping[str, Any] | None = None,
    ) -> SpecialIds:
        """From the contents of config.json and generation_config.json. Raises ConfigError.

        Token texts decide; an id that a config states for the same thing must agree. End tokens differ between the
        files of released checkpoints, so any of END_TEXTS may be stated, and all that are stated stop a reply.
        """
        reader = _Reader(tokenizer, config_values, generation_values or {})
        found = {name: reader.placeholder(name) for name in _PLACEHOLDERS}
        if reader.sees and found["image"] is None:
            text = config_values.get("img_context_token", "<image>")
            raise ConfigError(f"config.json has a vision tower, but the tokenizer has no token {text!r} for its images")
        eos, stop = reader.stops()
        special = cls(
            bos=reader.bos(),
            eos=eos,
            stop=stop,
            pad=reader.pad(eos, stop),
            think=reader.id_of("<think>"),
            think_end=reader.id_of("</think>"),
            **found,
        )
        reader.check_sizes(special)
        return special


class _Reader:
    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        parts = {"config.json": config, "generation_config.json": generation}
        parts |= {f"config.json {name}": config[name] for name in _SUB_CONFIGS if isinstance(config.get(name), Mapping)}
        self.parts = parts
        self.specials = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.sees = bool(config.get("vision_config") or config.get("raw_vision_config"))

    def id_of(self, text: str) -> int | None:
        found: int | None = self.tokenizer.backend_tokenizer.token_to_id(text)
        return found

    def text_of(self, token: int) -> str | None:
        found: str | None = self.tokenizer.backend_tokenizer.id_to_token(token)
        return found

    def stated(self, *keys: str) -> Iterator[tuple[str, int]]:
        """Where an id is stated, and the id; lists one by one. Raises ConfigError for what is no id."""
        for where, values in self.parts.items():
            for key in keys:
                value = values.get(key)
                for token in value if isinstance(value, list | tuple) else [value]:
                    if token is None:
                        continue
                    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                        raise ConfigError(f"{where}: {key} is {token!r}, which is no token id")
                    yield f"{where}: {key}", token

    def placeholder(self, name: str) -> int | None:
        text_keys, default, id_keys = _PLACEHOLDERS[name]
        named = next(((key, str(self.config[key])) for key in text_keys if self.config.get(key)), None)
        text = default if named is None else named[1]
        found = self.id_of(text)
        stated = list(self.stated(*id_keys))
        if named is None and found is None and stated:  # a baseline that spells it otherwise and does not say how
            spelled = self.text_of(stated[0][1])
            if spelled is not None and spelled in self.specials and not spelled.startswith("<SPECIAL_"):
                text, found = spelled, stated[0][1]
        for where, token in stated:
            if token != found:
                raise ConfigError(
                    f"{where} is {token} ({self.text_of(token)!r}), but the tokenizer's {text!r} is {found}"
                )
        if named is not None and found is None and (name != "video" and name != "audio"):
            raise ConfigError(f"config.json: {named[0]} is {text!r}, which the tokenizer does not have")
        return found

    def bos(self) -> int | None:
        text = self.tokenizer.bos_token
        found = None if text is None else self.id_of(str(text))
        for where, token in self.stated("bos_token_id"):
            if found is not None and token != found:
                raise ConfigError(
                    f"{where} is {token} ({self.text_of(token)!r}), but the tokenizer's {text!r} is {found}"
                )
        return found

    def stops(self) -> tuple[int, frozenset[int]]:
        text = self.tokenizer.eos_token
        eos = None if text is None else self.id_of(str(text))
        if eos is None:
            raise ConfigError("the tokenizer names no eos_token, so nothing would end a reply")
        stop = {eos}
        for where, token in self.stated("eos_token_id"):
            if token != eos and self.text_of(token) not in END_TEXTS:
                raise ConfigError(
                    f"{where} is {token} ({self.text_of(token)!r}), but the tokenizer's {text!r} is {eos}"
                )
            stop.add(token)
        return eos, frozenset(stop)

    def pad(self, eos: int, stop: frozenset[int]) -> int:
        """The tokenizer's, the configs', <pad>, <unk>, or an unused <SPECIAL_n>: the first that ends no reply.

        A second end token, such as <|endoftext|> where turns end otherwise, pads where there is nothing better.
        """
        text = self.tokenizer.pad_token
        own = None if text is None else self.id_of(str(text))
        ends = {eos, *(self.id_of(turn_end) for turn_end in END_TEXTS[:2])}
        own = None if own in ends else own
        for where, token in self.stated("pad_token_id"):
            if self.text_of(token) is None:
                raise ConfigError(f"{where} is {token}, which the tokenizer does not have")
            if token in ends:
                continue  # released configs do that; whoever masks labels by id would lose the end of every turn
            if own is not None and token != own:
                raise ConfigError(
                    f"{where} is {token} ({self.text_of(token)!r}), but {text or 'another pad'!r} is {own}"
                )
            own = token
        spare = (f"<SPECIAL_{n}>" for n in range(999, 12, -1))  # 10 to 12 are roles and the end of a turn
        others = (self.id_of(candidate) for candidate in ("<pad>", "<unk>", *spare))
        known = [token for token in (own, *others) if token is not None]
        for token in (*(token for token in known if token not in stop), *known[:1]):
            if token not in ends:
                return token
        raise ConfigError(
            "no token can pad: the tokenizer's and the config's pad are missing or end turns, and there is no <pad>, "
            "<unk> or spare <SPECIAL_n>; name a pad_token in tokenizer_config.json"
        )

    def check_sizes(self, special: SpecialIds) -> None:
        ids = {field.name: getattr(special, field.name) for field in fields(special) if field.name != "stop"}
        ids |= {f"stop {token}": token for token in special.stop}
        for where, values in self.parts.items():
            size = values.get("vocab_size")
            for name, token in ids.items():
                if isinstance(size, int) and token is not None and token >= size:
                    text = self.text_of(token)
                    raise ConfigError(f"the tokenizer's {name} {text!r} is {token}, but {where} has vocab_size {size}")


def read_special_ids(folder: Path, tokenizer: PreTrainedTokenizerFast) -> SpecialIds:
    """Those of a checkpoint folder: config.json, and generation_config.json if there. Raises ConfigError."""
    generation = "generation_config.json"
    stated = read_json(folder, generation) if (folder / generation).exists() else None
    return SpecialIds.resolve(tokenizer, read_json(folder, "config.json"), stated)
