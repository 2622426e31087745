"""The Mamba-2 mixer against a float64 recurrence, and its numeric traps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holotron.model.cache import HybridCache
from holotron.model.config import LanguageConfig
from holotron.model.layers import GatedGroupNorm, Mamba2Mixer
from holotron.model.ssd import ssd_chunked, ssd_step
from tests.model.tiny import TINY, build, randomise
from tests.oracles.ssd_recurrence import mamba2_mixer


def mixer(**changes: Any) -> tuple[Mamba2Mixer, LanguageConfig]:
    config = LanguageConfig.from_dict({**TINY, **changes})
    made = Mamba2Mixer(config, 0)
    randomise(made)
    return made, config


def oracle(made: Mamba2Mixer, config: LanguageConfig, u: Tensor) -> tuple[Tensor, Tensor]:
    return mamba2_mixer(
        made.state_dict(),
        u,
        config.mamba_num_heads,
        config.mamba_head_dim,
        config.n_groups,
        config.ssm_state_size,
        config.layer_norm_epsilon,
    )


@pytest.mark.parametrize(
    "changes", [{}, {"n_groups": 8}, {"n_groups": 1}, {"use_conv_bias": False}, {"conv_kernel": 3}]
)
@torch.no_grad()
def test_mixer_equals_recurrence(seed: int, changes: dict[str, Any]) -> None:
    """Traps 1, 2, 4, 6: prefill across chunk borders, decode, and the state left behind."""
    made, config = mixer(**changes)
    u = torch.randn(1, 50, 64)
    expected, state = oracle(made, config, u[0])
    cache = HybridCache.empty(config, 1)
    torch.testing.assert_close(made(u, None, cache)[0].double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.ssm[0][0].double(), state, atol=1e-5, rtol=1e-5)
    cache = HybridCache.empty(config, 1)
    decoded = torch.cat([made(u[:, t : t + 1], None, cache) for t in range(50)], 1)
    torch.testing.assert_close(decoded[0].double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.ssm[0][0].double(), state, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_time_step_is_clamped_only_on_demand(seed: int) -> None:
    """Trap 1: `time_step_min` clamps nothing; a finite `time_step_limit` clamps prefill and decode alike."""
    free, config = mixer(time_step_min=0.001, time_step_max=0.1)
    limited, limited_config = mixer(time_step_limit=[0.01, 0.05])
    limited.load_state_dict(free.state_dict())
    u = torch.randn(1, 20, 64)
    expected = oracle(free, config, u[0])[0]
    torch.testing.assert_close(free(u, None, None)[0].double(), expected, atol=1e-5, rtol=1e-5)
    clamped = limited(u, None, None)
    assert (clamped[0] - expected).abs().max() > 1e-3
    cache = HybridCache.empty(limited_config, 1)
    decoded = torch.cat([limited(u[:, t : t + 1], None, cache) for t in range(20)], 1)
    torch.testing.assert_close(decoded, clamped, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_gated_norm(seed: int) -> None:
    """Trap 4: gate first, then normalise each group."""
    norm = GatedGroupNorm(12, 2, 1e-5)
    norm.weight.normal_()
    y, z = torch.randn(3, 12), torch.randn(3, 12)
    g = (y * z * torch.sigmoid(z)).view(3, 2, 6)
    expected = (g / (g.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 12) * norm.weight
    torch.testing.assert_close(norm(y, z), expected)


@pytest.mark.parametrize("length", [1, 20])
@torch.no_grad()
def test_heads_read_their_own_group(seed: int, length: int) -> None:
    """Trap 6: with 2 groups and 8 heads, B of the second group reaches heads 4..7 and no other."""
    x, dt = torch.randn(1, length, 8, 4), torch.rand(1, length, 8)
    a, d = -torch.rand(8), torch.randn(8)
    b, c = torch.randn(1, length, 2, 5), torch.randn(1, length, 2, 5)
    changed = b.clone()
    changed[:, :, 1] += 1
    zero = torch.zeros(1, 8, 4, 5)
    if length == 1:
        found = [ssd_step(x[:, 0], dt[:, 0], a, k[:, 0], c[:, 0], d, zero)[0][0] for k in (b, changed)]
    else:
        found = [ssd_chunked(x, dt, a, k, c, d, 8)[0][0].transpose(0, 1).flatten(1) for k in (b, changed)]
    touched = (found[0] != found[1]).any(-1)
    assert touched.tolist() == [False] * 4 + [True] * 4


@torch.no_grad()
def test_state_does_not_drift(seed: int) -> None:
    """Trap 7: 4096 decode steps stay with the float64 recurrence; a state rounded to 16 bit does not."""
    made, config = mixer(mamba_num_heads=2)
    made.dt_bias.uniform_(-7, -4)  # long memory
    u = torch.randn(1, 4096, 64)
    expected, state = oracle(made, config, u[0])
    errors = {}
    for dtype, steps in ((torch.float32, 4096), (torch.bfloat16, 1024)):
        cache = HybridCache.empty(config, 1)
        found = []
        for t in range(steps):
            found.append(made(u[:, t : t + 1], None, cache)[0])
            cache.ssm[0] = cache.ssm[0].to(dtype).float()
        tail = slice(steps - 256, steps)
        errors[dtype] = (torch.cat(found)[tail] - expected[tail]).abs().max().item()
    assert errors[torch.float32] < 1e-4
    assert errors[torch.bfloat16] > 20 * errors[torch.float32]


def test_gradients_of_chunks_equal_those_of_steps(seed: int) -> None:
    """What training differentiates is the recurrence, also where decay underflows within a chunk."""
    shapes = [(1, 21, 4, 3), (1, 21, 4), (4,), (1, 21, 2, 5), (1, 21, 2, 5), (4,), (1, 4, 3, 5)]
    leaves = [torch.randn(shape) for shape in shapes]
    leaves[1] = leaves[1].abs() * torch.tensor([0.01, 0.3, 3.0, 90.0])
    leaves[2] = -leaves[2].abs() - 0.5
    gradients = []
    for chunk in (None, 1, 8, 64):
        x, dt, a, b, c, d, state = [leaf.clone().requires_grad_() for leaf in leaves]
        last = state
        if chunk is None:
            steps = []
            for t in range(21):
                y, last = ssd_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], d, last)
                steps.append(y)
            out = torch.stack(steps, 1)
        else:
            out, last = ssd_chunked(x, dt, a, b, c, d, chunk, state)
        (out.square().sum() + last.square().sum()).backward()
        gradients.append([leaf.grad for leaf in (x, dt, a, b, c, d, state)])
    for found in gradients[1:]:
        for mine, expected in zip(found, gradients[0], strict=True):
            assert mine is not None and expected is not None and torch.isfinite(mine).all()
            scale = expected.abs().max()
            assert (mine - expected).abs().max() <= 1e-4 * scale


@torch.no_grad()
def test_autocast_leaves_the_recurrence_in_fp32(seed: int) -> None:
    """Trap 7, mixed precision: only the projections run in 16 bit. What is left of the error is their rounding of
    inputs and outputs (2^-9 each), which a recurrence in 16 bit exceeds many times over: 256 steps of slow decay."""
    made, config = mixer()
    made.dt_bias.uniform_(-7, -5)
    u = torch.randn(2, 256, 64)
    expected, found = HybridCache.empty(config, 2), HybridCache.empty(config, 2)
    exact = made(u, None, expected)
    later = torch.randn(2, 1, 64)
    exact_later = made(later, None, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = made(u, None, found)
        assert found.ssm[0].dtype == torch.float32
        mixed_later = made(later, None, found)
    assert mixed.dtype == torch.bfloat16
    assert found.ssm[0].dtype == torch.float32
    for a, b in ((mixed, exact), (mixed_later, exact_later), (found.ssm[0], expected.ssm[0])):
        assert (a - b).norm() < 0.01 * b.norm()


@torch.no_grad()
def test_autocast_decay_is_exact(seed: int) -> None:
    """With an input projection that loses nothing in 16 bit, the state after 256 steps is that of fp32."""
    made, config = mixer()
    made.dt_bias.uniform_(-7, -5)
    rows = len(made.in_proj.weight)
    made.in_proj.weight.zero_()
    made.in_proj.weight[torch.arange(rows), torch.randint(0, 64, (rows,))] = 1.0
    u = torch.randn(2, 256, 64).bfloat16().float()
    states = []
    for enabled in (False, True):
        cache = HybridCache.empty(config, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            made(u, None, cache)
            states.append(cache.ssm[0].clone())
            made(u[:, :1], None, cache)
        states.append(cache.ssm[0])
    for exact, mixed in zip(states[:2], states[2:], strict=True):
        assert mixed.dtype == torch.float32
        assert (mixed - exact).abs().max() <= 1e-5 * exact.abs().max()


@torch.no_grad()
def test_autocast_language_model(seed: int) -> None:
    """All kinds of layer under autocast, prefill and decode, with an fp32 cache."""
    model = build()
    ids = torch.randint(0, TINY["vocab_size"], (2, 20))
    exact = model(ids).logits
    cache = HybridCache.empty(model.config.language, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = torch.cat([model(piece, cache=cache).logits for piece in ids.split([12, 1, 7], 1)], 1)
        plain = model(ids).logits
    assert {state.dtype for state in cache.ssm.values()} == {torch.float32}
    for found in (mixed, plain):
        assert (found - exact).norm() < 0.05 * exact.norm()
