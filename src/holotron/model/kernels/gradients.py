"""The training kernels of cpu.cpp as differentiable functions, each differentiable once.

`ops` is what `kernels.cpu()` returns; tensors are fp32 on the CPU. The plain functions that they stand in for say what
they compute: fused.py for norms, convolution and squared ReLU, ssd.py for the scan.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def serves(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.dtype == torch.float32 and t.is_cpu) for t in tensors)


class SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(x)
        squared: Tensor = ops.squared_relu(x)
        return squared

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.ops.squared_relu_backward(gradient, *ctx.saved_tensors)


class Norm(torch.autograd.Function):
    """x, z (rows, channels), z a gate or None; weight (groups, channels of a group)."""

    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, z: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        ctx.ops, ctx.eps = ops, eps
        ctx.save_for_backward(x, z, weight)
        normed: Tensor = ops.norm(x, z, weight, eps)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        dx = torch.empty(x.shape)
        dz = None if z is None else torch.empty(z.shape)
        dweight = ctx.ops.norm_backward(gradient, x, z, weight, ctx.eps, dx, dz)
        return None, dx, dz, dweight, None


class ConvSilu(torch.autograd.Function):
    """x (B, T, C), taps (K, C), the newest token's last."""

    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, taps: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(x, taps, bias, segments)
        out: Tensor = ops.conv_silu(x, taps, bias, None, segments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, bias, segments = ctx.saved_tensors
        dx = torch.empty(x.shape)
        sums = ctx.ops.conv_silu_backward(gradient, x, taps, bias, segments, dx)
        return None, dx, sums[:-1], None if bias is None else sums[-1], None


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        state: Tensor,
        segments: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.ops = ops
        ctx.save_for_backward(x, dt, a, b, c, d, state, segments)
        y, last = ops.scan(x, dt, a, b, c, d, state, segments)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        x, b = inputs[0], inputs[3]
        dxbc, ddt, da, dd, dstate = ctx.ops.scan_backward(dy, dlast, *inputs)
        dx, db, dc = split_channels(dxbc, x.shape[2], x.shape[3], b.shape[2])
        return None, dx, ddt, da.sum(0), db, dc, dd.sum(0), dstate, None


def split_channels(xbc: Tensor, heads: int, width: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, L, H P + 2 G N) as views x (B, L, H, P), B and C (B, L, G, N)."""
    shared = (xbc.shape[-1] - heads * width) // 2
    x, b, c = torch.split(xbc, [heads * width, shared, shared], -1)
    b, c = (t.view(*t.shape[:2], groups, shared // groups) for t in (b, c))
    return x.view(*x.shape[:2], heads, width), b, c


class Attention(torch.autograd.Function):
    """q (B, heads, T, size), k, v (B, kv heads, S, size); starts (B, T) or None: the first key that a query sees."""

    @staticmethod
    def forward(ctx: Any, ops: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
        out, lse = ops.attention(q, k, v, starts)
        ctx.ops = ops
        ctx.save_for_backward(out, lse, q, k, v, starts)
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.ops.attention_backward(gradient, *ctx.saved_tensors), None


class MixerCore(torch.autograd.Function):
    """All of a Mamba-2 mixer between its projections, from zero states: its gradient is written into one tensor, where
    the parts' own would be gathered by copies.

    zxbcdt (B, T, W + C + H) as in_proj leaves it; taps (K, C); dt_bias, a, d (H,); weight (G, W / G), W = H P;
    segments (B, T) or None. Returns (B, T, W).
    """

    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        zxbcdt: Tensor,
        taps: Tensor,
        bias: Tensor | None,
        dt_bias: Tensor,
        a: Tensor,
        d: Tensor,
        weight: Tensor,
        eps: float,
        segments: Tensor | None,
    ) -> Tensor:
        heads, groups, width = len(a), len(weight), weight.numel()
        z, before, raw = torch.split(zxbcdt, [width, taps.shape[1], heads], -1)
        xbc = ops.conv_silu(before, taps, bias, None, segments)
        x, b, c = split_channels(xbc, heads, width // heads, groups)
        dt = F.softplus(raw + dt_bias)
        zeros = torch.zeros(len(x), heads, x.shape[-1], b.shape[-1])
        y, _ = ops.scan(x, dt, a, b, c, d, zeros, segments)
        ctx.ops, ctx.eps = ops, eps
        ctx.save_for_backward(zxbcdt, taps, bias, dt_bias, a, d, weight, segments, xbc, dt, y)
        normed: Tensor = ops.norm(y.view(-1, width), z.flatten(0, 1), weight, eps)
        return normed.view(z.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zxbcdt, taps, bias, dt_bias, a, d, weight, segments, xbc, dt, y = ctx.saved_tensors
        heads, groups, width = len(a), len(weight), weight.numel()
        sizes = [width, taps.shape[1], heads]
        (z, before, raw), whole = torch.split(zxbcdt, sizes, -1), torch.empty(zxbcdt.shape)
        dz, dbefore, draw = torch.split(whole, sizes, -1)
        dy = torch.empty(y.shape)
        flat = gradient.reshape(-1, width), y.view(-1, width), z.flatten(0, 1)
        dweight = ctx.ops.norm_backward(*flat, weight, ctx.eps, dy.view(-1, width), dz.flatten(0, 1))
        x, b, c = split_channels(xbc, heads, width // heads, groups)
        zeros = torch.zeros(len(x), heads, x.shape[-1], b.shape[-1])
        dxbc, ddt, da, dd, _ = ctx.ops.scan_backward(dy, zeros, x, dt, a, b, c, d, zeros, segments)
        sums = ctx.ops.conv_silu_backward(dxbc, before, taps, bias, segments, dbefore)
        torch.mul(ddt, torch.sigmoid(raw + dt_bias), out=draw)
        dbias = None if bias is None else sums[-1]
        return None, whole, sums[:-1], dbias, draw.sum((0, 1)), da.sum(0), dd.sum(0), dweight, None, None
