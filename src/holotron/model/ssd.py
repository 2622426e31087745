"""State-space duality: the Mamba-2 recurrence, step by step for one token and as matrix products for many.

Recurrence (Dao and Gu, "Transformers are SSMs", 2024), per head with A < 0 and group-shared B, C:

    S_t = exp(dt_t A) S_{t-1} + (dt_t x_t) outer B_t          y_t = S_t C_t + D x_t

Chunk form with Q tokens a chunk and l the running sum of dt A inside a chunk:

    y_i = sum_{j<=i} (C_i.B_j) exp(l_i - l_j) dt_j x_j  +  exp(l_i) R C_i  +  D x_i
    R'  = exp(l_Q) R + sum_j exp(l_Q - l_j) (dt_j x_j) outer B_j

Several documents in one row: a pair (i, j) counts only inside one document, R reaches only the tokens that continue
the document in which the chunk before ended, and R' gathers only the document in which the chunk ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holotron.model import kernels
from holotron.model.kernels import gradients


@dataclass(slots=True, frozen=True)
class Borders:
    """Where documents meet inside and between chunks. Booleans with room for heads after the chunks."""

    pair: Tensor  # (B, n, 1, Q, Q) both tokens belong to one document
    ends: Tensor  # (B, n, 1, Q) the token's document is the one in which the chunk ends
    continues: Tensor  # (B, n, 1, Q) the token's document is the one in which the chunk before ended
    passes: Tensor  # (B, n, 1, 1) one document covers the whole chunk and the end of the one before

    @classmethod
    def build(cls, segments: Tensor, chunk: int) -> Borders:
        """segments (B, L); the last chunk is filled up with the last document."""
        fill = segments[:, -1:].expand(-1, -segments.shape[1] % chunk)
        split = torch.cat([segments, fill], 1).view(len(segments), -1, 1, chunk)
        last = split[..., -1:]
        before = torch.cat([split[:, :1, ..., :1], last[:, :-1]], 1)
        return cls(split.unsqueeze(-1) == split.unsqueeze(-2), split == last, split == before, last == before)


def ssd_chunked(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    chunk_size: int | None = None,
    initial_state: Tensor | None = None,
    segments: Tensor | None = None,
    exact: bool = True,
) -> tuple[Tensor, Tensor]:
    """Many tokens at once. Padding tokens must have dt = 0: they leave the state unchanged.

    x (B, L, H, P); dt (B, L, H) after softplus; a (H,) negative; b, c (B, L, G, N) with G dividing H, head h
    using group h // (H / G); d (H,); initial_state (B, H, P, N) or None for zeros. All fp32 (or all fp64).
    chunk_size None takes what is fastest on a CPU: a C++ kernel that goes token by token where kernels are built
    (see kernels/), else the quickest length for matrix products. It changes rounding alone.
    segments (B, L) integers that never fall along a row: the state starts from zeros where they change, and
    initial_state belongs to the document of the first token.
    exact False says that inputs were 16 bit, so that on CUDA kernels may round products (see ssd_kernels.py).
    Returns y (B, L, H, P) and the state after the last token (B, H, P, N), in the dtype of x. Differentiable once.
    """
    batch, length, heads, width = x.shape
    state = x.new_zeros(batch, heads, width, b.shape[-1]) if initial_state is None else initial_state.to(x.dtype)
    if not length:
        return x, state
    chunk = chunk_size or cpu_chunk(width + b.shape[-1])
    if x.device.type == "cuda":
        from holotron.model import ssd_kernels

        kernel = ssd_kernels.installed() if ssd_kernels.serves(exact) else None
        if kernel is not None:
            return kernel(x, dt, a, b, c, d, chunk, state, segments)
    if chunk_size is None and (ops := kernels.cpu()) is not None and gradients.serves(x, dt, a, b, c, d, state):
        inputs = (x, dt, a, b, c, d, state, None if segments is None else segments.long())
        scanned = gradients.Scan.apply(ops, *inputs) if torch.is_grad_enabled() else ops.scan(*inputs)  # type: ignore[no-untyped-call]
        return scanned[0], scanned[1]
    y, state = _ChunkScan.apply(x, dt, a, b, c, d, state, segments, min(chunk, length))  # type: ignore[no-untyped-call]
    return y, state


def cpu_chunk(size: int) -> int:
    """Short chunks do less work between tokens, long ones less between states of P x N, `size` being P + N."""
    return 32 if size <= 128 else 64


class _ChunkScan(torch.autograd.Function):
    """The chunk form and its gradient, both as batched matrix products over (batch, chunk, head).

    Names: Q tokens a chunk; `pairs` exp(l_i - l_j) for j <= i; `start` exp(l_i); `end` exp(l_Q - l_j);
    `skip` exp(l_Q). Time steps and decay are folded into the small factors, D into the diagonal, so that x and y are
    each touched once outside of matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        state: Tensor,
        segments: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        xq, bq, cq = (into_chunks(t, chunk) for t in (x, b, c))  # (B, n, H or G, Q, P or N)
        dtq = into_chunks(dt.unsqueeze(-1), chunk).squeeze(-1)  # (B, n, H, Q)
        pairs, start, end, skip = decays(dtq, a, segments, chunk)
        weights = times(cq @ bq.transpose(-1, -2), pairs).mul_(dtq.unsqueeze(-2))
        weights.diagonal(dim1=-2, dim2=-1).add_(d.unsqueeze(-1))
        added = product(xq.transpose(-1, -2), times(bq, (end * dtq).unsqueeze(-1)))  # (B, n, H, P, N)
        entering = torch.empty_like(added)
        entering[:, 0] = state
        for i in range(1, added.shape[1]):
            torch.addcmul(added[:, i - 1], skip[:, i - 1, :, None, None], entering[:, i - 1], out=entering[:, i])
        state = torch.addcmul(added[:, -1], skip[:, -1, :, None, None], entering[:, -1])
        y = product(weights, xq)
        y = product(times(cq, start.unsqueeze(-1)), entering.transpose(-1, -2), y)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(xq, dtq, a, bq, cq, d, pairs, start, end, skip, entering)
            ctx.length = length
        return from_chunks(y, length), state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        xq, dtq, a, bq, cq, d, pairs, start, end, skip, entering = ctx.saved_tensors
        length, groups = ctx.length, bq.shape[2]
        dyq = into_chunks(dy, xq.shape[3])
        # across chunks, last to first
        scaled_c = times(cq, start.unsqueeze(-1))
        dentering = product(dyq.transpose(-1, -2), scaled_c)
        dadded = torch.empty_like(dentering)
        dadded[:, -1] = dstate
        for i in reversed(range(1, dadded.shape[1])):
            torch.addcmul(dentering[:, i], skip[:, i, :, None, None], dadded[:, i], out=dadded[:, i - 1])
        dstate = torch.addcmul(dentering[:, 0], skip[:, 0, :, None, None], dadded[:, 0])
        dskip = (dadded * entering).sum((-1, -2))
        # inside a chunk
        unscaled = times(cq @ bq.transpose(-1, -2), pairs)
        weights = unscaled * dtq.unsqueeze(-2)
        weights.diagonal(dim1=-2, dim2=-1).add_(d.unsqueeze(-1))
        dweights = product(dyq, xq.transpose(-1, -2))
        reach = end * dtq
        dx = product(weights.transpose(-1, -2), dyq)
        dx = product(times(bq, reach.unsqueeze(-1)), dadded.transpose(-1, -2), dx)
        dd = dweights.diagonal(dim1=-2, dim2=-1).sum((0, 1, 3))
        dscores = over_heads(dweights * pairs * dtq.unsqueeze(-2), groups)
        flow = dweights * unscaled
        itself = flow.diagonal(dim1=-2, dim2=-1).clone()
        flow.diagonal(dim1=-2, dim2=-1).zero_()  # a token and itself: no decay between, and none in its gradient
        column = flow.sum(-2)
        ddt = column + itself
        # l of each token, in fp64 as it is summed up along the chunk below
        drun = (flow @ dtq.unsqueeze(-1)).squeeze(-1).double() - column.double() * dtq
        dscaled_c = product(dyq, entering)
        drun += (dscaled_c * scaled_c).sum(-1)
        dscaled_b = product(xq, dadded)
        dreach = times(bq, dscaled_b).sum(-1)
        ddt += dreach * end
        out = dreach.double() * reach
        drun -= out
        drun[..., -1] += out.sum(-1) + dskip * skip
        dc = over_heads(dscaled_c * start.unsqueeze(-1), groups) + dscores @ bq
        db = over_heads(dscaled_b * reach.unsqueeze(-1), groups) + dscores.transpose(-1, -2) @ cq
        ddecay = drun + drun.sum(-1, keepdim=True) - drun.cumsum(-1)
        da = (ddecay * dtq).sum((0, 1, 3)).to(a.dtype)
        ddt += (ddecay * a.double().unsqueeze(-1)).to(ddt.dtype)
        dx, ddt, db, dc = (from_chunks(t, length) for t in (dx, ddt.unsqueeze(-1), db, dc))
        return dx, ddt.squeeze(-1), da, db, dc, dd, dstate, None, None


