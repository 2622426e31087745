"""One forward pass over many sequences laid end to end, against pools of state that outlive it.

Every projection is one product for all tokens of a step, whether a sequence brings one token or a thousand. Only what
couples tokens is done per sequence: convolution, recurrence and attention. Recurrent state lies in slots, one for each
running sequence; keys and values lie in pages that sequences may share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holotron.model import pooled
from holotron.model.cache import HybridCache
from holotron.model.config import LanguageConfig
from holotron.model.language import LanguageModel
from holotron.model.layers import Attention, Mamba2Mixer, attend

_WASTE = 1.25  # padded tokens per token, at most, in a group of runs


@dataclass(slots=True)
class SavedState:
    """Recurrent state of one sequence after some token: conv[i] (channels, K-1), ssm[i] (heads, P, N) fp32."""

    conv: dict[int, Tensor]
    ssm: dict[int, Tensor]


@dataclass(slots=True)
class StatePool:
    """conv[i] (slots, channels, K-1); ssm[i] (slots, heads, P, N) fp32; keys[i], values[i] (pages, kv heads, page
    tokens, head size). i is a layer of the right kind. Memory is reserved, and used only when it is written."""

    config: LanguageConfig
    page_tokens: int
    conv: dict[int, Tensor]
    ssm: dict[int, Tensor]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    @classmethod
    def create(
        cls,
        config: LanguageConfig,
        slots: int,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> StatePool:
        kinds = config.hybrid_override_pattern
        mamba = [i for i, kind in enumerate(kinds) if kind == "M"]
        attention = [i for i, kind in enumerate(kinds) if kind == "*"]
        conv = (slots, config.conv_channels, config.conv_kernel - 1)
        ssm = (slots, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
        kv = (pages, config.num_key_value_heads, page_tokens, config.head_dim)
        return cls(
            config=config,
            page_tokens=page_tokens,
            conv={i: torch.empty(conv, dtype=dtype, device=device) for i in mamba},
            ssm={i: torch.empty(ssm, dtype=torch.float32, device=device) for i in mamba},
            keys={i: torch.empty(kv, dtype=dtype, device=device) for i in attention},
            values={i: torch.empty(kv, dtype=dtype, device=device) for i in attention},
        )

    @staticmethod
    def page_bytes(config: LanguageConfig, page_tokens: int, dtype: torch.dtype = torch.float32) -> int:
        return page_tokens * config.kv_bytes_per_token(dtype.itemsize)

    def clear(self, slot: int) -> None:
        """The state before a sequence's first token."""
        for part in (self.conv, self.ssm):
            for tensor in part.values():
                tensor[slot].zero_()

    def save(self, slot: int, dtype: torch.dtype | None = None) -> SavedState:
        """A copy, in `dtype` if one is given: 16 bits halve what is kept, and round it."""
        conv, ssm = (
            {i: t[slot].to(dtype or t.dtype, copy=True) for i, t in part.items()} for part in (self.conv, self.ssm)
        )
        return SavedState(conv, ssm)

    def restore(self, slot: int, saved: SavedState) -> None:
        for part, kept in ((self.conv, saved.conv), (self.ssm, saved.ssm)):
            for i, tensor in part.items():
                tensor[slot].copy_(kept[i])

    def copy_page(self, source: int, target: int) -> None:
        for part in (self.keys, self.values):
            for tensor in part.values():
                tensor[target].copy_(tensor[source])


@dataclass(slots=True, frozen=True)
class Run:
    """`count` next tokens of one sequence, of which `start` were seen; its pages have room for start + count."""

    slot: int
    start: int
    count: int
    pages: list[int]


@dataclass(slots=True)
class _Group:
    """Runs of several tokens, right-padded into rows: index (R, T) into the flat tokens, valid (R, T) or None."""

    slots: Tensor
    index: Tensor
    valid: Tensor | None


@dataclass(slots=True)
class _Batch:
    single: int  # the first runs, of one token each
    slots: Tensor  # (single,)
    table: Tensor  # (single, pages) of them, padded with page 0
    lengths: Tensor  # (single,) tokens seen, the new one included
    page: Tensor  # (tokens,) where each token's key and value go
    offset: Tensor
    groups: list[_Group]
    longer: list[tuple[int, Run]]  # first flat token, run


@torch.inference_mode()
def forward_flat(model: LanguageModel, embeddings: Tensor, runs: list[Run], pool: StatePool) -> Tensor:
    """Final hidden states (tokens, hidden) of `embeddings` (tokens, hidden), the tokens of `runs` in order.

    Runs of one token must come first. State and pages are advanced in place. No slot may appear twice.
    """
    batch = _arrange(runs, pool, embeddings.device)
    h = embeddings
    backbone: Any = model.backbone
    for layer in backbone.layers:
        u = layer.norm(h)
        mixer = layer.mixer
        if isinstance(mixer, Mamba2Mixer):
            h = h + _mamba(mixer, u, batch, pool)
        elif isinstance(mixer, Attention):
            h = h + _attention(mixer, u, batch, pool)
        else:
            h = h + mixer(u.unsqueeze(0), None, None).squeeze(0)
    final: Tensor = backbone.norm_f(h)
    return final


