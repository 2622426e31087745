"""From logits to one token, for one sequence. Nothing here looks at the rest of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from holotron.engine.sampling_params import SamplingParams


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution sampled from: logits (V,), -inf where forbidden -> float64 (V,). temperature > 0."""
    scaled = logits.double() / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -torch.inf)
    share = scaled.softmax(-1)
    if params.top_p < 1:
        ordered, index = share.sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        share = share.index_fill(0, index[beyond], 0.0)
    if params.min_p > 0:
        share = share.masked_fill(share < params.min_p * share.max(), 0.0)
    return share / share.sum()


def choose(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """The index of one token of logits (V,). Equal logits and an equal generator give an equal choice."""
    if params.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits, params), 1, generator=generator))


def top_logprobs(logprobs: Tensor, token: int, count: int) -> dict[int, float]:
    """The `count` likeliest tokens and the chosen one, likeliest first; forbidden tokens are left out."""
    best = logprobs.topk(min(count, len(logprobs)))
    found = {int(i): float(v) for v, i in zip(best.values, best.indices, strict=True) if v > -torch.inf}
    found.setdefault(token, float(logprobs[token]))
    return found
