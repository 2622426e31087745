"""Attention heads of any width in the widths that vLLM has kernels for."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from holotron.model.config import ConfigError

# Of its CPU attention (vllm/v1/attention/backends/cpu_attn.py); kernels for GPUs take these too.
WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def attention_width(head_dim: int) -> int:
    """The narrowest width with a kernel that holds a head. Raises ConfigError."""
    for width in WIDTHS:
        if width >= head_dim:
            return width
    raise ConfigError(f"head_dim {head_dim} is wider than vLLM's attention goes ({WIDTHS[-1]})")


def widen(name: str, weight: Tensor, narrow: int, wide: int) -> Tensor:
    """The weight of that name for heads of `wide` instead of `narrow`: the new part of each head is zero.

    Scores stay as they were: what divides them by sqrt(wide) finds them larger by sqrt(wide / narrow), in float32 so as
    not to round a weight stored in 16 bits a second time. Weights of other layers come back as they are.
    """
    kind = name.split(".")[-2] if "." in name else ""
    if narrow == wide or kind not in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return weight
    if kind == "o_proj":
        return F.pad(weight.unflatten(1, (-1, narrow)), (0, wide - narrow)).flatten(1)
    heads = F.pad(weight.unflatten(0, (-1, narrow)), (0, 0, 0, wide - narrow)).flatten(0, 1)
    return heads.float() * (wide / narrow) ** 0.5 if kind == "q_proj" else heads
