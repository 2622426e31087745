"""What the config files of each release say, with small numbers: the dialects, not one dialect of ours.

Sources: the key names of the releases as public code reads them (transformers' `nemotron_h`, `nemotron_h_omni`,
`radio`, `qwen3_vl`; vLLM's `nano_nemotron_vl`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from holotron.model.tiny_checkpoints.vocabulary import OMNI_V3, QWEN3, TEXT_V2, TEXT_V3, VL_V2, Vocabulary

Values = dict[str, Any]

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
PATCH = 16
TILE = 64  # pixels; a tile is 4 x 4 patches and 2 x 2 tokens
POSITIONS = 256  # pixels of the largest square the position embedding is stored for
LEAST_PATCHES, MOST_PATCHES = 16, 256


@dataclass(frozen=True, slots=True)
class Tower:
    """Sizes of a RADIO tower; `name` is what a release calls it, `listed` whether readers know the name."""

    name: str
    hidden: int
    depth: int
    heads: int
    listed: bool

    def sizes(self) -> Values:
        """As transformers' `radio` states them. A release leaves them out: there the name says it all."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "mlp_ratio": 4.0,
            "max_img_size": POSITIONS,
        }


TOWERS = {
    "tiny": Tower("holotron_vit_tiny_patch16", 64, 2, 2, listed=False),
    "vit_small": Tower("vit_small_patch16_224", 384, 12, 6, listed=True),
}


def _language(words: Vocabulary, pattern: str, hidden: int, *, rows: int | None = None, **more: Any) -> Values:
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": words.id("<s>"),
        "chunk_size": 16,
        "conv_kernel": 4,
        "eos_token_id": words.id(words.eos),
        "expand": 2,
        "head_dim": 32,
        "hidden_dropout": 0.0,
        "hidden_size": hidden,
        "hybrid_override_pattern": pattern,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 16,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 8,
        "mamba_proj_bias": False,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_groups": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": len(pattern),
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "pad_token_id": 0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "ssm_state_size": 16,
        "tie_word_embeddings": False,
        "time_step_floor": 1e-4,
        "time_step_limit": [0.0, math.inf],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": len(words) if rows is None else rows,
        **more,
    }


def _experts(count: int, chosen: int, shared: int, scale: float) -> Values:
    return {
        "mamba_ssm_cache_dtype": "float32",
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": shared,
        "n_group": 1,
        "n_routed_experts": count,
        "n_shared_experts": 1,
        "norm_eps": 1e-5,
        "norm_topk_prob": True,
        "num_experts_per_tok": chosen,
        "partial_rotary_factor": 1.0,  # a release says so and rotates nothing
        "rope_theta": 10000,
        "routed_scaling_factor": scale,
        "topk_group": 1,
        "intermediate_size": 48,
    }


def dense_text(tower: Tower | None) -> Values:
    """Like 9B v2: neither the Mamba width nor the query width follows from the hidden size."""
    return _language(TEXT_V2, "M-MM-M*-M-", 96, intermediate_size=160, rms_norm_eps=1e-5)


def moe_text(tower: Tower | None) -> Values:
    """Like Nemotron 3 Nano."""
    return _language(TEXT_V3, "MEM*EME", 64, **_experts(8, 3, 96, 2.5))


