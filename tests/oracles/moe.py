"""A layer of experts, one token and one expert at a time in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Route:
    """Of one token. `margin` is by how much the choice was made: rounding below it cannot change it."""

    experts: list[int]
    weights: list[Tensor]
    margin: float


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> Route:
    """x (hidden), gate (E, hidden), bias (E)."""
    scores = [1 / (1 + torch.exp(-(row.double() * x.double()).sum())) for row in gate]
    wanted = [float(score.detach()) + float(b.detach()) for score, b in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    allowed, margin = list(range(len(scores))), float("inf")
    if groups > 1:
        totals = [sum(sorted(wanted[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        ranking = sorted(range(groups), key=lambda g: -totals[g])
        if top_groups < groups:
            margin = totals[ranking[top_groups - 1]] - totals[ranking[top_groups]]
        allowed = [e for e in allowed if e // size in ranking[:top_groups]]
    ranking = sorted(allowed, key=lambda e: -wanted[e])
    if top_k < len(ranking):
        margin = min(margin, wanted[ranking[top_k - 1]] - wanted[ranking[top_k]])
    experts = ranking[:top_k]
    total = torch.stack([scores[e] for e in experts]).sum() + 1e-20 if normalise else 1.0
    return Route(experts, [scores[e] / total * scale for e in experts], margin)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down max(up x, 0)^2 for x (n), up (m, n), down (o, m)."""
    inner = up.double() @ x
    return down.double() @ torch.where(inner > 0, inner * inner, torch.zeros_like(inner))


def moe(weights: dict[str, Tensor], x: Tensor, **routing: int | bool | float) -> tuple[Tensor, list[Route]]:
    """Output (T, hidden) for x (T, hidden), and how each token was routed.

    `weights` maps released keys below `mixer.` to tensors; only experts that are chosen are looked up. `routing`
    as for `route`.
    """
    outputs, routes = [], []
    for token in x.double():
        found = route(token, weights["gate.weight"], weights["gate.e_score_correction_bias"], **routing)  # type: ignore[arg-type]
        latent = "fc1_latent_proj.weight" in weights
        inner = weights["fc1_latent_proj.weight"].double() @ token if latent else token
        total = torch.zeros_like(inner)
        for expert, weight in zip(found.experts, found.weights, strict=True):
            up, down = (weights[f"experts.{expert}.{name}_proj.weight"] for name in ("up", "down"))
            total = total + weight * mlp(inner, up, down)
        if latent:
            total = weights["fc2_latent_proj.weight"].double() @ total
        up, down = (weights[f"shared_experts.{name}_proj.weight"] for name in ("up", "down"))
        outputs.append(total + mlp(token, up, down))
        routes.append(found)
    return torch.stack(outputs), routes
