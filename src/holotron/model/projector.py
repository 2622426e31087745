"""From the vision tower to the language model: pixel shuffle v2 and the two-layer projector `mlp1`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pixel_shuffle_v2(x: Tensor) -> Tensor:
    """Merges 2 x 2 neighbours: (n, h, w, c) -> (n, h/2, w/2, 4c), channels in the order dy, dx, c.

    Raises ValueError if h or w is odd.
    """
    n, rows, columns, channels = x.shape
    if rows % 2 or columns % 2:
        raise ValueError(f"pixel shuffle needs even sides, got a {rows} x {columns} patch grid")
    pairs = x.reshape(n, rows // 2, 2, columns // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
    return pairs.reshape(n, rows // 2, columns // 2, 4 * channels)


class ProjectorNorm(nn.Module):
    """RMSNorm with the mean square and the product with the weight in float32; the result has x's dtype."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * scaled).to(x.dtype)


class SquaredReLU(nn.Module):
    """relu(x)^2."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


class Projector(nn.Sequential):
    """(..., in_features) -> (..., out_features). As `mlp1` its keys are the released `mlp1.0`, `.1`, `.3`."""

    def __init__(self, in_features: int, hidden: int, out_features: int, eps: float = 1e-5) -> None:
        super().__init__(
            ProjectorNorm(in_features, eps),
            nn.Linear(in_features, hidden, bias=False),
            SquaredReLU(),
            nn.Linear(hidden, out_features, bias=False),
        )
