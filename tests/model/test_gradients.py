"""What training differentiates: the fp64 recurrence's gradients, and the same ones with layers recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holotron.model import cpu_attention, kernels
from holotron.model.cache import HybridCache
from holotron.model.config import LanguageConfig
from holotron.model.fused import conv_silu, rms_norm, squared_relu
from holotron.model.layers import Attention, Mamba2Mixer
from holotron.model.linear import Linear, worthwhile
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.ssd import ssd_chunked
from tests.model.tiny import TINY, build, randomise, tokens
from tests.oracles.ssd_recurrence import mamba2_mixer

# Largest error of a gradient, as a share of the largest reference gradient of the same tensor. Seen: 1e-6 (fp32
# rounding of sums), with fast decay and small norm groups 4e-5 (a group of nearly nothing is scaled up to one).
TOLERANCE = {"slow": 2e-5, "fast": 3e-4}


def reference(mixer: Mamba2Mixer, config: LanguageConfig, u: Tensor, seed_gradient: Tensor) -> dict[str, Tensor]:
    """Gradients of sum(out * seed_gradient) by autograd through the sequential recurrence in float64."""
    weights = {name: p.detach().double().requires_grad_() for name, p in mixer.named_parameters()}
    inputs = u.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row, gradient in zip(inputs, seed_gradient, strict=True):
        out, _ = mamba2_mixer(
            weights,
            row,
            config.mamba_num_heads,
            config.mamba_head_dim,
            config.n_groups,
            config.ssm_state_size,
            config.layer_norm_epsilon,
        )
        total = total + (out * gradient.double()).sum()
    total.backward()
    found = {name: p.grad for name, p in weights.items()} | {"u": inputs.grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize(
    ("changes", "length"),
    [({}, 37), ({"n_groups": 1}, 70), ({"n_groups": 8, "use_conv_bias": False}, 16), ({"conv_kernel": 2}, 5), ({}, 2)],
)
@pytest.mark.parametrize("decay", ["slow", "fast"])
def test_mixer_gradients_equal_recurrence(seed: int, changes: dict[str, Any], length: int, decay: str) -> None:
    """Every parameter and the input, with decay from hardly any to underflow within a chunk."""
    config = LanguageConfig.from_dict({**TINY, **changes})
    mixer = Mamba2Mixer(config, 0)
    randomise(mixer)
    if decay == "fast":
        mixer.dt_bias.data.uniform_(0, 6)
    u, seed_gradient = torch.randn(2, length, 64), torch.randn(2, length, 64)
    expected = reference(mixer, config, u, seed_gradient)
    u.requires_grad_()
    (mixer(u, None, None) * seed_gradient).sum().backward()
    found = {name: p.grad for name, p in mixer.named_parameters()} | {"u": u.grad}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name] is not None and gradient.abs().max() > 0, name
        assert (found[name] - gradient).abs().max() <= TOLERANCE[decay] * gradient.abs().max(), name


def test_packed_mixer_gradients_equal_recurrence(seed: int) -> None:
    """Two documents in a row against the recurrence run on each alone."""
    config = LanguageConfig.from_dict(TINY)
    mixer = Mamba2Mixer(config, 0)
    randomise(mixer)
    mixer.dt_bias.data.uniform_(-4, 0)
    u, seed_gradient = torch.randn(1, 41, 64), torch.randn(1, 41, 64)
    pieces = [slice(0, 13), slice(13, 41)]
    parts = [reference(mixer, config, u[:, piece], seed_gradient[:, piece]) for piece in pieces]
    u.requires_grad_()
    segments = torch.tensor([[0] * 13 + [1] * 28])
    (mixer(u, None, None, segments) * seed_gradient).sum().backward()
    for name, p in mixer.named_parameters():
        gradient = parts[0][name] + parts[1][name]
        assert p.grad is not None
        assert (p.grad - gradient).abs().max() <= TOLERANCE["slow"] * gradient.abs().max(), name
    gradient = torch.cat([part["u"] for part in parts], 1)
    assert u.grad is not None
    assert (u.grad - gradient).abs().max() <= TOLERANCE["slow"] * gradient.abs().max()


def losses_and_gradients(
    model: HolotronForConditionalGeneration, ids: Tensor, **arguments: Any
) -> tuple[Tensor, dict[str, Tensor], int]:
    """The loss, all gradients, and the bytes that autograd kept between forward and backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids, **arguments).loss
    total = sum(kept.values())
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, total


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpointing_changes_memory_alone(seed: int, reentrant: bool, packed: bool) -> None:
    """Through transformers' switch: same loss, same gradients, less kept; the recompute sees the borders as well."""
    model = build(hybrid_override_pattern="M-M*-M-M-*-").train()
    ids = tokens(2, 60)
    arguments: dict[str, Tensor] = {}
    if packed:
        arguments["segment_ids"] = torch.tensor([[0] * 25 + [1] * 35, [3] * 7 + [5] * 41 + [-1] * 12])
    plain_loss, plain, plain_bytes = losses_and_gradients(model, ids, **arguments)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    loss, found, kept = losses_and_gradients(model, ids, **arguments)
    torch.testing.assert_close(loss, plain_loss, atol=0, rtol=1e-6)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    assert kept < plain_bytes / 4
    model.gradient_checkpointing_disable()
    assert losses_and_gradients(model, ids, **arguments)[2] > kept * 4


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpointing_refuses_a_cache(seed: int) -> None:
    """A layer run twice would advance the cache twice. Without gradients nothing runs twice."""
    model = build().train()
    model.gradient_checkpointing_enable()
    cache = HybridCache.empty(model.config.language, 1)
    with pytest.raises(ValueError, match="gradient checkpointing .* cache"):
        model(tokens(1, 4), cache=cache)
    with torch.no_grad():
        model(tokens(1, 4), cache=cache)
    assert cache.lengths.tolist() == [4]


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("heads", "groups", "length", "chunk"), [(4, 2, 11, 4), (3, 1, 13, 5), (2, 2, 7, 16), (2, 1, 1, 8)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_chunk_scan_gradient_by_differences(
    seed: int, heads: int, groups: int, length: int, chunk: int, packed: bool
) -> None:
    """All seven inputs, the last state included, against finite differences in float64."""
    b, c = double(2, length, groups, 2), double(2, length, groups, 2)
    dt = torch.rand(2, length, heads, dtype=torch.float64, requires_grad=True)
    a = (-torch.rand(heads, dtype=torch.float64) - 0.1).requires_grad_()
    segments = torch.randint(0, 4, (2, length)).sort(1).values if packed else None
    leaves = (double(2, length, heads, 3), dt, a, b, c, double(heads), double(2, heads, 3, 2))
    assert torch.autograd.gradcheck(lambda *t: ssd_chunked(*t[:6], chunk, t[6], segments), leaves)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_convolution_gradient_by_differences(seed: int, length: int, packed: bool) -> None:
    segments = torch.randint(0, 3, (2, length)).sort(1).values if packed else None
    leaves = (double(2, length, 3), double(3, 4), double(3))
    assert torch.autograd.gradcheck(lambda x, w, bias: conv_silu(x, w, bias, segments), leaves)
    assert torch.autograd.gradcheck(lambda x, w: conv_silu(x, w, None, segments), leaves[:2])


def test_norm_and_activation_gradients_by_differences(seed: int) -> None:
    x = double(2, 3, 2, 5)
    assert torch.autograd.gradcheck(lambda t, w: rms_norm(t, w, 1e-5), (x, double(5)))
    assert torch.autograd.gradcheck(lambda t, w: rms_norm(t, w, 1e-5), (x, double(2, 5)))
    assert torch.autograd.gradcheck(squared_relu, x)
    with torch.no_grad():
        w = double(5)
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
        torch.testing.assert_close(rms_norm(x, w, 1e-5), expected)
        torch.testing.assert_close(squared_relu(x), x.clamp(min=0) ** 2)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize(("inner", "outer"), [(160, 400), (400, 160)])
@pytest.mark.filterwarnings("ignore:TF32")
def test_large_products_equal_torch(seed: int, inner: int, outer: int) -> None:
    """Through oneDNN, on rows that are views, with and without a frozen weight; small ones take torch's way."""
    layer = Linear(inner, outer)
    x = torch.randn(2, 90, inner + 7)[..., :inner].requires_grad_()
    gradient = torch.randn(2, 90, outer)
    assert worthwhile(x, layer.weight) and not worthwhile(x[:, :10], layer.weight)
    found = layer(x)
    assert "OneDnn" in type(found.grad_fn).__name__
    expected = F.linear(x.double(), layer.weight.double())
    assert (found - expected).abs().max() < 1e-5
    with torch.no_grad():
        assert (layer(x) - expected).abs().max() < 1e-5
    wanted = torch.autograd.grad(expected, (x, layer.weight), gradient.double())
    for mine, theirs in zip(torch.autograd.grad(found, (x, layer.weight), gradient), wanted, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    gaps = torch.autograd.grad(layer(x.detach().requires_grad_()), layer.weight, gradient)  # dW from rows with gaps
    assert (gaps[0] - wanted[1]).abs().max() <= 1e-5 * wanted[1].abs().max()
    layer.requires_grad_(False)
    (frozen,) = torch.autograd.grad(layer(x), x, gradient)
    torch.testing.assert_close(frozen, wanted[0].float(), atol=1e-4, rtol=1e-4)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not worthwhile(x, layer.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(256, 2, 1), (301, 4, 2), (515, 2, 2)])
def test_blocked_attention_equals_torch(seed: int, length: int, heads: int, kv_heads: int) -> None:
    """Values and gradients against torch's in float64, on the views that projections hand over."""
    inputs = [torch.randn(2, length, n, 16).transpose(1, 2).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    gradient = torch.randn(2, heads, length, 16)
    with kernels.switched_off():
        assert cpu_attention.serves(inputs[0])
        found = cpu_attention.causal_attention(*inputs)
    expected = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    assert (found - expected).abs().max() < 1e-5
    mine, theirs = torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, exact, gradient.double())
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_long_attention_layer_takes_blocks(seed: int) -> None:
    """One long sequence, and the same behind a cache and as the second of two documents (torch's masked way)."""
    config = LanguageConfig.from_dict({**TINY, "hybrid_override_pattern": "*"})
    layer = Attention(config, 0)
    u = torch.randn(1, 300, 64)
    with torch.no_grad():
        alone = layer(u, None, None)
        torch.testing.assert_close(layer(u, None, HybridCache.empty(config, 1, capacity=300)), alone)
        both = torch.cat([torch.randn(1, 40, 64), u], 1)
        packed = layer(both, None, None, torch.tensor([[0] * 40 + [1] * 300]))[:, 40:]
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
        with torch.backends.mkldnn.flags(enabled=False):
            torch.testing.assert_close(layer(u, None, None), alone, atol=1e-5, rtol=1e-5)
