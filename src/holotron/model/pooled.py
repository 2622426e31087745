"""One decode step of many sequences, in place on pools that hold the state of all: what an engine runs per token.

A pool is one tensor with a slot (or page) per row; int64 `slots` name the rows of a batch. They must differ from each
other: two rows of a batch on one slot would each overwrite what the other wrote.

Every function takes a kernel (kernels/cpu.cpp) where that is built and serves the inputs (fp32 on a CPU), else plain
torch. Inference only: no gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from holotron.model import kernels
from holotron.model.ssd import ssd_step as one_step


def _serves(pool: Tensor, *tensors: Tensor) -> bool:
    """Whether the kernels take these: the pool in place, so without a copy."""
    return pool.is_contiguous() and all(t.dtype == torch.float32 and t.is_cpu for t in (pool, *tensors))


def conv_step(pool: Tensor, slots: Tensor, xbc: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(bias + causal depthwise convolution) of one new column per sequence; the columns in the pool move on.

    pool (S, C, K-1), changed in place; slots (B,) int64; xbc (B, C); weight (C, K); bias (C,) or None.
    Returns (B, C) in the dtype of xbc.
    """
    if (ops := kernels.cpu()) is not None and _serves(pool, xbc, weight):
        moved: Tensor = ops.conv_step(pool, slots, xbc, weight, bias)
        return moved
    columns = torch.cat([pool[slots].to(xbc.dtype), xbc.unsqueeze(-1)], -1)  # (B, C, K)
    pool[slots] = columns[..., 1:].to(pool.dtype)
    out = (columns * weight.to(xbc.dtype)).sum(-1)
    return F.silu(out if bias is None else out + bias.to(xbc.dtype))


def ssd_step(pool: Tensor, slots: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """One token of the recurrence in ssd.py for every sequence; the states in the pool move on.

    pool (S, H, P, N) fp32, changed in place; slots (B,) int64; x (B, H, P); dt (B, H) after softplus; a (H,) negative;
    b, c (B, G, N), head h using group h // (H / G); d (H,). Returns y (B, H, P) in fp32.
    """
    if (ops := kernels.cpu()) is not None and _serves(pool, x, dt, a, b, c, d):
        stepped: Tensor = ops.ssd_step(pool, slots, x, dt, a, b, c, d)
        return stepped
    x, dt, a, b, c, d = (t.float() for t in (x, dt, a, b, c, d))
    y, state = one_step(x, dt, a, b, c, d, pool[slots].float())
    pool[slots] = state.to(pool.dtype)
    return y


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Attention of one new token per sequence to all its tokens, whose keys and values lie in pages.

    q (B, heads, size); keys, values (pages, kv heads, page tokens, size), each kv head serving heads / kv heads query
    heads in turn; table (B, most pages) int32 or int64: token t of row b lies at t % page tokens of page
    table[b, t // page tokens], and what stands behind a row's last page in use does not matter; lengths (B,) int32 or
    int64, counting the new token, whose key and value are in their page already. Scale 1 / sqrt(size).
    Returns (B, heads, size); zeros for a row of length 0.
    """
    if (ops := kernels.cpu()) is not None and values.is_contiguous() and _serves(keys, values, q):
        attended: Tensor = ops.paged_attention(q, keys, values, table, lengths)
        return attended
    used = int(lengths.max()) if len(lengths) else 0
    if not used:
        return torch.zeros_like(q)
    page = keys.shape[2]
    pages = table[:, : -(-used // page)].long().clamp(0, len(keys) - 1)
    k, v = (t[pages].transpose(1, 2).flatten(2, 3)[:, :, :used].to(q.dtype) for t in (keys, values))
    mask = torch.arange(used, device=q.device) < lengths[:, None, None, None]  # (B, 1, 1, used)
    out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, attn_mask=mask, enable_gqa=True).squeeze(2)
    return out.masked_fill(lengths[:, None, None] == 0, 0.0)
