"""Elementwise steps whose gradients are written out: fewer passes over memory than autograd takes, which is what they
cost on a CPU. Each is differentiable once, and goes through a C++ kernel where kernels are built (see kernels/)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotron.model import kernels
from holotron.model.kernels import gradients

SMALL = 2**15  # numbers; below, calls cost more than memory


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, fp32: x (.., n), weight (n,), or (.., G, n) and (G, n)."""
    if (ops := kernels.cpu()) is not None and gradients.serves(x, weight):
        return _kernel_norm(ops, x, None, weight, eps)
    if x.device.type != "cpu" or (x.numel() < SMALL and not torch.is_grad_enabled()):
        return (
            F.rms_norm(x, x.shape[-1:], weight, eps)
            if weight.ndim == 1
            else F.rms_norm(x, x.shape[-1:], None, eps) * weight
        )
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of y silu(z) over each of G groups of channels: y, z (.., C) of one dtype, which the result has; weight
    (G, C / G). The mean square is fp32."""
    if (ops := kernels.cpu()) is not None and gradients.serves(y, z, weight):
        return _kernel_norm(ops, y, z, weight, eps)
    gated = y.float() * F.silu(z.float())
    weight = weight.float()
    if len(weight) == 1:
        return rms_norm(gated, weight[0], eps).to(z.dtype)
    return rms_norm(gated.view(*gated.shape[:-1], *weight.shape), weight, eps).view_as(gated).to(z.dtype)


def _kernel_norm(ops: Any, x: Tensor, z: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    channels, grouped = weight.numel(), weight.view(-1, weight.shape[-1])
    rows, gate = x.reshape(-1, channels), None if z is None else z.reshape(-1, channels)
    if torch.is_grad_enabled():
        normed: Tensor = gradients.Norm.apply(ops, rows, gate, grouped, eps)  # type: ignore[no-untyped-call]
    else:
        normed = ops.norm(rows, gate, grouped, eps)
    return normed.view(x.shape)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: Tensor = (x * scale).mul_(weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        share = gradient * normed
        dweight = share.view(-1, *weight.shape).sum(0) if ctx.needs_input_grad[1] else None
        along = share @ weight.unsqueeze(-1) if weight.ndim == 1 else share.mul_(weight).sum(-1, keepdim=True)
        dx = gradient * weight
        dx.addcmul_(normed, along.div_(-x.shape[-1])).mul_(scale)
        return dx, dweight, None


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    if (ops := kernels.cpu()) is not None and gradients.serves(x):
        if not torch.is_grad_enabled():
            quick: Tensor = ops.squared_relu(x)
            return quick
        quick = gradients.SquaredRelu.apply(ops, x)  # type: ignore[no-untyped-call]
        return quick
    if not torch.is_grad_enabled():
        return F.relu(x).square_()
    squared: Tensor = _SquaredRelu.apply(x)  # type: ignore[no-untyped-call]
    return squared


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        dx: Tensor = (gradient * positive).mul_(2)
        return dx


def same_document(segments: Tensor, back: int) -> Tensor:
    """(B, T - back) bool: do token t and token t + back belong to one document? segments (B, T)."""
    return segments[:, back:] == segments[:, : max(segments.shape[1] - back, 0)]


def conv_silu(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """silu(bias + sum_j weight[:, K-1-j] x[t-j]), causal and depthwise, nothing before the first token.

    x (B, T, C); weight (C, K); bias (C,) or None; segments (B, T) int64: no token is reached over a border;
    before (B, K-1, C): the columns before the first, instead of nothing, and not together with segments.
    """
    ops = kernels.cpu() if weight.shape[1] <= kernels.MOST_TAPS and gradients.serves(x, weight, bias, before) else None
    if ops is not None and (before is None or not torch.is_grad_enabled()):
        if not torch.is_grad_enabled():
            quick: Tensor = ops.conv_silu(x, weight.t(), bias, before, segments)
            return quick
        quick = gradients.ConvSilu.apply(ops, x, weight.t(), bias, segments)  # type: ignore[no-untyped-call]
        return quick
    if before is not None:
        x = torch.cat([before, x], 1)
    out: Tensor = _ConvSilu.apply(x, weight, bias, segments)  # type: ignore[no-untyped-call]
    return out if before is None else out[:, before.shape[1] :]


class _ConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
        taps = weight.t().contiguous()  # (K, C)
        before = x * taps[-1] if bias is None else torch.addcmul(bias, x, taps[-1])
        for back in range(1, min(len(taps), x.shape[1])):
            earlier = x[:, :-back]
            if segments is not None:
                earlier = earlier * same_document(segments, back).unsqueeze(-1)
            before[:, back:].addcmul_(earlier, taps[-1 - back])
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, taps, before, segments)
        return F.silu(before)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, before, segments = ctx.saved_tensors
        gradient = torch.ops.aten.silu_backward(gradient, before)
        dtaps = torch.zeros_like(taps)
        dtaps[-1] = (gradient * x).sum((0, 1))
        dx = gradient * taps[-1]
        for back in range(1, min(len(taps), x.shape[1])):
            reached = gradient[:, back:]
            if segments is not None:
                reached = reached * same_document(segments, back).unsqueeze(-1)
            dx[:, :-back].addcmul_(reached, taps[-1 - back])
            dtaps[-1 - back] = (reached * x[:, :-back]).sum((0, 1))
        dbias = gradient.sum((0, 1)) if ctx.has_bias else None
        return dx, dtaps.t(), dbias, None
