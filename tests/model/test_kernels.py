"""The C++ kernels against the plain torch code that defines them, and their loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holotron.model import cpu_attention, kernels, pooled
from holotron.model.fused import conv_silu, gated_norm, rms_norm, squared_relu
from holotron.model.ssd import ssd_chunked

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    """Built once for source, torch and machine, then found in the cache."""
    if os.environ.get("HOLOTRON_KERNELS") == "0":
        pytest.skip("HOLOTRON_KERNELS=0")
    if not kernels.command():
        pytest.skip("no C++ compiler")
    kernels.build()
    assert kernels.cpu() is not None
    yield


def run(function: Function, inputs: Sequence[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of all inputs; `upstream` is filled on the first run and used by the others."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    found = function(*leaves)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    if not upstream:
        upstream += [torch.randn_like(t) for t in outputs]
    total = sum((t * g.to(t.dtype)).sum() for t, g in zip(outputs, upstream, strict=True))
    assert isinstance(total, Tensor)
    return [t.detach() for t in outputs] + list(torch.autograd.grad(total, leaves))


def same(function: Function, *inputs: Tensor, tolerance: float = 3e-6, loose: dict[int, float] | None = None) -> None:
    """The kernel is near to plain code in fp64: `tolerance` is a share of the largest number, `loose` names outputs and
    then gradients with another one. Without gradients nothing changes."""
    upstream: list[Tensor] = []
    found = run(function, inputs, upstream)
    with kernels.switched_off():
        expected = run(function, [t.double() for t in inputs], upstream)
    for i, (one, truth) in enumerate(zip(found, expected, strict=True)):
        scale = truth.abs().max().clamp_min(1e-3) if truth.numel() else 1.0
        gap = ((one - truth).abs().max() / scale).item() if truth.numel() else 0.0
        assert one.shape == truth.shape and gap < (loose or {}).get(i, tolerance), f"number {i}: {gap}"
    with torch.no_grad():
        bare = function(*inputs)
    for one, other in zip([bare] if isinstance(bare, Tensor) else bare, found, strict=False):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def documents(batch: int, length: int) -> Tensor:
    return torch.randint(0, 4, (batch, length)).sort(1).values


def strided(*shape: int) -> Tensor:
    """Random, the last axis a part of a wider one."""
    return torch.randn(*shape[:-1], shape[-1] + 5)[..., 2 : 2 + shape[-1]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", [0.01, 1.0, 20.0])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "width", "groups", "size"),
    [(2, 70, 6, 64, 1, 32), (1, 33, 4, 5, 2, 7), (3, 1, 2, 16, 1, 8), (1, 96, 2, 80, 2, 128)],
)
def test_scan(
    seed: int, batch: int, length: int, heads: int, width: int, groups: int, size: int, decay: float, packed: bool
) -> None:
    x, state = torch.randn(batch, length, heads, width), torch.randn(batch, heads, width, size)
    dt, a, d = torch.rand(batch, length, heads), -decay * torch.rand(heads), torch.randn(heads)
    b, c = (torch.randn(batch, length, groups, size) for _ in range(2))
    segments = documents(batch, length) if packed else None

    def scan(*t: Tensor) -> tuple[Tensor, ...]:
        return ssd_chunked(*t[:6], None, t[6], segments)

    # after strong decay next to nothing is left of the gradient of a, and what is left is a difference
    same(scan, x, dt, a, b, c, d, state, tolerance=1e-5, loose={4: 1e-2 if decay > 1 else 1e-4})


def test_scan_of_no_rows() -> None:
    shapes = ((0, 8, 2, 8), (0, 8, 2), (2,), (0, 8, 1, 4), (0, 8, 1, 4), (2,))
    found = run(ssd_chunked, [torch.zeros(shape) for shape in shapes], [])
    assert [t.shape for t in found] == [shapes[0], (0, 2, 8, 4), *shapes]


def test_scan_through_several_threads_and_parts(seed: int) -> None:
    """One row, one group: heads are parted between threads, their gradients of B and C summed."""
    x, dt, a = torch.randn(1, 80, 5, 16), torch.rand(1, 80, 5), -torch.rand(5)
    b, c, d = torch.randn(1, 80, 1, 16), torch.randn(1, 80, 1, 16), torch.randn(5)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        same(lambda *t: ssd_chunked(*t), x, dt, a, b, c, d, tolerance=1e-5, loose={4: 1e-4})
    finally:
        torch.set_num_threads(before)


def test_scan_reads_views_and_keeps_nan(seed: int) -> None:
    wide = torch.randn(2, 40, 4 * 16 + 2 * 8)
    x = wide[..., :64].view(2, 40, 4, 16)
    b, c = (t.view(2, 40, 1, 8) for t in wide[..., 64:].split(8, -1))
    dt, a, d = torch.rand(2, 40, 4), -torch.rand(4), torch.randn(4)
    same(lambda *t: ssd_chunked(*t), x, dt, a, b, c, d, tolerance=1e-5, loose={4: 1e-4})
    dt[1, 20, 2] = torch.nan
    with torch.no_grad():
        y, _ = ssd_chunked(x, dt, a, b, c, d)
    wrong = y.isnan().all(-1)
    assert wrong[1, 20:, 2].all() and wrong.sum() == 20


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "channels", "taps"),
    [(2, 130, 40, 4), (3, 2, 7, 4), (1, 70, 1100, 4), (2, 9, 16, 3), (0, 5, 8, 4)],
)
def test_conv(seed: int, batch: int, length: int, channels: int, taps: int, packed: bool, bias: bool) -> None:
    segments = documents(batch, length) if packed else None
    x, weight, offset = strided(batch, length, channels), torch.randn(channels, taps), torch.randn(channels)
    inputs = (x, weight, offset) if bias else (x, weight)
    same(lambda x, w, *b: conv_silu(x, w, b[0] if b else None, segments), *inputs)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_conv_continues(seed: int, length: int) -> None:
    """Columns from before, without gradients: the two halves of a row equal the row."""
    x, weight, bias = torch.randn(2, 3 + length, 24), torch.randn(24, 4), torch.randn(24)
    with torch.no_grad():
        whole, second = conv_silu(x, weight, bias), conv_silu(x[:, 3:], weight, bias, None, x[:, :3])
        with kernels.switched_off():
            plain = conv_silu(x[:, 3:], weight, bias, None, x[:, :3])
    torch.testing.assert_close(second, whole[:, 3:])
    torch.testing.assert_close(second, plain)


@pytest.mark.parametrize("shape", [(3, 5, 192), (70, 33), (1, 3), (0, 16), (130, 640)])
def test_rms_norm(seed: int, shape: tuple[int, ...]) -> None:
    same(lambda x, w: rms_norm(x, w, 1e-5), strided(*shape), torch.randn(shape[-1]))


@pytest.mark.parametrize(("groups", "size"), [(1, 384), (2, 40), (3, 7)])
def test_gated_norm(seed: int, groups: int, size: int) -> None:
    y, z = 5 * torch.randn(2, 67, groups * size), 20 * strided(2, 67, groups * size)
    same(lambda y, z, w: gated_norm(y, z, w, 1e-5), y, z, torch.randn(groups, size))


def test_squared_relu(seed: int) -> None:
    same(squared_relu, strided(7, 33))
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    torch.testing.assert_close(squared_relu(odd), torch.relu(odd) ** 2, equal_nan=True)


def test_silu_at_the_ends() -> None:
    """exp is our own: no overflow, no NaN made or lost."""
    x = torch.tensor([-1e30, -200.0, -90.0, -88.5, -20.0, -1e-20, 0.0, 1e-20, 20.0, 89.0, 1e30, torch.nan])
    with torch.no_grad():
        found = conv_silu(x.view(1, 1, -1), torch.ones(len(x), 4), None).flatten()
    torch.testing.assert_close(found, F.silu(x), rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize(("heads", "width", "size", "groups"), [(6, 64, 32, 1), (4, 5, 7, 2), (8, 16, 128, 8)])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_pooled_steps(seed: int, batch: int, heads: int, width: int, size: int, groups: int) -> None:
    slots, channels = torch.randperm(9)[:batch], heads * width + 2 * groups * size
    states, columns = torch.randn(9, heads, width, size), torch.randn(9, channels, 3)
    xbc, weight, bias = strided(batch, channels), torch.randn(channels, 4), torch.randn(channels)
    dt, a, d = torch.rand(batch, heads), -torch.rand(heads), torch.randn(heads)

    def step(states: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
        mixed = pooled.conv_step(columns, slots, xbc, weight, bias)
        x, b, c = mixed.split([heads * width, groups * size, groups * size], -1)
        shared = (b.view(batch, groups, size), c.view(batch, groups, size))
        return mixed, pooled.ssd_step(states, slots, x.view(batch, heads, width), dt, a, *shared, d), states, columns

    found = step(states.clone(), columns.clone())
    with kernels.switched_off():
        expected = step(states.clone(), columns.clone())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
    others = [slot for slot in range(9) if slot not in slots.tolist()]
    torch.testing.assert_close(found[2][others], states[others], rtol=0, atol=0)


def visible(queries: int, keys: int, segments: Tensor | None) -> Tensor:
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return mask if segments is None else mask & (segments[:, None, :, None] == segments[:, None, None, :])


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "size", "packed"),
    [
        (2, 4, 2, 200, 200, 48, False),
        (1, 4, 1, 65, 65, 16, False),
        (1, 8, 2, 70, 133, 128, False),
        (2, 2, 2, 16, 17, 32, False),
        (2, 4, 2, 150, 150, 48, True),
        (0, 2, 1, 20, 20, 16, False),
    ],
)
def test_attention(
    seed: int, batch: int, heads: int, kv_heads: int, queries: int, keys: int, size: int, packed: bool
) -> None:
    q, k, v = (
        strided(batch, tokens, count, size).transpose(1, 2)
        for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    segments = documents(batch, queries) if packed else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = cpu_attention.kernel_attention(4 * q, k, v, segments)
        if found is not None:
            return found
        mask = visible(queries, keys, segments)
        return F.scaled_dot_product_attention(4 * q, k, v, attn_mask=mask, enable_gqa=True)

    same(attention, q, k, v, tolerance=1e-5)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(4, 2, 48, 16), (5, 1, 7, 3), (8, 8, 128, 64)])
def test_paged_attention(seed: int, heads: int, kv_heads: int, size: int, page: int, index: torch.dtype) -> None:
    """Against softmax over the tokens gathered one by one; pages not in use hold NaN and the table lies there."""
    lengths = torch.tensor([1, page, 2 * page + 1, 0, 3 * page - 1])
    keys, values = (torch.full((20, kv_heads, page, size), torch.nan) for _ in range(2))
    q, table = 3 * torch.randn(5, heads, size), torch.full((5, 4), 10**6, dtype=index)
    free, expected = torch.randperm(20).tolist(), torch.zeros(5, heads, size)
    for row, length in enumerate(lengths.tolist()):
        k, v = torch.randn(2, length, kv_heads, size)
        for t in range(length):
            if t % page == 0:
                table[row, t // page] = free.pop()
            spot = int(table[row, t // page]), slice(None), t % page
            keys[spot], values[spot] = k[t], v[t]
        for h in range(heads if length else 0):
            own = h // (heads // kv_heads)
            expected[row, h] = (k[:, own] @ q[row, h] / size**0.5).softmax(0) @ v[:, own]
    found = pooled.paged_attention(q, keys, values, table, lengths.to(index))
    torch.testing.assert_close(found, expected)
    with kernels.switched_off():
        plain = pooled.paged_attention(q, keys.nan_to_num(), values.nan_to_num(), table, lengths.to(index))
    torch.testing.assert_close(plain, expected)


def test_errors_name_what_is_wrong() -> None:
    pool, columns = torch.zeros(3, 2, 4, 4), torch.zeros(3, 8, 3)
    ones = (torch.zeros(1, 2, 4), torch.zeros(1, 2), torch.zeros(2), torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    with pytest.raises(RuntimeError, match="slot 3 is not in a pool of 3"):
        pooled.ssd_step(pool, torch.tensor([3]), *ones, torch.zeros(2))
    with pytest.raises(RuntimeError, match="xbc has shape"):
        pooled.conv_step(columns, torch.tensor([0]), torch.zeros(1, 9), torch.zeros(8, 4), None)
    pages = torch.zeros(2, 1, 4, 8)
    with pytest.raises(RuntimeError, match="no page 7"):
        pooled.paged_attention(torch.zeros(1, 1, 8), pages, pages, torch.tensor([[7]]), torch.tensor([2]))
    with pytest.raises(RuntimeError, match="length 5 in a table of 1 pages"):
        pooled.paged_attention(torch.zeros(1, 1, 8), pages, pages, torch.tensor([[0]]), torch.tensor([5]))


def test_library_that_is_missing_broken_or_unwanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels.find() is None and not list(tmp_path.iterdir())  # nothing is built by surprise
    there = kernels.library()
    there.parent.mkdir(parents=True)
    there.write_bytes(b"not a library")
    monkeypatch.setenv("HOLOTRON_KERNELS", "0")
    assert kernels.find() is None and not caplog.records
    monkeypatch.delenv("HOLOTRON_KERNELS")
    assert kernels.find() is None and "do not load" in caplog.text


def test_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(kernels.BuildError, match="compiling the CPU kernels failed"):
        kernels.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(kernels.BuildError, match="no-such-compiler"):
        kernels.build()
    assert not kernels.library().exists()
