"""Config classes that vLLM reads instead of a checkpoint's own code: the released dialects, and `holotron`.

They stand at module level because vLLM sends configs to its worker processes by pickle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import NemotronHConfig, PretrainedConfig

from holotron.model.config import ConfigError, HolotronConfig, LanguageConfig
from holotron.model.dialects import TOWERS, read_config
from holotron.model.radio import RadioConfig
from holotron.serving.vllm_plugin.heads import attention_width


def text_config(language: LanguageConfig, dtype: Any) -> NemotronHConfig:
    """The language model in transformers' terms. vLLM insists on a dtype; it is that of the run in the end."""
    values = language.to_dict()
    low, high = language.time_step_limit
    values["time_step_limit"] = [low, math.inf if math.isinf(high) else high]
    values |= {"architectures": ["NemotronHForCausalLM"], "dtype": dtype or "bfloat16"}
    for name in ("model_type", "auto_map", "torch_dtype", "num_hidden_layers", "transformers_version"):
        values.pop(name, None)
    return NemotronHConfig(**values)


def vision_args(stated: Mapping[str, Any], radio: RadioConfig) -> dict[str, Any]:
    """`vision_config.args` with everything vLLM reads there, the sizes of `radio` put in where a file is silent.

    A tower that timm has no name for gets one made of its sizes; see `tower_sizes`.
    """
    args = dict(stated)
    if not any(str(args.get("model", "")).startswith(name) for name in TOWERS):
        args["model"] = f"holotron_{radio.hidden}x{radio.depth}x{radio.heads}x{radio.mlp}"
    args.setdefault("cpe_max_size", radio.pos_grid * radio.patch_size)
    if not args.get("register_multiple"):  # one summary token, and registers up to the count
        args |= {"register_multiple": radio.prefix_tokens, "cls_token_per_teacher": False, "teachers": []}
    return args


def tower_sizes(name: str) -> tuple[int, int, int, int] | None:
    """Width, depth, heads and MLP of a name made by `vision_args`; None for any other."""
    head, _, sizes = name.partition("_")
    parts = sizes.split("x")
    if head != "holotron" or len(parts) != 4 or not all(part.isdigit() for part in parts):
        return None
    width, depth, heads, mlp = (int(part) for part in parts)
    return width, depth, heads, mlp


class ReleasedConfig(PretrainedConfig):
    """A released vision-language checkpoint as vLLM's `nano_nemotron_vl` wants it. Raises ConfigError."""

    model_type = "NemotronH_Nano_VL_V2"
    has_no_defaults_at_init = True

    def __init__(self, **values: Any) -> None:
        stated = dict(values)
        audio = stated.pop("sound_config", None)  # read_config would warn about it
        config = read_config(stated | {"model_type": self.model_type})
        if config.vision_config is None:
            raise ConfigError(f"config.json is labelled {self.model_type} but has no vision_config")
        for name in ("llm_config", "text_config", "vision_config", "raw_vision_config", "auto_map", "model_type"):
            values.pop(name, None)
        vision = dict(stated.get("vision_config") or stated.get("raw_vision_config") or {})
        vision["args"] = vision_args(vision.get("args") or {}, RadioConfig.from_dict(config.vision_config))
        for name in ("model_type", "auto_map"):
            vision.pop(name, None)
        language = config.language
        dtype = values.get("dtype") or values.get("torch_dtype") or language.extra.get("torch_dtype")
        self.text_config = text_config(language, dtype)
        self.vision_config = PretrainedConfig(**vision)
        self.sound_config = PretrainedConfig(**audio) if audio else None
        values.pop("sound_config", None)
        self.template = values.pop("template", None)
        self.image_tag_type = values.pop("image_tag_type", "internvl")
        for name in (
            "force_image_size", "patch_size", "downsample_ratio", "ps_version", "max_num_tiles", "use_thumbnail",
            "norm_mean", "norm_std", "vit_hidden_size", "projector_hidden_size", "img_context_token",
            "img_start_token", "img_end_token", "img_context_token_id",
        ):  # fmt: skip
            setattr(self, name, getattr(config, name))
            values.pop(name, None)
        values.pop("tie_word_embeddings", None)
        super().__init__(**values)
        self.tie_word_embeddings = False


class NanoOmniConfig(ReleasedConfig):
    """The same under another label."""

    model_type = "NemotronH_Nano_Omni_Reasoning_V3"

    def __init__(self, **values: Any) -> None:  # transformers would write another one into the class
        super().__init__(**values)


class SuperOmniConfig(ReleasedConfig):
    """The same under another label."""

    model_type = "NemotronH_Super_Omni_Reasoning_V3"

    def __init__(self, **values: Any) -> None:  # transformers would write another one into the class
        super().__init__(**values)


class OmniConfig(ReleasedConfig):
    """The same under another label."""

    model_type = "NemotronH_Omni_Reasoning_V3"

    def __init__(self, **values: Any) -> None:  # transformers would write another one into the class
        super().__init__(**values)


class ServedConfig(HolotronConfig):
    """A checkpoint of ours. `text_config` is its language model as vLLM's NemotronH reads it.

    Its heads are as wide as the next kernel of vLLM's; see `heads`.
    """

    def __init__(self, **values: Any) -> None:
        values.pop("text_config", None)  # made anew from llm_config
        super().__init__(**values)
        self.text_config = text_config(self.language, getattr(self, "dtype", None) or "float32")
        self.text_config.head_dim = attention_width(self.language.head_dim)


CONFIGS: tuple[type[PretrainedConfig], ...] = (
    ReleasedConfig, NanoOmniConfig, SuperOmniConfig, OmniConfig, ServedConfig,
)  # fmt: skip
