"""Public members of the family by name, as values of their config.json, so that sizes need no download.

The values come from public source code and model cards. Where no public config.json was at hand, `inferred` says
which values were deduced; `holotron inspect` shows them as unverified.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.dialects import read_config

_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]

# The mixture-of-experts models keep a strict Mamba-MoE alternation and put attention layers in between.
_NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER_120B = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"


@dataclass(frozen=True, slots=True)
class Preset:
    """A released model: `values` are those of its config.json, `source` its id on the Hugging Face hub."""

    description: str
    source: str
    licence: str
    values: Mapping[str, Any]
    inferred: tuple[str, ...] = ()


def _hybrid(
    pattern: str, hidden: int, heads: int, kv_heads: int, mamba: tuple[int, int], **more: Any
) -> dict[str, Any]:
    """The language config of a NemotronH model; `mamba` is heads and head size."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": hidden,
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "mamba_num_heads": mamba[0],
        "mamba_head_dim": mamba[1],
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "tie_word_embeddings": False,
        "residual_in_fp32": False,
        "max_position_embeddings": 131072,
        **more,
    }


def _experts(count: int, chosen: int, width: int, shared: int, scale: float) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": shared,
        "n_shared_experts": 1,
        "routed_scaling_factor": scale,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "eos_token_id": [2, 11],
    }


_TEXT_12B = _hybrid(
    "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    5120, 40, 8, (128, 80), intermediate_size=20480,
)  # fmt: skip
_TEXT_9B = _hybrid(
    "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    4480, 40, 8, (128, 80), intermediate_size=15680,
)  # fmt: skip
_TEXT_4B = _hybrid(
    "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    3136, 40, 8, (96, 80), intermediate_size=12544, chunk_size=256, max_position_embeddings=262144,
)  # fmt: skip
_TEXT_30B = _hybrid(_NANO_30B, 2688, 32, 2, (64, 64), **_experts(128, 6, 1856, 3712, 2.5))
_TEXT_120B = _hybrid(
    _SUPER_120B, 4096, 32, 2, (128, 64), **_experts(512, 22, 2688, 5376, 5.0), moe_latent_size=1024,
    num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E",
)  # fmt: skip

_VISION_LANGUAGE: dict[str, Any] = {
    "patch_size": 16,
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "image_tag_type": "internvl",
    "vit_hidden_size": 1280,
    "projector_hidden_size": 20480,
    "norm_mean": _CLIP_MEAN,
    "norm_std": _CLIP_STD,
    "img_context_token": "<image>",
    "img_start_token": "<img>",
    "img_end_token": "</img>",
    "video_context_token": "<video>",
}
_HOLOTRON_12B: dict[str, Any] = {
    "architectures": ["NemotronH_Nano_VL_V2"],
    "model_type": "NemotronH_Nano_VL_V2",
    "llm_config": {**_TEXT_12B, "vocab_size": 132096},
    "vision_config": {
        "model_type": "radio",
        "patch_size": 16,
        "args": {"model": "vit_huge_patch16_224", "register_multiple": 16, "cpe_max_size": 2048},
    },
    **_VISION_LANGUAGE,
    "force_image_size": 512,
    "max_num_tiles": 12,
    "use_thumbnail": True,
    "img_context_token_id": 131072,
    "bos_token_id": 1,
    "eos_token_id": 12,
}
_OMNI: dict[str, Any] = {
    "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
    "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
    "llm_config": _TEXT_30B,
    "vision_config": {
        "model_type": "radio",
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "mlp_ratio": 4.0,
        "layer_norm_eps": 1e-6,
        "patch_size": 16,
        "max_img_size": 2048,
        "num_cls_tokens": 3,
        "num_registers": 7,
        "args": {"min_num_patches": 1024, "max_num_patches": 13312},
    },
    **_VISION_LANGUAGE,
    "use_thumbnail": False,
    "img_context_token_id": 18,
    "bos_token_id": 1,
    "eos_token_id": 11,
}
_HOLO2_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_theta": 5000000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
    "image_token_id": 151655,
}

_NVIDIA = "NVIDIA Open Model License"
_NEMOTRON = "NVIDIA Nemotron Open Model License"
_NOT_IN_CONFIG = "time_step_* values and the stored dtype of A_log, D and dt_bias (sizes do not depend on them)"
PRESETS: dict[str, Preset] = {
    "holotron-12b": Preset(
        "computer-use model fine-tuned from Nemotron Nano 12B v2 VL: dense hybrid, 512 px tiles",
        "Hcompany/Holotron-12B", _NVIDIA, _HOLOTRON_12B,
        (
            "vocab_size 132096 (131072 cannot hold the image token's id 131072)",
            "16 prefix tokens in the vision tower",
            "projector_hidden_size 20480",
            "norm_mean, norm_std (those of CLIP)",
            "max_num_tiles 12 (belongs to preprocessor_config.json)",
            "eos_token_id 12, max_position_embeddings, chunk_size",
            "any change of Holotron-12B against its base model",
            _NOT_IN_CONFIG,
        ),
    ),
    "nemotron-nano-12b-v2": Preset(
        "dense hybrid text model, from which Holotron-12B's language model descends",
        "nvidia/NVIDIA-Nemotron-Nano-12B-v2", _NVIDIA, _TEXT_12B, ("chunk_size", _NOT_IN_CONFIG),
    ),
    "nemotron-nano-9b-v2": Preset(
        "dense hybrid text model, pruned from 12B v2",
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2", _NVIDIA, _TEXT_9B, (_NOT_IN_CONFIG,),
    ),
    "nemotron-nano-4b": Preset(
        "dense hybrid text model of the third generation, pruned from 9B v2",
        "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", _NEMOTRON, _TEXT_4B, (_NOT_IN_CONFIG,),
    ),
    "nemotron-3-nano-30b-a3b": Preset(
        "mixture-of-experts hybrid text model",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", _NEMOTRON, _TEXT_30B, (_NOT_IN_CONFIG,),
    ),
    "nemotron-3-nano-omni": Preset(
        "30B-A3B with eyes for the screen's own resolution; the base of Holotron-3-Nano (audio not counted)",
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16", _NEMOTRON, _OMNI,
        (
            "projector_hidden_size 20480",
            "norm_mean, norm_std (those of CLIP)",
            "10 prefix tokens in the vision tower",
            "eos_token_id 11",
            _NOT_IN_CONFIG,
        ),
    ),
    "nemotron-3-super-120b-a12b": Preset(
        "latent mixture-of-experts hybrid text model (multi-token prediction head not counted)",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", _NEMOTRON, _TEXT_120B,
        ("the order of the layers (from several independent public ports, not from NVIDIA's file)", _NOT_IN_CONFIG),
    ),
    "holo2-8b": Preset(
        "the attention baseline, fine-tuned from Qwen3-VL-8B-Thinking; sizes only, it cannot be loaded",
        "Hcompany/Holo2-8B", "see its model card", _HOLO2_8B, ("rope_theta (sizes do not depend on it)",),
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """Raises ConfigError that lists the presets."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"no preset is called {name!r}; presets: {', '.join(PRESETS)}") from None


def preset_config(name: str) -> HolotronConfig:
    """The config of a hybrid preset. Raises ConfigError for an unknown name and for `holo2-8b`, which is no hybrid."""
    values = find_preset(name).values
    if values["model_type"] == "qwen3_vl":
        raise ConfigError(f"{name} has attention layers only; it serves comparisons of size and cannot be built here")
    return read_config(copy.deepcopy(dict(values)))