def decays(dt: Tensor, a: Tensor, segments: Tensor | None, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decay factors of dt (B, n, H, Q): pairs (.., Q, Q), start (.., Q), end (.., Q), skip (B, n, H), of dt's dtype.

    Running sums are fp64. Rounded to a high and a low part, their differences stay exact after strong decay.
    """
    run = (dt.double() * a.double().unsqueeze(-1)).cumsum(-1)
    total = run[..., -1:]
    start, end, skip = (decay_factor(t.to(dt.dtype)) for t in (run, total - run, total))
    high = run.to(dt.dtype)
    low = (run - high).to(dt.dtype)
    gap = high.unsqueeze(-1) - high.unsqueeze(-2)
    pairs = decay_factor(gap.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))).tril_()
    if segments is not None:
        borders = Borders.build(segments, chunk)
        pairs *= borders.pair
        start, end, skip = start * borders.continues, end * borders.ends, skip * borders.passes
    return pairs, start, end, skip.squeeze(-1)


def decay_factor(exponent: Tensor) -> Tensor:
    """exp, of exponents up to 0: CPUs are slow at results that underflow, so it ends at 1e-38. Exponents of
    later tokens, which are above 0 and masked afterwards, count as 0."""
    return exponent.clamp(-87.0, 0.0).exp_()


def into_chunks(t: Tensor, chunk: int) -> Tensor:
    """(B, L, H, P) -> (B, n, H, Q, P), zeros after the end."""
    pad = -t.shape[1] % chunk
    if pad:
        t = F.pad(t, (0, 0, 0, 0, 0, pad))
    return t.reshape(t.shape[0], -1, chunk, *t.shape[2:]).transpose(2, 3).contiguous()


def from_chunks(t: Tensor, length: int) -> Tensor:
    """(B, n, H, Q, P) -> (B, L, H, P)."""
    return t.transpose(2, 3).flatten(1, 2)[:, :length]


def times(grouped: Tensor, by_head: Tensor) -> Tensor:
    """(B, n, G, ..) times (B, n, H, ..), every group for its own heads, as (B, n, H, ..)."""
    split = by_head.view(*by_head.shape[:2], grouped.shape[2], -1, *by_head.shape[3:])
    return (grouped.unsqueeze(3) * split).flatten(2, 3)


def over_heads(by_head: Tensor, groups: int) -> Tensor:
    """(B, n, H, ..) summed over the heads of each group, (B, n, G, ..)."""
    return by_head.view(*by_head.shape[:2], groups, -1, *by_head.shape[3:]).sum(3)


def product(left: Tensor, right: Tensor, onto: Tensor | None = None) -> Tensor:
    """left @ right over the last two of five axes; with `onto` the product is added there, in place."""
    rows, columns = left.flatten(0, 2), right.flatten(0, 2)
    if onto is None:
        return torch.bmm(rows, columns).view(*left.shape[:4], right.shape[4])
    onto.view(-1, *onto.shape[3:]).baddbmm_(rows, columns)
    return onto


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token. x (B, H, P); dt (B, H); b, c (B, G, N); state (B, H, P, N). Returns y (B, H, P), new state."""
    per = x.shape[1] // b.shape[1]
    b = b.repeat_interleave(per, dim=1)
    c = c.repeat_interleave(per, dim=1)
    state = (dt * a).exp()[..., None, None] * state + (dt.unsqueeze(-1) * x).unsqueeze(-1) * b.unsqueeze(2)
    y = (state @ c.unsqueeze(-1)).squeeze(-1)
    return y + d.unsqueeze(-1) * x, state
