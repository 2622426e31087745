"""Released sizes without weights: every key and shape, counts, memory and image tokens of the public models.

What is expected is spelled out here from the models' public descriptions, apart from the code under test.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from holotron.model.config import ConfigError
from holotron.model.presets import PRESETS, preset_config
from holotron.model.screens import SCREENS, measure_screens
from holotron.model.sizes import Sizes, expected_tensors, measure, read_any_config

Shapes = dict[str, tuple[int, ...]]
HYBRIDS = [name for name in PRESETS if name != "holo2-8b"]

# vocabulary, hidden, Mamba heads, head size, q heads, kv heads, MLP width
DENSE = {
    "holotron-12b": (132096, 5120, 128, 80, 40, 8, 20480),
    "nemotron-nano-12b-v2": (131072, 5120, 128, 80, 40, 8, 20480),
    "nemotron-nano-9b-v2": (131072, 4480, 128, 80, 40, 8, 15680),
    "nemotron-nano-4b": (131072, 3136, 96, 80, 40, 8, 12544),
    "nemotron-3-nano-30b-a3b": (131072, 2688, 64, 64, 32, 2, 0),
    "nemotron-3-nano-omni": (131072, 2688, 64, 64, 32, 2, 0),
    "nemotron-3-super-120b-a12b": (131072, 4096, 128, 64, 32, 2, 0),
}
# experts, expert width, shared width, width the experts see (None: hidden), chosen
EXPERTS = {
    "nemotron-3-nano-30b-a3b": (128, 1856, 3712, None, 6),
    "nemotron-3-nano-omni": (128, 1856, 3712, None, 6),
    "nemotron-3-super-120b-a12b": (512, 2688, 5376, 1024, 22),
}
ATTENTION_AT = {
    "nemotron-nano-12b-v2": [7, 16, 25, 34, 43, 52],
    "nemotron-nano-9b-v2": [14, 21, 30, 39],
    "nemotron-nano-4b": [12, 17, 24, 32],
    "nemotron-3-nano-30b-a3b": [5, 12, 19, 26, 33, 42],
    "nemotron-3-super-120b-a12b": [7, 16, 25, 36, 47, 58, 69, 78],
}
LAYERS = {  # M, -, E, *
    "nemotron-nano-12b-v2": (28, 28, 0, 6),
    "nemotron-nano-9b-v2": (27, 25, 0, 4),
    "nemotron-nano-4b": (21, 17, 0, 4),
    "nemotron-3-nano-30b-a3b": (23, 0, 23, 6),
    "nemotron-3-super-120b-a12b": (40, 0, 40, 8),
}


def language_shapes(name: str) -> Shapes:
    """The table of released keys, for a whole language model."""
    vocabulary, hidden, heads, size, q_heads, kv_heads, mlp = DENSE[name]
    width, channels = heads * size, heads * size + 2 * 8 * 128
    shapes: Shapes = {
        "backbone.embeddings.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "backbone.norm_f.weight": (hidden,),
    }
    kinds: dict[str, Shapes] = {
        "M": {
            "in_proj.weight": (width + channels + heads, hidden),
            "conv1d.weight": (channels, 1, 4), "conv1d.bias": (channels,),
            "A_log": (heads,), "D": (heads,), "dt_bias": (heads,),
            "norm.weight": (width,), "out_proj.weight": (hidden, width),
        },
        "-": {"up_proj.weight": (mlp, hidden), "down_proj.weight": (hidden, mlp)},
        "*": {
            "q_proj.weight": (q_heads * 128, hidden), "o_proj.weight": (hidden, q_heads * 128),
            "k_proj.weight": (kv_heads * 128, hidden), "v_proj.weight": (kv_heads * 128, hidden),
        },
    }  # fmt: skip
    if name in EXPERTS:
        kinds["E"] = expert_shapes(name, hidden)
    for i, letter in enumerate(pattern_of(name)):
        shapes[f"backbone.layers.{i}.norm.weight"] = (hidden,)
        shapes |= {f"backbone.layers.{i}.mixer.{key}": shape for key, shape in kinds[letter].items()}
    return shapes


def expert_shapes(name: str, hidden: int) -> Shapes:
    count, width, shared, latent, _ = EXPERTS[name]
    seen = latent or hidden
    shapes: Shapes = {
        "gate.weight": (count, hidden), "gate.e_score_correction_bias": (count,),
        "shared_experts.up_proj.weight": (shared, hidden), "shared_experts.down_proj.weight": (hidden, shared),
    }  # fmt: skip
    for e in range(count):
        shapes |= {f"experts.{e}.up_proj.weight": (width, seen), f"experts.{e}.down_proj.weight": (seen, width)}
    if latent:
        shapes |= {"fc1_latent_proj.weight": (latent, hidden), "fc2_latent_proj.weight": (hidden, latent)}
    return shapes


def vision_shapes(prefix_tokens: int, hidden: int) -> Shapes:
    """RADIO-H and the projector into a language model of that width."""
    tower = "vision_model.radio_model."
    shapes: Shapes = {
        f"{tower}input_conditioner.norm_mean": (3, 1, 1),
        f"{tower}input_conditioner.norm_std": (3, 1, 1),
        f"{tower}summary_idxs": (2,),
        f"{tower}model.patch_generator.embedder.weight": (1280, 768),
        f"{tower}model.patch_generator.pos_embed": (1, 16384, 1280),
        f"{tower}model.patch_generator.cls_token.token": (prefix_tokens, 1280),
        "mlp1.0.weight": (5120,), "mlp1.1.weight": (20480, 5120), "mlp1.3.weight": (hidden, 20480),
    }  # fmt: skip
    block = {"norm1": (1280,), "norm2": (1280,), "attn.proj": (1280, 1280), "attn.qkv": (3840, 1280),
             "mlp.fc1": (5120, 1280), "mlp.fc2": (1280, 5120)}  # fmt: skip
    for i in range(32):
        for key, shape in block.items():
            shapes[f"{tower}model.blocks.{i}.{key}.weight"] = shape
            shapes[f"{tower}model.blocks.{i}.{key}.bias"] = shape[:1]
    return shapes


def pattern_of(name: str) -> str:
    values = PRESETS[name].values
    return str(values.get("llm_config", values)["hybrid_override_pattern"])


def sizes_of(name: str) -> Sizes:
    return measure(read_any_config(PRESETS[name].values))


def shapes_of(tensors: dict[str, Tensor]) -> Shapes:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", HYBRIDS)
def test_released_keys_and_shapes(name: str) -> None:
    """The whole state dict, key by key, and the sizes that follow from it."""
    wanted = {f"language_model.{key}": shape for key, shape in language_shapes(name).items()}
    prefix_tokens = {"holotron-12b": 16, "nemotron-3-nano-omni": 10}.get(name)
    if prefix_tokens:
        wanted |= vision_shapes(prefix_tokens, DENSE[name][1])
    tensors = expected_tensors(preset_config(name))
    assert shapes_of(tensors) == wanted
    assert all(tensor.is_meta for tensor in tensors.values())
    constants = ("norm_mean", "norm_std", "summary_idxs")
    total = sum(math.prod(shape) for key, shape in wanted.items() if not key.endswith(constants))
    assert measure(preset_config(name), tensors).parameters == total


def test_the_12b_table_as_printed() -> None:
    """A few rows with their numbers, so that no formula of this file stands between the table and the model."""
    shapes = shapes_of(expected_tensors(preset_config("holotron-12b")))
    layer = "language_model.backbone.layers"
    assert shapes[f"{layer}.0.mixer.in_proj.weight"] == (22656, 5120)
    assert shapes[f"{layer}.0.mixer.conv1d.weight"] == (12288, 1, 4)
    assert shapes[f"{layer}.0.mixer.A_log"] == (128,)
    assert shapes[f"{layer}.0.mixer.norm.weight"] == (10240,)
    assert shapes[f"{layer}.1.mixer.up_proj.weight"] == (20480, 5120)
    assert shapes[f"{layer}.7.mixer.k_proj.weight"] == (1024, 5120)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("holotron-12b", "13.18", None),
        ("nemotron-nano-12b-v2", "12.310", None),
        ("nemotron-nano-9b-v2", "8.888", None),
        ("nemotron-nano-4b", "3.97", None),
        ("nemotron-3-nano-30b-a3b", "31.6", "3.2"),
        ("nemotron-3-super-120b-a12b", "120.7", "12.2"),
        ("holo2-8b", "8.77", None),
    ],
)
def test_parameter_counts(name: str, billions: str, active: str | None) -> None:
    """As the model cards and papers round them."""
    sizes = sizes_of(name)
    digits = len(billions.partition(".")[2])
    assert f"{sizes.parameters / 1e9:.{digits}f}" == billions
    assert active is None or f"{sizes.active_parameters / 1e9:.1f}" == active


def test_parts_of_the_vision_language_model() -> None:
    parts = sizes_of("holotron-12b").parts
    language = sum(count for part, count in parts.items() if part not in ("vision", "projector"))
    assert f"{language / 1e9:.3f}" == "12.320"
    assert f"{(language - parts['embeddings'] - parts['lm_head']) / 1e9:.3f}" == "10.968"
    assert f"{parts['vision'] / 1e9:.3f}" == "0.652" and f"{parts['projector'] / 1e9:.3f}" == "0.210"


@pytest.mark.parametrize("name", EXPERTS)
def test_active_parameters_leave_out_table_eyes_and_idle_experts(name: str) -> None:
    count, width, _, latent, chosen = EXPERTS[name]
    vocabulary, hidden = DENSE[name][:2]
    language = sum(math.prod(shape) for shape in language_shapes(name).values())
    idle = pattern_of(name).count("E") * (count - chosen) * 2 * width * (latent or hidden)
    assert sizes_of(name).active_parameters == language - vocabulary * hidden - idle


@pytest.mark.parametrize("name", LAYERS)
def test_patterns(name: str) -> None:
    pattern = pattern_of(name)
    assert tuple(pattern.count(letter) for letter in "M-E*") == LAYERS[name]
    assert [i for i, letter in enumerate(pattern) if letter == "*"] == ATTENTION_AT[name]
    assert pattern_of("holotron-12b") == pattern_of("nemotron-nano-12b-v2")
    assert pattern_of("nemotron-3-nano-omni") == pattern_of("nemotron-3-nano-30b-a3b")


@pytest.mark.parametrize("name", ["nemotron-nano-9b-v2", "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"])
def test_as_many_parameters_as_in_transformers(name: str) -> None:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    values = {key: value for key, value in PRESETS[name].values.items() if not key.startswith(("mtp_", "num_nextn"))}
    with torch.device("meta"):
        theirs = NemotronHForCausalLM(NemotronHConfig(**values)).state_dict()
    assert sum(tensor.numel() for tensor in theirs.values()) == sizes_of(name).parameters


@pytest.mark.parametrize(
    ("name", "kv", "state", "state_16bit", "block", "block_16bit"),
    [
        ("holotron-12b", 24_576, 148_865_024, 75_464_704, 1312, 672),
        ("nemotron-nano-9b-v2", 16_384, 143_548_416, 72_769_536, 1312, 672),
        ("nemotron-3-nano-30b-a3b", 6_144, 49_082_368, 24_965_120, 2096, 1072),
        ("holo2-8b", 147_456, 0, 0, None, None),
    ],
)
def test_memory(name: str, kv: int, state: int, state_16bit: int, block: int | None, block_16bit: int | None) -> None:
    sizes = sizes_of(name)
    assert (sizes.kv_bytes_per_token, sizes.state_bytes_fp32, sizes.state_bytes_16bit) == (kv, state, state_16bit)
    assert (sizes.vllm_block_tokens(), sizes.vllm_block_tokens(16)) == (block, block_16bit)


def test_memory_of_sequences_and_weights() -> None:
    ours, theirs = sizes_of("holotron-12b"), sizes_of("holo2-8b")
    contexts = [8192 * 2**i for i in range(5)]
    assert [ours.sequence_bytes(n) // 2**20 for n in contexts] == [333, 525, 909, 1677, 3213]  # rounded up in print
    assert [theirs.sequence_bytes(n) / 2**20 for n in contexts] == [1152, 2304, 4608, 9216, 18432]
    assert f"{ours.weight_bytes_bf16 / 1e9:.1f}" == "26.4" and f"{theirs.weight_bytes_bf16 / 1e9:.1f}" == "17.5"
    assert (ours.break_even(theirs), ours.break_even(theirs, 16)) == (1212, 615)
    assert ours.state_bytes_fp32 // ours.kv_bytes_per_token == 6057
    assert theirs.break_even(ours) is None and theirs.break_even(theirs) == 0


def test_break_even_is_where_memory_crosses() -> None:
    def of(kv: int, state: int) -> Sizes:
        return Sizes("M*", {"mamba": 1}, 1, 0, kv, state, state // 2)

    rng = random.Random()
    for _ in range(200):
        one, other = (of(rng.randrange(1, 50), rng.randrange(0, 5000)) for _ in range(2))
        at = one.break_even(other)
        if at is None:
            assert one.sequence_bytes(10**6) > other.sequence_bytes(10**6)
            continue
        assert one.sequence_bytes(at) <= other.sequence_bytes(at)
        assert one.sequence_bytes(at + 1000) <= other.sequence_bytes(at + 1000)
        assert at == 0 or one.sequence_bytes(at - 1) > other.sequence_bytes(at - 1)


HOLOTRON_TOKENS = [3328, 768, 1792, 2304, 1792, 2304, 2304, 1792, 2304, 2304, 768, 2816]
HOLOTRON_GRIDS = "4x3+1 2x1+1 3x2+1 4x2+1 3x2+1 4x2+1 4x2+1 3x2+1 4x2+1 4x2+1 1x2+1 2x5+1".split()
HOLO2_TOKENS = [768, 880, 1000, 1032, 1260, 1400, 2040, 2280, 3600, 8160, 312, 2550]
OMNI_TOKENS = [768, 920, 1000, 1032, 1305, 1450, 2040, 2280, 3311, 3311, 351, 2550]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("holotron-12b", HOLOTRON_TOKENS), ("holo2-8b", HOLO2_TOKENS), ("nemotron-3-nano-omni", OMNI_TOKENS)],
)
def test_tokens_of_screenshots(name: str, tokens: list[int]) -> None:
    screens = measure_screens(read_any_config(PRESETS[name].values))
    assert [(screen.width, screen.height) for screen in screens] == list(SCREENS)
    assert [screen.tokens for screen in screens] == tokens
    if name != "holotron-12b":  # there the grid counts tokens
        assert [math.prod(map(int, screen.grid.split("x"))) for screen in screens] == tokens


def test_grids_and_scales_of_tiles() -> None:
    screens = {screen.name: screen for screen in measure_screens(preset_config("holotron-12b"))}
    assert [screen.grid for screen in screens.values()] == HOLOTRON_GRIDS
    for name, scale in {"1024x768": (2.0, 2.0), "1280x720": (0.8, 0.71), "1920x1080": (1.07, 0.95)}.items():
        assert screens[name].scale == pytest.approx(scale, abs=0.005)


def test_text_models_see_no_screens() -> None:
    assert measure_screens(preset_config("nemotron-nano-9b-v2")) == []


def test_tied_embeddings_count_once() -> None:
    values: dict[str, Any] = dict(PRESETS["holo2-8b"].values)
    tied = measure(read_any_config({**values, "tie_word_embeddings": True}))
    apart = sizes_of("holo2-8b")
    assert apart.parameters - tied.parameters == 151936 * 4096
    assert tied.active_parameters == apart.active_parameters  # the table is a matrix of every token's logits


def test_what_is_no_preset() -> None:
    with pytest.raises(ConfigError, match=r"'holotron-13b'.*holotron-12b"):
        preset_config("holotron-13b")
    with pytest.raises(ConfigError, match="holo2-8b has attention layers only"):
        preset_config("holo2-8b")


def test_presets_do_not_share_what_callers_change() -> None:
    config = preset_config("holotron-12b")
    assert config.llm_config is not None
    config.llm_config["vocab_size"] = 7
    config.norm_mean[0] = 9.0  # type: ignore[index]
    assert preset_config("holotron-12b").language.vocab_size == 132096
    assert preset_config("nemotron-3-nano-omni").norm_mean[0] < 1  # type: ignore[index]
