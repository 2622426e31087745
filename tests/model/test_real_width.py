"""One layer of each kind at the width of a released model: fp32 here, float64 in a second, plainer form there.

Only a handful of tokens, and of the experts only those chosen, go through the float64 side. Each layer is freed
before the next; the largest, the experts of Nemotron 3 Nano, takes 5.2 GB.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from holotron.model.config import LanguageConfig
from holotron.model.layers import MLP, Attention, Mamba2Mixer
from holotron.model.moe import MoE
from holotron.model.presets import preset_config
from holotron.model.projector import Projector
from holotron.model.radio import RadioConfig, VisionBlock
from tests.oracles import moe as moe_oracle
from tests.oracles.ssd_recurrence import mamba2_mixer

pytestmark = pytest.mark.slow

BLOCK = 1_000_003  # prime, so that no two rows of a matrix are filled alike


@pytest.fixture(autouse=True)
def no_gradients_and_free_afterwards(seed: int) -> Iterator[None]:
    with torch.no_grad():
        yield
    gc.collect()


def language(preset: str) -> LanguageConfig:
    return preset_config(preset).language


def close(found: Tensor, expected: Tensor, rounding: float = 1e-5) -> None:
    """Largest difference against the largest value, which has to be a real number of ordinary size."""
    size = float(expected.abs().max())
    assert 0.1 < size < 1e4
    assert float((found.double() - expected).abs().max()) < rounding * size


def fill(layer: nn.Module) -> None:
    """Memory and random weights for a layer made on the meta device, at the speed of copying.

    Matrices keep the size of their input; vectors are 1 + noise, biases noise.
    """
    layer.to_empty(device="cpu")
    block = torch.randn(BLOCK)
    for name, parameter in layer.named_parameters():
        if parameter.ndim > 1:
            flat, scale = parameter.view(-1), parameter[0].numel() ** -0.5
            if parameter.ndim == 3 and ".experts." in f".{name}":
                scale = parameter.shape[-1] ** -0.5
            for start in range(0, flat.numel(), BLOCK):
                part = flat[start : start + BLOCK]
                torch.mul(block[: len(part)], scale * (1 + 0.1 * math.sin(start)), out=part)
        else:
            parameter.normal_(std=0.3)
            if not name.endswith("bias"):
                parameter.add_(1)
    for buffer in layer.buffers():
        buffer.normal_(std=0.05)


def test_mamba_of_the_12b() -> None:
    config = language("holotron-12b")
    assert (config.hidden_size, config.mamba_num_heads, config.mamba_head_dim) == (5120, 128, 80)
    with torch.device("meta"):
        layer = Mamba2Mixer(config, 0)
    assert layer.in_proj.weight.shape == (22656, 5120) and layer.conv1d.weight.shape == (12288, 1, 4)
    fill(layer)
    layer.dt_bias.uniform_(-9, -1)
    layer.A_log.uniform_(0, 2.7)
    u = torch.randn(6, 5120)
    expected, _ = mamba2_mixer(layer.state_dict(), u, 128, 80, 8, 128, config.layer_norm_epsilon)
    close(layer(u[None], None, None)[0], expected)


def test_attention_of_the_12b() -> None:
    config = language("holotron-12b")
    with torch.device("meta"):
        layer = Attention(config, 7)
    assert layer.q_proj.weight.shape == (5120, 5120) and layer.k_proj.weight.shape == (1024, 5120)
    fill(layer)
    u = torch.randn(7, 5120)
    q, k, v = (u.double() @ p.weight.double().T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    mixed = torch.zeros(7, 5120, dtype=torch.float64)
    for head in range(40):
        mine, group = slice(128 * head, 128 * head + 128), slice(128 * (head // 5), 128 * (head // 5) + 128)
        for t in range(7):
            scores = torch.exp(k[: t + 1, group] @ q[t, mine] / math.sqrt(128))
            mixed[t, mine] = (scores / scores.sum()) @ v[: t + 1, group]
    close(layer(u[None], None, None)[0], mixed @ layer.o_proj.weight.double().T)


def test_mlp_of_the_12b() -> None:
    with torch.device("meta"):
        layer = MLP(language("holotron-12b"), 1)
    assert layer.up_proj.weight.shape == (20480, 5120)
    fill(layer)
    u = torch.randn(4, 5120)
    expected = moe_oracle.mlp(u.double().T, layer.up_proj.weight, layer.down_proj.weight).T
    close(layer(u[None], None, None)[0], expected)


@pytest.mark.parametrize("preset", ["nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"])
def test_experts_of_nemotron_3(preset: str) -> None:
    """All 128 experts of Nano; of Super's 512, which take 11 GB, 128, at full width, top 22 and in the latent."""
    config = language(preset)
    config.n_routed_experts = 128
    with torch.device("meta"):
        layer = MoE(config, 1)
    shapes = {key: tuple(value.shape) for key, value in layer.state_dict().items()}
    if config.moe_latent_size is None:
        assert shapes["experts.127.up_proj.weight"] == (1856, 2688) and config.num_experts_per_tok == 6
        assert shapes["shared_experts.up_proj.weight"] == (3712, 2688)
    else:
        assert shapes["experts.127.up_proj.weight"] == (2688, 1024) and config.num_experts_per_tok == 22
        assert shapes["fc1_latent_proj.weight"] == (1024, 4096)
        assert shapes["shared_experts.up_proj.weight"] == (5376, 4096)
    fill(layer)
    options = {"top_k": config.num_experts_per_tok, "scale": config.routed_scaling_factor}
    x, expected = torch.zeros(0, config.hidden_size), torch.zeros(0, config.hidden_size, dtype=torch.float64)
    while len(x) < 3:
        token = torch.randn(1, config.hidden_size)
        gate = (layer.gate.weight, layer.gate.e_score_correction_bias)
        if moe_oracle.route(token[0], *gate, **options).margin > 1e-5:  # else rounding could choose otherwise
            x, expected = (
                torch.cat([x, token]),
                torch.cat([expected, moe_oracle.moe(layer.state_dict(), token, **options)[0]]),
            )
    close(layer(x[None], None, None)[0], expected)


