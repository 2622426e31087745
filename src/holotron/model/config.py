"""Configuration of a hybrid Mamba-2/attention vision-language model, in the field names released checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers import PretrainedConfig

LAYER_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}

# Names that other releases of the family use for the same number (architecture notes, "config dialects").
ALIASES = {
    "attention_head_dim": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_chunk_size": "chunk_size",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_state": "ssm_state_size",
    "mamba_dt_limit": "time_step_limit",
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
    "rms_norm_eps": "layer_norm_epsilon",
    "norm_eps": "layer_norm_epsilon",
}
# Options of the wider family that change the computation, with the only value this code computes.
FIXED = {
    "use_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "mamba_proj_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "sliding_window": None,
    "residual_in_fp32": False,
    "tie_word_embeddings": False,
    "rope_scaling": None,
}
KIND_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


class ConfigError(ValueError):
    """A checkpoint's configuration asks for something this code does not do, or contradicts itself."""


def read_pattern(values: dict[str, Any]) -> str:
    """The layer pattern as a string of M, *, - and E, from either way of writing it."""
    pattern = values.get("hybrid_override_pattern")
    if pattern is None:
        kinds = values.get("layers_block_type")
        if kinds is None:
            raise ConfigError("llm_config has neither hybrid_override_pattern nor layers_block_type")
        unknown = sorted({k for k in kinds if k not in KIND_LETTERS})
        if unknown:
            raise ConfigError(f"layers_block_type has layer kinds that are not supported: {unknown}")
        pattern = "".join(KIND_LETTERS[k] for k in kinds)
    bad = sorted(set(pattern) - set(LAYER_KINDS))
    if bad or not pattern:
        raise ConfigError(f"layer pattern {pattern!r} has letters other than M, *, - and E: {bad}")
    return str(pattern)


def read_number(value: Any) -> float:
    """A float, with the spellings of infinity found in released files."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
    return math.inf if value in ("Infinity", "inf") else float(value)


@dataclass(slots=True)
class LanguageConfig:
    """The NemotronH language model. Sizes are counts, `layer_norm_epsilon` is added to the mean square."""

    vocab_size: int
    hidden_size: int
    hybrid_override_pattern: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    chunk_size: int = 128
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    max_position_embeddings: int = 131072
    # Mixture of experts, only where the pattern has an E. A latent size of None means experts see the full width.
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LanguageConfig:
        """Accepts the dialects of the family; unknown keys are kept in `extra`. Raises ConfigError."""
        if values.get("block_configs"):
            raise ConfigError(
                "this checkpoint gives every layer sizes of its own (block_configs, nemotron_h_puzzle); only models "
                "whose layers of one kind are all alike can be loaded"
            )
        known = {f.name for f in fields(cls)} - {"extra"}
        clean: dict[str, Any] = dict(values.get("extra") or {})
        clean.update({k: v for k, v in values.items() if k != "extra"})
        for other, name in ALIASES.items():
            if clean.get(name) is None and clean.get(other) is not None:
                clean[name] = clean[other]
            clean.pop(other, None)
        for name, value in FIXED.items():
            if clean.get(name) not in (None, value):
                raise ConfigError(f"llm_config has {name}={clean[name]!r}, but only {value!r} is supported")
        clean["hybrid_override_pattern"] = read_pattern(clean)
        clean.pop("layers_block_type", None)
        if clean.get("time_step_limit") is None:
            clean.pop("time_step_limit", None)
        else:
            low, high = clean["time_step_limit"]
            clean["time_step_limit"] = (read_number(low), read_number(high))
        for text in ("vocab_size", "hidden_size", "num_attention_heads", "mamba_num_heads", "mamba_head_dim"):
            if clean.get(text) is None:
                raise ConfigError(f"llm_config has no {text}")
        if clean["mamba_num_heads"] % clean.get("n_groups", 8):
            raise ConfigError("mamba_num_heads must be a multiple of n_groups")
        if clean.get("num_key_value_heads") is None:
            clean["num_key_value_heads"] = clean["num_attention_heads"]
        if clean.get("head_dim") is None:
            clean["head_dim"] = clean["hidden_size"] // clean["num_attention_heads"]
        if "-" not in clean["hybrid_override_pattern"]:
            clean.setdefault("intermediate_size", 0)
        extra = {k: clean.pop(k) for k in list(clean) if k not in known}
        try:
            return cls(**clean, extra=extra)
        except TypeError as error:  # names the field that has no default
            raise ConfigError(f"llm_config is incomplete: {error}") from error

    @staticmethod
    def describes_one(values: Mapping[str, Any]) -> bool:
        """Whether a config.json is itself that of a language model of this family."""
        return any(values.get(key) for key in ("hybrid_override_pattern", "layers_block_type")) or (
            values.get("layer_types") is not None and values.get("mamba_num_heads") is not None
        )

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        low, high = values["time_step_limit"]
        values["time_step_limit"] = [low, "Infinity" if math.isinf(high) else high]
        return {**values.pop("extra"), **values}

    @property
    def mamba_width(self) -> int:
        """Channels of x inside a Mamba-2 mixer: heads times head size, not `expand * hidden`."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of xBC, the input of the causal convolution."""
        return self.mamba_width + 2 * self.n_groups * self.ssm_state_size

    def state_bytes(self, ssm_itemsize: int = 4, conv_itemsize: int = 4) -> int:
        """Bytes of recurrent state of one sequence, whatever its length."""
        ssm = self.mamba_num_heads * self.mamba_head_dim * self.ssm_state_size * ssm_itemsize
        conv = self.conv_channels * (self.conv_kernel - 1) * conv_itemsize
        return self.hybrid_override_pattern.count("M") * (ssm + conv)

    def kv_bytes_per_token(self, itemsize: int = 4) -> int:
        layers = self.hybrid_override_pattern.count("*")
        return layers * 2 * self.num_key_value_heads * self.head_dim * itemsize


class HolotronConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """The whole model: language model, vision tower, projector, optional grounding head.

    `vision_config.tower` names the tower: `radio` (released checkpoints; also the default) or `conv`, the cheap
    one of the pilot. `grounding_config` None means coordinates come from tokens alone.
    """

    model_type = "holotron"
    has_no_defaults_at_init = True

    def __init__(
        self,
        llm_config: dict[str, Any] | None = None,
        vision_config: dict[str, Any] | None = None,
        grounding_config: dict[str, Any] | None = None,
        force_image_size: int = 512,
        patch_size: int = 16,
        downsample_ratio: float = 0.5,
        ps_version: str = "v2",
        image_processor: str = "tiles",
        image_resize: str = "float",
        max_num_tiles: int = 12,
        use_thumbnail: bool = True,
        min_num_patches: int = 1024,
        max_num_patches: int = 13312,
        norm_mean: list[float] | None = None,
        norm_std: list[float] | None = None,
        vit_hidden_size: int = 1280,
        projector_hidden_size: int = 20480,
        img_context_token: str = "<image>",
        img_start_token: str = "<img>",
        img_end_token: str = "</img>",
        img_context_token_id: int | None = None,
        coordinate_tokens: dict[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.llm_config = llm_config or kwargs.pop("text_config", None)
        self.vision_config = vision_config or kwargs.pop("raw_vision_config", None)
        self.grounding_config = grounding_config
        self.force_image_size = force_image_size
        self.patch_size = patch_size
        self.downsample_ratio = downsample_ratio
        self.ps_version = ps_version
        self.image_processor = image_processor
        self.image_resize = image_resize
        self.max_num_tiles = max_num_tiles
        self.use_thumbnail = use_thumbnail
        # of one image, where the processor keeps its aspect ratio ("dynamic")
        self.min_num_patches = min_num_patches
        self.max_num_patches = max_num_patches
        self.norm_mean = norm_mean
        self.norm_std = norm_std
        self.vit_hidden_size = vit_hidden_size
        self.projector_hidden_size = projector_hidden_size
        self.img_context_token = img_context_token
        self.img_start_token = img_start_token
        self.img_end_token = img_end_token
        omni_name = kwargs.pop("image_token_id", None)
        self.img_context_token_id = omni_name if img_context_token_id is None else img_context_token_id
        # first ids of the contiguous runs of the 1001 `,"x":N` and `,"y":N` tokens, if the vocabulary has them
        self.coordinate_tokens = coordinate_tokens
        kwargs.pop("tie_word_embeddings", None)
        super().__init__(**kwargs)
        self.tie_word_embeddings = False

    @property
    def language(self) -> LanguageConfig:
        if self.llm_config is None:
            raise ConfigError("config has no llm_config (or text_config)")
        return LanguageConfig.from_dict(self.llm_config)
