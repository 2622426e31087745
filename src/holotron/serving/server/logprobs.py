"""Log probabilities of output tokens in the two shapes clients know."""

from __future__ import annotations

import math
from typing import Any

from holotron.engine.sequence import Sequence
from holotron.serving.server.reply import Spelling

_LEAST = -9999.0  # for a token that was impossible: JSON has no infinity


def chat_logprobs(spelling: Spelling, sequence: Sequence, start: int, end: int | None = None) -> dict[str, Any]:
    """Those of the output tokens from `start` to `end`, with as many alternatives as were asked for."""
    wanted = sequence.params.logprobs or 0
    content = []
    for token, found in zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True):
        best = [_entry(spelling, other, value) for other, value in _ranked(found)[:wanted]]
        content.append({**_entry(spelling, token, found.get(token, _LEAST)), "top_logprobs": best})
    return {"content": content, "refusal": None}


def text_logprobs(spelling: Spelling, sequence: Sequence, start: int, end: int | None, offset: int) -> dict[str, Any]:
    """The same in the shape of /v1/completions; `offset` is where the text of the first token starts."""
    wanted = sequence.params.logprobs or 0
    tokens, values, best, offsets = [], [], [], []
    for token, found in zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True):
        text = spelling.of([token])
        tokens.append(text)
        values.append(_finite(found.get(token, _LEAST)))
        best.append({spelling.of([other]): _finite(value) for other, value in _ranked(found)[:wanted]})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}


def _entry(spelling: Spelling, token: int, value: float) -> dict[str, Any]:
    return {"token": spelling.of([token]), "logprob": _finite(value), "bytes": list(spelling(token))}


def _ranked(found: dict[int, float]) -> list[tuple[int, float]]:
    return sorted(found.items(), key=lambda item: -item[1])


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
