"""A linear layer that multiplies through oneDNN on CPUs, where it pays.

torch's fp32 matrix product on x86 is MKL's, which leaves the wide vector units of non-Intel CPUs idle; oneDNN, which
torch also ships and uses for convolutions and 16-bit products, does not. On a Zen 5 core it is 1.5 to 2.3 times as
fast, on Intel CPUs about even. Its kernels are made once for each shape, so small products stay where they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORTHWHILE = 2**23  # multiplications in one product
ROWS = 32  # fewer rows (decoding) are bound by reading the weight


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    """x (.., in) times weight (out, in) transposed, both possibly views; no gradient."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()  # with gaps between rows oneDNN takes its reference code, a thousand times slower
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


class _OneDnnLinear(torch.autograd.Function):
    """x W^T and its two gradients, each one oneDNN product on views, without copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = onednn(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
            wide = weight.shape[0] > weight.shape[1]  # the longer side last is faster
            dw = onednn(rows[0].t(), rows[1].t()).t() if wide else onednn(rows[1].t(), rows[0].t())
        return dx, dw


def onednn_serves(x: Tensor) -> bool:
    """Whether x is fp32 on a CPU, outside autocast, and this torch has oneDNN switched on."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch._C._get_mkldnn_enabled()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and not torch.is_autocast_enabled("cpu")
    )


def worthwhile(x: Tensor, weight: Tensor) -> bool:
    """Whether x (..., in) W^T, weight (out, in), goes through oneDNN: where it can, and is large enough."""
    rows = x.numel() // max(x.shape[-1], 1)
    large = rows >= ROWS and rows * weight.numel() >= WORTHWHILE
    return large and weight.dtype == torch.float32 and onednn_serves(x)


class Linear(nn.Linear):
    """nn.Linear without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.smallest = max(ROWS * in_features, WORTHWHILE // out_features)  # numbers in x; decoding asks no further

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < self.smallest or not worthwhile(x, self.weight):
            return F.linear(x, self.weight)
        if torch.is_grad_enabled():
            product: Tensor = _OneDnnLinear.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return product
        return onednn(x, self.weight)