def test_vision_block_of_radio_h() -> None:
    config = RadioConfig()
    block = VisionBlock(config)
    assert (config.hidden, config.heads, config.mlp) == (1280, 16, 5120)
    fill(block)
    x = torch.randn(9, 1280)
    w = {name: value.double() for name, value in block.state_dict().items()}

    def norm(h: Tensor, name: str) -> Tensor:
        centred = h - h.mean(-1, keepdim=True)
        return (
            centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"] + w[f"{name}.bias"]
        )

    h = x.double()
    q, k, v = (norm(h, "norm1") @ w["attn.qkv.weight"].T + w["attn.qkv.bias"]).split(1280, -1)
    mixed = torch.zeros_like(h)
    for head in range(16):
        mine = slice(80 * head, 80 * head + 80)
        for t in range(9):
            scores = torch.exp(k[:, mine] @ q[t, mine] / math.sqrt(80))
            mixed[t, mine] = (scores / scores.sum()) @ v[:, mine]
    h = h + mixed @ w["attn.proj.weight"].T + w["attn.proj.bias"]
    inner = norm(h, "norm2") @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"]
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    close(block(x[None])[0], h + inner @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"])


def test_projector_of_the_12b() -> None:
    config = preset_config("holotron-12b")
    with torch.device("meta"):
        projector = Projector(4 * config.vit_hidden_size, config.projector_hidden_size, config.language.hidden_size)
    fill(projector)
    w = projector.state_dict()
    assert {key: tuple(value.shape) for key, value in w.items()} == {
        "0.weight": (5120,),
        "1.weight": (20480, 5120),
        "3.weight": (5120, 20480),
    }
    x = torch.randn(5, 5120)
    wide = x.double()
    normed = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * w["0.weight"].double()
    close(projector(x), moe_oracle.mlp(normed.T, w["1.weight"], w["3.weight"]).T)