def _arrange(runs: list[Run], pool: StatePool, device: torch.device) -> _Batch:
    single = next((i for i, run in enumerate(runs) if run.count > 1), len(runs))
    if any(run.count == 1 for run in runs[single:]):
        raise ValueError("runs of one token must come before longer ones")
    tokens, size = sum(run.count for run in runs), pool.page_tokens
    page, offset = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.int64)
    longer, at = [], 0
    for run in runs:
        position = torch.arange(run.start, run.start + run.count)
        page[at : at + run.count] = torch.tensor(run.pages)[position // size]
        offset[at : at + run.count] = position % size
        if run.count > 1:
            longer.append((at, run))
        at += run.count
    first = runs[:single]
    widest = max((-(-(run.start + 1) // size) for run in first), default=0)
    table = torch.zeros(single, widest, dtype=torch.int64)
    for row, run in enumerate(first):
        used = run.pages[: -(-(run.start + 1) // size)]
        table[row, : len(used)] = torch.tensor(used)
    return _Batch(
        single=single,
        slots=torch.tensor([run.slot for run in first], dtype=torch.int64, device=device),
        table=table.to(device),
        lengths=torch.tensor([run.start + 1 for run in first], dtype=torch.int64, device=device),
        page=page.to(device),
        offset=offset.to(device),
        groups=_group(longer, device),
        longer=longer,
    )


def _group(longer: list[tuple[int, Run]], device: torch.device) -> list[_Group]:
    """Runs of similar length together, so that many short ones cost few calls and little padding."""
    groups: list[list[tuple[int, Run]]] = []
    for at, run in sorted(longer, key=lambda pair: -pair[1].count):
        if groups:
            longest, total = groups[-1][0][1].count, sum(r.count for _, r in groups[-1]) + run.count
            if longest * (len(groups[-1]) + 1) <= _WASTE * total:
                groups[-1].append((at, run))
                continue
        groups.append([(at, run)])
    found = []
    for members in groups:
        longest = members[0][1].count
        step = torch.arange(longest)
        counts = torch.tensor([run.count for _, run in members])
        index = torch.tensor([at for at, _ in members])[:, None] + step.minimum(counts[:, None] - 1)
        valid = step < counts[:, None]
        slots = torch.tensor([run.slot for _, run in members])
        whole = bool(valid.all())
        found.append(_Group(slots.to(device), index.to(device), None if whole else valid.to(device)))
    return found


def _mamba(mixer: Mamba2Mixer, u: Tensor, batch: _Batch, pool: StatePool) -> Tensor:
    cfg, layer = mixer.config, mixer.index
    z, xbc, dt = torch.split(mixer.in_proj(u), [cfg.mamba_width, cfg.conv_channels, cfg.mamba_num_heads], dim=-1)
    gated = torch.empty_like(z)
    if batch.single:
        one = slice(0, batch.single)
        gated[one] = _mamba_step(mixer, z[one], xbc[one], dt[one], batch, pool)
    for group in batch.groups:
        rows = HybridCache(
            {layer: pool.conv[layer][group.slots]}, {layer: pool.ssm[layer][group.slots]}, {}, {}, group.slots
        )
        out = mixer._mix(z[group.index], xbc[group.index], dt[group.index], group.valid, rows, None)
        pool.conv[layer][group.slots] = rows.conv[layer].to(pool.conv[layer].dtype)
        pool.ssm[layer][group.slots] = rows.ssm[layer]
        if group.valid is None:
            gated[group.index] = out
        else:
            gated[group.index[group.valid]] = out[group.valid]
    projected: Tensor = mixer.out_proj(gated)
    return projected


def _mamba_step(mixer: Mamba2Mixer, z: Tensor, xbc: Tensor, dt: Tensor, batch: _Batch, pool: StatePool) -> Tensor:
    """One token of each of `batch.single` sequences: z (B, width), xbc (B, channels), dt (B, heads)."""
    cfg, layer = mixer.config, mixer.index
    weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    mixed = pooled.conv_step(pool.conv[layer], batch.slots, xbc, weight, bias).float()
    step = F.softplus(dt.float() + mixer.dt_bias.float())
    low, high = cfg.time_step_limit
    if low > 0 or math.isfinite(high):
        step = step.clamp(low, high)
    x, b, c = torch.split(mixed, [cfg.mamba_width, *[cfg.n_groups * cfg.ssm_state_size] * 2], dim=-1)
    x = x.view(-1, cfg.mamba_num_heads, cfg.mamba_head_dim)
    b, c = (t.view(-1, cfg.n_groups, cfg.ssm_state_size) for t in (b, c))
    a, d = -torch.exp(mixer.A_log.float()), mixer.D.float()
    y = pooled.ssd_step(pool.ssm[layer], batch.slots, x, step, a, b, c, d)
    gated: Tensor = mixer.norm(y.flatten(-2).to(z.dtype), z)
    return gated


def _attention(mixer: Attention, u: Tensor, batch: _Batch, pool: StatePool) -> Tensor:
    size = mixer.config.head_dim
    q, k, v = (p(u).view(len(u), -1, size) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    keys, values = pool.keys[mixer.index], pool.values[mixer.index]
    keys[batch.page, :, batch.offset] = k
    values[batch.page, :, batch.offset] = v
    out = torch.empty_like(q)
    if batch.single:
        out[: batch.single] = pooled.paged_attention(q[: batch.single], keys, values, batch.table, batch.lengths)
    for at, run in batch.longer:
        rows = slice(at, at + run.count)
        mine = q[rows].transpose(0, 1).unsqueeze(0)
        if run.start == 0:
            whole = attend(mine, *(t[rows].transpose(0, 1).unsqueeze(0) for t in (k, v)))
        else:
            end = run.start + run.count
            pages = torch.tensor(run.pages[: -(-end // pool.page_tokens)], device=u.device)
            old_k, old_v = (t[pages].transpose(0, 1).flatten(1, 2)[None, :, :end] for t in (keys, values))
            seen = torch.ones(run.count, end, dtype=torch.bool, device=u.device).tril(run.start)
            whole = F.scaled_dot_product_attention(mine, old_k, old_v, attn_mask=seen, enable_gqa=True)
        out[rows] = whole.squeeze(0).transpose(0, 1)
    projected: Tensor = mixer.o_proj(out.flatten(-2))
    return projected
