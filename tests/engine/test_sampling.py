from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from holotron.engine import SamplingParams, StructuredOutputs
from holotron.engine.sampler import choose, probabilities, top_logprobs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", -1),
        ("logprobs", 65),
        ("stop", [""]),
        ("stop_token_ids", ["a"]),
        ("structured_outputs", {"json": {}}),
    ],
)
def test_bad_params_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "exactly one"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[]"}, "object"),
        ({"json": 3}, "schema"),
        ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": [""]}, "choice"),
    ],
)
def test_bad_structured_outputs_say_why(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**given)


def test_ignore_eos_does_not_go_with_a_grammar() -> None:
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a"))


def slow_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """The filters spelled out over a sorted list."""
    weights = [math.exp(v / params.temperature) for v in logits]
    if params.top_k:
        floor = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [w if w >= floor else 0.0 for w in weights]
    shares = [w / sum(weights) for w in weights]
    if params.top_p < 1:
        kept, total = set(), 0.0
        for i in sorted(range(len(shares)), key=lambda i: -shares[i]):
            if total < params.top_p:
                kept.add(i)
            total += shares[i]
        shares = [s if i in kept else 0.0 for i, s in enumerate(shares)]
    shares = [s if s >= params.min_p * max(shares) else 0.0 for s in shares]
    return [s / sum(shares) for s in shares]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=2.0, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_filters_agree_with_the_slow_way(params: SamplingParams) -> None:
    for seed in range(20):
        logits = torch.randn(17, generator=torch.Generator().manual_seed(seed)) * 3
        found = probabilities(logits, params)
        assert torch.allclose(found, torch.tensor(slow_probabilities(logits.tolist(), params)).double(), atol=1e-6)


def test_choices_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, -torch.inf, 2.0])
    params = SamplingParams(temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([choose(logits, params, generator) for _ in range(4000)]), minlength=4)
    assert torch.allclose(counts / 4000, logits.softmax(-1), atol=0.03)
    assert counts[2] == 0


def test_greedy_takes_the_best() -> None:
    assert choose(torch.tensor([0.0, 3.0, 1.0]), SamplingParams(), torch.Generator()) == 1


def test_top_logprobs_leave_out_forbidden_tokens() -> None:
    logprobs = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf]).log_softmax(-1)
    assert list(top_logprobs(logprobs, 0, 4)) == [2, 0]
    assert list(top_logprobs(logprobs, 0, 1)) == [2, 0]
