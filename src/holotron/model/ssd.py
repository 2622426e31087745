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

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Borders:
    """Where documents meet inside and between chunks. Booleans with room for groups and heads after the chunks."""

    pair: Tensor  # (B, chunks, 1, 1, Q, Q) both tokens belong to one document
    ends: Tensor  # (B, chunks, 1, 1, Q) the token's document is the one in which the chunk ends
    continues: Tensor  # (B, chunks, 1, 1, Q) the token's document is the one in which the chunk before ended
    passes: Tensor  # (B, chunks, 1, 1, 1) one document covers the whole chunk and the end of the one before

    @classmethod
    def build(cls, segments: Tensor, chunk: int) -> Borders:
        """segments (B, L); the last chunk is filled up with the last document."""
        fill = segments[:, -1:].expand(-1, -segments.shape[1] % chunk)
        split = torch.cat([segments, fill], 1).view(len(segments), -1, 1, 1, chunk)
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
    chunk_size: int,
    initial_state: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Many tokens at once. Padding tokens must have dt = 0: they leave the state unchanged.

    x (B, L, H, P); dt (B, L, H) after softplus; a (H,) negative; b, c (B, L, G, N) with G dividing H, head h
    using group h // (H / G); d (H,); initial_state (B, H, P, N) or None for zeros. All fp32.
    segments (B, L) integers that never fall along a row: the state starts from zeros where they change, and
    initial_state belongs to the document of the first token.
    Returns y (B, L, H, P) and the state after the last token (B, H, P, N), fp32.
    """
    batch, length, heads, width = x.shape
    groups, n = b.shape[2], b.shape[3]
    per = heads // groups
    chunk = min(chunk_size, max(length, 1))
    pad = -length % chunk
    xd = x * dt.unsqueeze(-1)
    if pad:
        xd = F.pad(xd, (0, 0, 0, 0, 0, pad))
        b, c = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (b, c))
        dt = F.pad(dt, (0, 0, 0, pad))
    chunks = (length + pad) // chunk
    borders = None if segments is None else Borders.build(segments, chunk)
    # (B, chunks, G, per, Q): fp64 running sums keep differences exact after strong decay
    decay = (dt.double() * a.double()).view(batch, chunks, chunk, groups, per).permute(0, 1, 3, 4, 2)
    run = decay.cumsum(-1)
    xd = xd.view(batch, chunks, chunk, groups, per, width).permute(0, 1, 3, 4, 2, 5)  # B c G per Q P
    b = b.view(batch, chunks, chunk, groups, n).permute(0, 1, 3, 2, 4)  # B c G Q N
    c = c.view(batch, chunks, chunk, groups, n).permute(0, 1, 3, 2, 4)

    seen = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    if borders is not None:
        seen = seen & borders.pair
    gap = (run.unsqueeze(-1) - run.unsqueeze(-2)).float().masked_fill(~seen, -1e9)  # mask before exp
    weights = (c @ b.transpose(-1, -2)).unsqueeze(3) * gap.exp()  # C.B once per group
    y = weights @ xd  # B c G per Q P

    total = run[..., -1:]
    to_end, to_next, from_start = (total - run).float().exp(), total.float().exp(), run.float().exp()
    if borders is not None:
        to_end, to_next, from_start = to_end * borders.ends, to_next * borders.passes, from_start * borders.continues
    into = xd * to_end.unsqueeze(-1)
    into = into.transpose(-1, -2).reshape(batch, chunks, groups, per * width, chunk) @ b  # B c G per*P N
    carry = to_next.expand(-1, -1, -1, -1, width).reshape(batch, chunks, groups, per * width, 1)
    if initial_state is None:
        state = x.new_zeros(batch, groups, per * width, n)
    else:
        state = initial_state.to(x.dtype).reshape(batch, groups, per * width, n)
    before = []
    for i in range(chunks):
        before.append(state)
        state = carry[:, i] * state + into[:, i]
    if chunks:
        entering = torch.stack(before, 1)  # B c G per*P N
        across = (c @ entering.transpose(-1, -2)).view(batch, chunks, groups, chunk, per, width)
        y = y + from_start.unsqueeze(-1) * across.permute(0, 1, 2, 4, 3, 5)
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, length + pad, heads, width)[:, :length]
    return y + d.unsqueeze(-1) * x, state.view(batch, heads, width, n)


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token. x (B, H, P); dt (B, H); b, c (B, G, N); state (B, H, P, N). Returns y (B, H, P), new state."""
    per = x.shape[1] // b.shape[1]
    b = b.repeat_interleave(per, dim=1)
    c = c.repeat_interleave(per, dim=1)
    state = (dt * a).exp()[..., None, None] * state + (dt.unsqueeze(-1) * x).unsqueeze(-1) * b.unsqueeze(2)
    y = (state @ c.unsqueeze(-1)).squeeze(-1)
    return y + d.unsqueeze(-1) * x, state
