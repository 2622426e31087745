"""How a request wants its tokens chosen."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the text must match: exactly one of a JSON schema, a regular expression, or a list of choices.

    JSON comes out compact, without whitespace between its tokens. Raises ValueError.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured_outputs needs exactly one of json, regex, choice; got {given}")
        if self.json is not None and not isinstance(self.json, dict | str):
            raise ValueError(f"structured_outputs.json must be a schema, not {type(self.json).__name__}")
        if isinstance(self.json, str):
            try:
                parsed = json.loads(self.json)
            except json.JSONDecodeError as error:
                raise ValueError(f"structured_outputs.json is not JSON: {error}") from None
            if not isinstance(parsed, dict):
                raise ValueError("structured_outputs.json must be an object")
        if self.choice is not None:
            texts = not isinstance(self.choice, str) and all(isinstance(c, str) and c for c in self.choice)
            if not texts or not self.choice:
                raise ValueError("structured_outputs.choice must be a list of non-empty strings")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off.

    The filters apply to the distribution after the grammar and the temperature, in the order top_k, top_p,
    min_p. `seed` makes a request's choices its own, whatever runs beside it. `logprobs` N reports the N
    likeliest tokens at each place, at temperature 1, after the grammar. Raises ValueError naming the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    use_grounding_head: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0)
        self._number("min_p", 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p must be above 0; use temperature 0 for greedy decoding")
        self._integer("top_k", 0, 2**31)
        self._integer("max_tokens", 1, 2**31)
        if self.seed is not None:
            self._integer("seed", 0, 2**63 - 1)
        if self.logprobs is not None:
            self._integer("logprobs", 0, 64)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError("stop must hold non-empty strings")
        if not all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids):
            raise ValueError("stop_token_ids must hold token ids, integers from 0")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise ValueError("structured_outputs must be a StructuredOutputs")
        if self.ignore_eos and self.structured_outputs is not None:
            raise ValueError("ignore_eos cannot go with structured_outputs: the grammar says where to end")

    def _number(self, field: str, low: float, high: float) -> None:
        value = getattr(self, field)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not low <= value <= high:
            raise ValueError(f"{field} is {value!r}; it must be a number from {low:g} to {high:g}")

    def _integer(self, field: str, low: int, high: int) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{field} is {value!r}; it must be an integer from {low} to {high}")