def latent_text(tower: Tower | None) -> Values:
    """Like Nemotron 3 Super: experts in a latent space and a head that predicts one token more."""
    more: Values = {"moe_latent_size": 32, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    return _language(TEXT_V3, "MEM*EME", 64, **_experts(12, 4, 80, 5.0), **more)


def _vision(tower: Tower, multiple: int, teachers: tuple[tuple[str, bool], ...], version: str, **more: Any) -> Values:
    args = {
        "model": tower.name,
        "cpe_max_size": POSITIONS,
        "register_multiple": multiple,
        "teachers": [{"name": name, "type": name, "use_summary": used} for name, used in teachers],
        "cls_token_per_teacher": True,
        **more,
    }
    return {
        "args": args,
        "version": version,
        "patch_size": PATCH,
        "max_resolution": POSITIONS,
        "preferred_resolution": [TILE, TILE],
        "adaptor_names": None,
        "vitdet_window_size": None,
    }


def _images(words: Vocabulary, tower: Tower) -> Values:
    return {
        "downsample_ratio": 0.5,
        "force_image_size": TILE,
        "image_tag_type": "internvl",
        "img_context_token": "<image>",
        "img_context_token_id": words.id("<image>"),
        "img_end_token": "</img>",
        "img_start_token": "<img>",
        "max_sequence_length": 4096,
        "norm_mean": CLIP_MEAN,
        "norm_std": CLIP_STD,
        "patch_size": PATCH,
        "projector_hidden_size": 96,
        "ps_version": "v2",
        "video_context_token": "<video>",
        "video_context_token_id": words.id("<video>"),
        "video_pruning_rate": 0.0,
        "vit_hidden_size": tower.hidden,
    }


def tiled(tower: Tower | None) -> Values:
    """Like 12B v2 VL, hence Holotron-12B. The vocabulary has more rows than tokens, as there."""
    assert tower is not None
    llm = _language(VL_V2, "M-M*-M-", 128, rows=384, intermediate_size=80, mamba_head_dim=32, rms_norm_eps=1e-5)
    teachers = (("clip", True), ("siglip", True), ("dino_v2", True), ("sam", False))
    vision = _vision(tower, 16, teachers, "radio_v2.5-h")
    if not tower.listed:
        vision |= tower.sizes()
    return {
        "architectures": ["NemotronH_Nano_VL_V2"],
        "model_type": "NemotronH_Nano_VL_V2",
        "llm_config": llm,
        "vision_config": vision,
        **_images(VL_V2, tower),
        "img_start_token_id": VL_V2.id("<img>"),
        "img_end_token_id": VL_V2.id("</img>"),
        "template": "chatml",
        "use_thumbnail": True,
    }


def omni(tower: Tower | None) -> Values:
    """Like Nemotron 3 Nano Omni. Sizes of the tower are stated because transformers reads no `args.model`."""
    assert tower is not None
    teachers = (("siglip2", True), ("dino_v3", True), ("sam3", False), ("clip", False))
    limits = {"min_num_patches": LEAST_PATCHES, "max_num_patches": MOST_PATCHES}
    vision = _vision(tower, 10, teachers, "c-radio_v4-h", **limits) | tower.sizes()
    vision |= {"num_cls_tokens": 4, "num_registers": 6}
    vision |= {"video_temporal_patch_size": 2, "separate_video_embedder": True, "video_target_num_patches": 16}
    return {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "llm_config": _language(OMNI_V3, "MEM*EME", 64, **_experts(8, 3, 96, 2.5)),
        "vision_config": vision,
        "sound_config": {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "conv_kernel_size": 9,
            "convolution_bias": False,
            "subsampling_factor": 8,
            "subsampling_conv_channels": 8,
            "subsampling_conv_kernel_size": 3,
            "subsampling_conv_stride": 2,
            "num_mel_bins": 16,
            "projection_hidden_size": 48,
            "projection_bias": False,
            "sampling_rate": 16000,
        },
        "sound_context_token": "<so_embedding>",
        "sound_context_token_id": OMNI_V3.id("<so_embedding>"),
        **_images(OMNI_V3, tower),
        "use_thumbnail": False,
    }


def omni_dense(tower: Tower | None) -> Values:
    """Sizes of the dense stand-in; its config.json is written by transformers, in the dialect of its version 5."""
    assert tower is not None
    vision = tower.sizes() | {"patch_size": PATCH, "num_cls_tokens": 3, "num_registers": 5}
    return {
        "model_type": "nemotron_h_omni",
        "llm_config": _language(OMNI_V3, "M-M*-M-", 64, intermediate_size=96),
        "vision_config": vision | {"video_temporal_patch_size": 2},
        "sound_config": None,
        "force_image_size": TILE,
        "projector_hidden_size": 128,
        "vit_hidden_size": tower.hidden,
        "img_context_token_id": OMNI_V3.id("<image>"),
    }


def attention_baseline(tower: Tower | None) -> Values:
    """Like Holo2-8B, which is a Qwen3-VL."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": QWEN3.id("<|image_pad|>"),
        "video_token_id": QWEN3.id("<|video_pad|>"),
        "vision_start_token_id": QWEN3.id("<|vision_start|>"),
        "vision_end_token_id": QWEN3.id("<|vision_end|>"),
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": QWEN3.id("<|endoftext|>"),
            "eos_token_id": QWEN3.id("<|im_end|>"),
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 64,
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
            "rope_theta": 5000000,
            "use_cache": True,
            "vocab_size": 320,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [0, 1, 2],
            "depth": 4,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "out_hidden_size": 64,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
