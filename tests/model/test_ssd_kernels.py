"""The way through CUDA kernels: what is handed to them, here with slow kernels of the same contract, and, where there
is a GPU with mamba-ssm or fla-core, the real ones against the torch path."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from holotron.model import ssd_kernels
from holotron.model.ssd import ssd_chunked, ssd_step
from tests.model.tiny import build, tokens


def slow_mamba(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """mamba-ssm's documented contract, token by token: the state restarts where seq_idx differs from the token before,
    and for the first token from 0."""
    assert z is None and dt_bias is None and not dt_softplus and return_final_states
    assert D is not None and initial_states is not None
    state, before = initial_states, torch.zeros(len(x), dtype=torch.int32)
    out = []
    for t in range(x.shape[1]):
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2]
            state = state * (seq_idx[:, t] == before)[:, None, None, None]
            before = seq_idx[:, t]
        y, state = ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], D, state)
        out.append(y)
    return torch.stack(out, 1), state


def slow_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """fla-core's: S = exp(g) S + k v^T with S (H, N, P), o = scale q S; with cu_seqlens one row of sequences."""
    assert output_final_state and scale is not None
    assert len({t.shape[:3] for t in (q, k, v)}) == 1 and g.shape == q.shape[:3]
    rows = [(i, slice(None)) for i in range(len(q))]
    if cu_seqlens is not None:
        assert len(q) == 1 and initial_state.shape[0] == len(cu_seqlens) - 1
        rows = [(0, slice(a, b)) for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)]
    out, last = torch.empty_like(v), []
    for (row, piece), state in zip(rows, initial_state, strict=True):
        for t in range(q.shape[1])[piece]:
            state = g[row, t].exp()[:, None, None] * state + k[row, t].unsqueeze(-1) * v[row, t].unsqueeze(-2)
            out[row, t] = scale * (q[row, t].unsqueeze(-2) @ state).squeeze(-2)
        last.append(state)
    return out, torch.stack(last)


def arguments(packed: bool, device: str = "cpu", length: int = 37, heads: int = 4, width: int = 3) -> dict[str, Any]:
    state_size = 16 if device == "cuda" else 5
    made: dict[str, Any] = {
        "x": torch.randn(2, length, heads, width),
        "dt": torch.rand(2, length, heads),
        "a": -torch.rand(heads),
        "b": torch.randn(2, length, 2, state_size),
        "c": torch.randn(2, length, 2, state_size),
        "d": torch.randn(heads),
        "chunk_size": 16,
        "initial_state": torch.randn(2, heads, width, state_size),
        "segments": None,
    }
    if packed:
        made["segments"] = torch.randint(2, 6, (2, length)).sort(1).values
        made["segments"][1, -5:] = -1  # padding
        made["dt"][1, -5:] = 0
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in made.items()}


@pytest.mark.parametrize(
    ("adapt", "kernel"), [(ssd_kernels.through_mamba, slow_mamba), (ssd_kernels.through_fla, slow_gla)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_contracts(seed: int, adapt: Any, kernel: Any, packed: bool) -> None:
    """Outputs, last states and the gradient of every input as the torch path has them; rows start mid-numbering."""
    given = arguments(packed)
    leaves = {k: v.requires_grad_() for k, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()}
    expected, last = ssd_chunked(**given)
    found, found_last = adapt(kernel, *given.values())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found_last[:1], last[:1], atol=1e-4, rtol=1e-4)
    if not packed:  # behind padding the torch path ends with the padding's state, as any kernel may
        torch.testing.assert_close(found_last, last, atol=1e-4, rtol=1e-4)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), list(leaves.values()), materialize_grads=True)
    mine = torch.autograd.grad((found * weight).sum(), list(leaves.values()), materialize_grads=True)
    for name, a, b in zip(leaves, mine, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max(), name


def test_document_numbers() -> None:
    segments = torch.tensor([[3, 3, 7, 7, -1], [0, 1, 1, 1, 1]])
    assert ssd_kernels.document_numbers(segments).tolist() == [[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]]
    assert ssd_kernels.document_starts(segments).tolist() == [0, 2, 4, 5, 6, 10]


def test_kernels_are_for_rounded_inputs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 stays fp32 unless torch's own switch allows TF32."""
    monkeypatch.setattr(ssd_kernels, "installed", lambda: slow_mamba)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not ssd_kernels.serves(exact=True) and ssd_kernels.serves(exact=False)
    torch.set_float32_matmul_precision("high")
    try:
        assert ssd_kernels.serves(exact=True)
    finally:
        torch.set_float32_matmul_precision("highest")


@torch.no_grad()
def test_cpu_never_asks_for_kernels(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a CPU tensor asked for a CUDA kernel")

    monkeypatch.setattr(ssd_kernels, "serves", refuse)
    monkeypatch.setattr(ssd_kernels, "installed", refuse)
    build()(tokens(1, 9))
    build().to(torch.bfloat16)(tokens(1, 9))
    assert "mamba_ssm" not in sys.modules and "fla" not in sys.modules


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_installed_kernel_agrees_with_torch(seed: int, packed: bool) -> None:
    """TF32 products have 10 bits: forward and every gradient within 1 % of the largest value."""
    kernel = ssd_kernels.installed()
    if kernel is None:
        pytest.skip("neither mamba-ssm nor fla-core is installed")
    given = arguments(packed, "cuda", length=300, heads=8, width=64)
    given["chunk_size"] = 64
    leaves = {k: v.requires_grad_() for k, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()}
    expected, last = ssd_chunked(**given)
    found, found_last = kernel(*given.values())
    assert (found - expected).abs().max() <= 0.01 * expected.abs().max()
    assert (found_last[:1] - last[:1]).abs().max() <= 0.01 * last.abs().max()
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), list(leaves.values()), materialize_grads=True)
    mine = torch.autograd.grad((found * weight).sum(), list(leaves.values()), materialize_grads=True)
    for name, a, b in zip(leaves, mine, wanted, strict=True):
        assert (a - b).abs().max() <= 0.01 * b.abs().max(), name
