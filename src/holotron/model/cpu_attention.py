"""Causal attention on a CPU in blocks: a C++ kernel where kernels are built (see kernels/), else products by oneDNN
(see linear.py) for blocks of queries.

Blocks skip what lies behind them, and the scores of one block stay in cache. Scores are made again in the backward
pass, so that memory grows with the length and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotron.model import kernels
from holotron.model.kernels import gradients
from holotron.model.linear import onednn, onednn_serves

BLOCK = 128


def kernel(q: Tensor) -> Any | None:
    """The kernels, where they take q (B, heads, T, size) and gain by it: a few tokens are done before keys are laid
    out for them."""
    return kernels.cpu() if gradients.serves(q) and q.shape[3] % 16 == 0 and q.shape[2] >= 16 else None


def serves(q: Tensor) -> bool:
    """Whether `causal_attention` takes q (B, heads, T, size) and gains by it; blocks do where there are gradients."""
    if kernel(q) is not None:
        return True
    return torch.is_grad_enabled() and onednn_serves(q) and q.shape[2] >= 2 * BLOCK and q.shape[3] >= 16


def kernel_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor | None:
    """softmax(q k^T / sqrt(size)) v over earlier tokens and the token itself, or None where `kernel` is.

    q (B, heads, T, size); k, v (B, kv heads, S, size): the queries are the last T of S tokens. segments (B, T), with
    S = T: the document of each token, the tokens of one next to each other, to which its attention is kept.
    """
    if (ops := kernel(q)) is None or not gradients.serves(k, v):
        return None
    starts = None
    if segments is not None:
        opens = torch.ones_like(segments, dtype=torch.bool)
        opens[:, 1:] = segments[:, 1:] != segments[:, :-1]
        starts = torch.where(opens, torch.arange(segments.shape[1]), 0).cummax(1).values
    if not torch.is_grad_enabled():
        mixed: Tensor = ops.attention(q, k, v, starts)[0]
        return mixed
    mixed = gradients.Attention.apply(ops, q, k, v, starts)  # type: ignore[no-untyped-call]
    return mixed


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(size)) v over earlier tokens and the token itself. Differentiable once.

    q (B, heads, T, size); k, v (B, kv heads, T, size), each shared by consecutive heads; fp32. Returns q's shape.
    """
    if (mixed := kernel_attention(q, k, v)) is not None:
        return mixed
    out: Tensor = _CausalAttention.apply(q, k.contiguous(), v.contiguous())  # type: ignore[no-untyped-call]
    return out


def blocks(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int, int, Tensor]]:
    """(row, kv head, first query, end, weights) over all blocks; weights (heads of the kv head * queries, end)."""
    batch, kv_heads, per, length, size = q.shape
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1)
    for row in range(batch):
        for head in range(kv_heads):
            for start in range(0, length, BLOCK):
                end = min(start + BLOCK, length)
                queries = end - start
                scores = onednn(q[row, head, :, start:end].reshape(-1, size), k[row, head, :end])
                scores.view(per, queries, end)[..., start:].masked_fill_(later[:queries, :queries], -torch.inf)
                yield row, head, start, end, scores.softmax(-1)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        scaled = (q * q.shape[-1] ** -0.5).contiguous().view(q.shape[0], k.shape[1], -1, *q.shape[2:])
        out = torch.empty(scaled.shape, dtype=q.dtype)
        for row, head, start, end, weights in blocks(scaled, k):
            mixed = onednn(weights, v[row, head, :end].t())
            out[row, head, :, start:end] = mixed.view(out.shape[2], end - start, -1)
        return out.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        scale, size = q.shape[-1] ** -0.5, q.shape[-1]
        scaled = (q * scale).contiguous().view(q.shape[0], k.shape[1], -1, *q.shape[2:])
        gradient = gradient.reshape(scaled.shape)
        dq, dk, dv = torch.empty(scaled.shape, dtype=q.dtype), torch.zeros_like(k), torch.zeros_like(v)
        for row, head, start, end, weights in blocks(scaled, k):
            dout = gradient[row, head, :, start:end].reshape(-1, size)
            dv[row, head, :end] += onednn(weights.t(), dout.t())
            dweights = onednn(dout, v[row, head, :end])
            mean = (dweights * weights).sum(-1, keepdim=True)
            dscores = dweights.sub_(mean).mul_(weights)
            dq[row, head, :, start:end] = onednn(dscores, k[row, head, :end].t()).view(dq.shape[2], end - start, size)
            dk[row, head, :end] += onednn(dscores.t(), scaled[row, head, :, start:end].reshape(-1, size).t())
        return dq.mul_(scale).flatten(1, 2), dk, dv
