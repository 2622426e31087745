"""Many sequences end to end against pools equal each sequence alone, however its tokens are cut and mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holotron.model.flat import Run, StatePool, forward_flat
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.model.test_moe import shake
from tests.model.tiny import build, tokens

EXPERTS = {
    "hybrid_override_pattern": "ME*EM",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
}


def step(
    model: HolotronForConditionalGeneration, pool: StatePool, rows: list[tuple[int, Tensor, int, list[int]]]
) -> list[Tensor]:
    """Logits of every row (slot, ids, start, pages), given in any order."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][1]) > 1)
    runs = [Run(rows[i][0], rows[i][2], len(rows[i][1]), rows[i][3]) for i in order]
    ids = torch.cat([rows[i][1] for i in order])
    hidden = forward_flat(model.language_model, model.embed(ids[None])[0], runs, pool)
    parts = model.language_model.lm_head(hidden).split([run.count for run in runs])
    found = dict(zip(order, parts, strict=True))
    return [found[i] for i in range(len(rows))]


@pytest.mark.parametrize(
    "changes", [{}, {"hybrid_override_pattern": "MM-"}, {"hybrid_override_pattern": "*-"}, EXPERTS]
)
@torch.no_grad()
def test_mixed_pieces_equal_one_pass(seed: int, changes: dict[str, Any]) -> None:
    model = build(**changes)
    if "E" in changes.get("hybrid_override_pattern", ""):
        shake(model)
    size = 8
    pool = StatePool.create(model.config.language, slots=5, pages=40, page_tokens=size)
    for part in (pool.conv, pool.ssm, pool.keys, pool.values):
        for tensor in part.values():
            tensor.fill_(torch.nan)  # what was there before must not matter
    lengths = [50, 33, 1, 12, 47]
    texts = [tokens(n) for n in lengths]
    free = torch.randperm(40).tolist()
    pages = [[free.pop() for _ in range(-(-n // size))] for n in lengths]
    slots = torch.randperm(5).tolist()
    for slot in slots:
        pool.clear(slot)
    seen, found = [0] * 5, [[] for _ in range(5)]  # type: ignore[var-annotated]
    while any(s < n for s, n in zip(seen, lengths, strict=True)):
        rows, who = [], []
        for i, text in enumerate(texts):
            count = min(int(torch.tensor([0, 1, 1, 2, 9, 17])[torch.randint(6, ())]), lengths[i] - seen[i])
            if count:
                rows.append((slots[i], text[seen[i] : seen[i] + count], seen[i], pages[i]))
                who.append((i, count))
        if rows:
            for (i, count), logits in zip(who, step(model, pool, rows), strict=True):
                found[i].append(logits)
                seen[i] += count
    for text, pieces in zip(texts, found, strict=True):
        alone = model(text[None]).logits[0]
        assert alone.abs().max() > 0.5
        assert (torch.cat(pieces) - alone).abs().max() < 2e-4


@torch.no_grad()
def test_saved_state_and_shared_pages_fork(seed: int) -> None:
    """Two continuations of one prefix: whole pages shared, the last one copied, the state restored."""
    model = build()
    pool = StatePool.create(model.config.language, slots=3, pages=12, page_tokens=8)
    prefix, ends = tokens(21), [tokens(9), tokens(9)]
    pool.clear(0)
    step(model, pool, [(0, prefix, 0, [3, 1, 7])])
    saved = pool.save(0)
    step(model, pool, [(0, tokens(3), 21, [3, 1, 7])])  # whoever was first goes on its way
    rows = []
    for slot, (end, last) in enumerate(zip(ends, ([5, 9], [2, 8]), strict=True), start=1):
        pool.restore(slot, saved)
        pool.copy_page(7, last[0])
        rows.append((slot, end, 21, [3, 1, *last]))
    for end, logits in zip(ends, step(model, pool, rows), strict=True):
        alone = model(torch.cat([prefix, end])[None]).logits[0, 21:]
        assert (logits - alone).abs().max() < 2e-4


def test_order_is_checked(seed: int) -> None:
    model = build()
    pool = StatePool.create(model.config.language, slots=2, pages=4, page_tokens=8)
    with pytest.raises(ValueError, match="one token must come before"):
        forward_flat(model.language_model, torch.zeros(4, 64), [Run(0, 0, 3, [0]), Run(1, 0, 1, [1])], pool)
