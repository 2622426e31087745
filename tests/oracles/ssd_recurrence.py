"""The Mamba-2 mixer one token at a time in float64: slow, and as close to the equations as code gets."""

from __future__ import annotations

import torch
from torch import Tensor


def mamba2_mixer(
    weights: dict[str, Tensor], u: Tensor, heads: int, head_dim: int, groups: int, state_size: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Output (T, hidden) for input u (T, hidden), and the last state (heads, head_dim, state_size).

    `weights` is the state dict of one mixer, or leaves that want gradients: nothing is written in place, so autograd
    through these steps gives the reference gradients. No time-step clamp.
    """
    w = {name: value.double() for name, value in weights.items()}
    width, bc = heads * head_dim, groups * state_size
    kernel = w["conv1d.weight"].shape[-1]
    z, xbc, dt = (u.double() @ w["in_proj.weight"].T).split([width, width + 2 * bc, heads], dim=-1)
    a = -torch.exp(w["A_log"])
    state = [torch.zeros(head_dim, state_size, dtype=torch.float64)] * heads
    outputs = []
    for t in range(len(u)):
        conv = w.get("conv1d.bias", torch.zeros(width + 2 * bc, dtype=torch.float64))
        for j in range(kernel):
            if (s := t - kernel + 1 + j) >= 0:
                conv = conv + w["conv1d.weight"][:, 0, j] * xbc[s]
        conv = conv / (1 + torch.exp(-conv))
        x = conv[:width].view(heads, head_dim)
        b = conv[width : width + bc].view(groups, state_size)
        c = conv[width + bc :].view(groups, state_size)
        step = torch.log1p(torch.exp(dt[t] + w["dt_bias"]))
        group = [h // (heads // groups) for h in range(heads)]
        state = [torch.exp(step[h] * a[h]) * state[h] + torch.outer(step[h] * x[h], b[group[h]]) for h in range(heads)]
        y = torch.stack([state[h] @ c[group[h]] + w["D"][h] * x[h] for h in range(heads)])
        gated = (y.flatten() * z[t] / (1 + torch.exp(-z[t]))).view(groups, -1)
        normed = gated / torch.sqrt(gated.pow(2).mean(-1, keepdim=True) + eps)
        outputs.append((normed.flatten() * w["norm.weight"]) @ w["out_proj.weight"].T)
    return torch.stack(outputs), torch.stack(state)
