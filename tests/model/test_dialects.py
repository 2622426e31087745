"""One model, told in every dialect of the family's config files."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from transformers import NemotronHConfig

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.dialects import read_config
from holotron.model.processing import processor_of, read_preprocessor
from holotron.model.radio import RadioConfig
from tests.model.tiny import TINY

STATISTICS = {"norm_mean": [0.48, 0.46, 0.41], "norm_std": [0.27, 0.26, 0.28]}
TEACHERS = [{"name": name} for name in ("clip", "siglip", "dino", "sam")]
ARGS = {"model": "vit_huge_patch16_224", "register_multiple": 16, "teachers": TEACHERS, "cls_token_per_teacher": True}


def renamed(names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in TINY.items()}


@pytest.mark.parametrize(
    "values",
    [
        TINY,
        NemotronHConfig(**TINY).to_dict(),
        json.loads(NemotronHConfig(**TINY).to_json_string()),
        renamed({"n_groups": "mamba_n_groups", "chunk_size": "mamba_chunk_size", "ssm_state_size": "mamba_d_state"}),
        renamed({"head_dim": "attention_head_dim"}) | {"mamba_d_conv": 4, "mamba_conv_bias": True, "mamba_expand": 2},
        {**TINY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        {**TINY, "norm_eps": 1e-5, "num_hidden_layers": 999},
        {**TINY, "time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_min": 0.001},
        {**TINY, "mamba_dt_limit": [0.0, "Infinity"], "mamba_dt_min": 0.001, "mamba_dt_init_floor": 1e-4},
        {**TINY, "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1, "block_configs": None},
        {
            **{key: value for key, value in TINY.items() if key != "hybrid_override_pattern"},
            "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp"],
        },
        {
            **{key: value for key, value in TINY.items() if key != "hybrid_override_pattern"},
            "layer_types": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "mamba", "mlp"],
        },
    ],
)
@pytest.mark.parametrize("where", ["top", "llm_config", "text_config"])
def test_dialects_of_the_language_model(values: dict[str, Any], where: str) -> None:
    read = read_config(values if where == "top" else {where: values, "model_type": "anything"}).language
    expected = HolotronConfig(llm_config=TINY).language
    for name in TINY:
        assert getattr(read, name) == getattr(expected, name), name
    assert read.time_step_limit == (0.0, math.inf) and read.layer_norm_epsilon == 1e-5 and read.conv_kernel == 4


@pytest.mark.parametrize("label", ["NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3", "made_up"])
@pytest.mark.parametrize("name", ["vision_config", "raw_vision_config"])
def test_content_decides_not_the_label(label: str, name: str) -> None:
    """Early Omni files carry the label of the 12B model: patches without tiles make the difference."""
    values = {"model_type": label, "architectures": [label], "llm_config": TINY, **STATISTICS}
    tiles = read_config({**values, name: {"args": ARGS, "patch_size": 16}})
    tower = RadioConfig.from_dict(tiles.vision_config or {})
    assert (tower.hidden, tower.depth, tower.heads, tower.mlp, tower.prefix_tokens) == (1280, 32, 16, 5120, 16)
    assert tiles.image_processor == "tiles"
    args = {**ARGS, "min_num_patches": 1024, "max_num_patches": 2048, "cpe_max_size": 1024}
    whole = read_config({**values, name: {"args": args}})
    assert (whole.image_processor, whole.min_num_patches, whole.max_num_patches) == ("dynamic", 1024, 2048)
    assert RadioConfig.from_dict(whole.vision_config or {}).pos_grid == 64


@pytest.mark.parametrize(
    ("args", "prefix_tokens"),
    [
        (ARGS, 16),
        ({**ARGS, "register_multiple": 8}, 8),
        ({**ARGS, "teachers": TEACHERS * 2}, 16),  # the same teacher twice has one summary token
        ({**ARGS, "cls_token_per_teacher": False, "register_multiple": None, "num_registers": 9}, 10),
    ],
)
def test_prefix_tokens(args: dict[str, Any], prefix_tokens: int) -> None:
    config = read_config({"llm_config": TINY, "vision_config": {"args": args}, **STATISTICS})
    assert RadioConfig.from_dict(config.vision_config or {}).prefix_tokens == prefix_tokens


def test_remote_code_is_forgotten() -> None:
    auto_map = {"AutoModel": "modeling.Evil"}
    values = {"llm_config": {**TINY, "auto_map": auto_map}, "auto_map": auto_map, "vision_config": {"args": ARGS}}
    config = read_config({**values, **STATISTICS})
    assert "auto_map" not in config.to_json_string() and "Evil" not in config.to_json_string()


def test_a_read_config_reads_itself_back() -> None:
    values = {"llm_config": TINY, "vision_config": {"args": ARGS}, "eos_token_id": [2, 12], **STATISTICS}
    first = read_config(values)
    again = read_config(json.loads(first.to_json_string()))
    assert again.to_dict() == first.to_dict() and again.language == first.language
    assert again.eos_token_id == [2, 12]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama", "hidden_size": 8}, "model_type 'llama'.* describes no model of this family"),
        ({"llm_config": {**TINY, "block_configs": [{}]}}, "block_configs"),
        ({"llm_config": {**TINY, "mamba_proj_bias": True}}, "mamba_proj_bias=True"),
        ({"llm_config": {**TINY, "mlp_hidden_act": "silu"}}, "mlp_hidden_act='silu'"),
        ({"llm_config": {**TINY, "tie_word_embeddings": True}}, "tie_word_embeddings=True"),
        ({"llm_config": {**TINY, "hybrid_override_pattern": "M?"}}, r"'M\?'"),
        ({"llm_config": {**TINY, "hybrid_override_pattern": "", "layers_block_type": ["conv"]}}, "conv|letters"),
        ({"llm_config": {k: v for k, v in TINY.items() if k != "intermediate_size"}}, "intermediate_size"),
        ({"llm_config": TINY, "vision_config": {"args": {"model": "eva02"}}}, "'eva02'"),
        ({"model_type": "holotron", "llm_config": {**TINY, "num_hidden_layers": 3}}, "num_hidden_layers 3"),
    ],
)
def test_what_cannot_be_computed_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(values)


def test_preprocessor_config() -> None:
    base = {"llm_config": TINY, "vision_config": {"args": ARGS}}
    config = read_config(base)
    with pytest.raises(ConfigError, match="norm_mean and norm_std"):
        processor_of(config)
    read_preprocessor(config, {**STATISTICS, "max_num_tiles": 1, "image_size": 512, "auto_map": {"a": "b"}})
    processor = processor_of(config)
    assert processor is not None and processor.num_tokens(1920, 1080) == 256
    config = read_config(base)
    omni = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "min_num_patches": 4, "max_num_tiles": 12}
    read_preprocessor(config, omni)
    assert (config.image_processor, config.min_num_patches, config.norm_std) == ("dynamic", 4, [0.5] * 3)
    assert config.max_num_patches == 13312 and config.patch_size == 16
    for wrong, message in [
        ({"image_mean": [0.5] * 3, "norm_mean": [0.4] * 3, "norm_std": [0.5] * 3}, "norm_mean"),
        ({**STATISTICS, "do_normalize": False}, "do_normalize"),
        ({**STATISTICS, "sharpen": 2}, "sharpen"),
        ({"norm_mean": [0.5] * 3}, "lacks norm_std"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_preprocessor(read_config(base), wrong)
