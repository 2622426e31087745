"""Every way in which released checkpoints of this family write their config.json, read into one HolotronConfig.

What a file is gets decided by what it holds, never by its labels: early Omni files carry the label of the
12B model, and text models carry the language config at the top level.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from holotron.model.config import ConfigError, HolotronConfig, LanguageConfig

logger = logging.getLogger(__name__)

# timm's names for the towers RADIO comes in: width, depth, heads; the MLP is four times as wide.
TOWERS = {
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
    "vit_large": (1024, 24, 16),
    "vit_huge": (1280, 32, 16),
}
_STATED = {"hidden_size", "num_hidden_layers", "num_attention_heads"}
# Top-level keys that mean the same thing under the same name.
_KEPT = (
    "force_image_size", "patch_size", "downsample_ratio", "ps_version", "max_num_tiles", "use_thumbnail",
    "norm_mean", "norm_std", "projector_hidden_size", "img_context_token", "img_start_token", "img_end_token",
    "grounding_config", "coordinate_tokens", "image_resize",
)  # fmt: skip
# What one release calls the thing, and what another.
_RENAMED = {
    "vit_hidden_size": ("vit_hidden_size", "vision_hidden_size"),
    "img_context_token_id": ("img_context_token_id", "image_token_id"),
}


def read_config(values: Mapping[str, Any]) -> HolotronConfig:
    """The config of a released checkpoint or of one of ours, from the parsed config.json. Raises ConfigError.

    Sizes that only the weights know for sure (prefix tokens, projector width, vocabulary) are taken from the
    config here; `checkpoint.load` corrects them from the tensors' shapes. References to remote code are dropped.
    """
    if values.get("model_type") == HolotronConfig.model_type:
        config: HolotronConfig = HolotronConfig.from_dict(dict(values))
        _check_own(config)
        return config
    language = _first(values, "llm_config", "text_config")
    vision = _first(values, "vision_config", "raw_vision_config")
    if language is None and LanguageConfig.describes_one(values):
        language, vision = values, None
    if language is None:
        raise ConfigError(
            f"config.json (model_type {values.get('model_type')!r}) describes no model of this family: it has neither "
            "llm_config nor text_config, and no layer pattern (hybrid_override_pattern, layers_block_type) of its own"
        )
    for name in ("sound_config", "audio_config"):
        if values.get(name):
            logger.warning("config.json has a %s: audio is not supported here and its weights are skipped", name)
    read = {key: values[key] for key in _KEPT if values.get(key) is not None}
    for name, spellings in _RENAMED.items():
        if (value := _first(values, *spellings)) is not None:
            read[name] = value
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        read[name] = language.get(name) if value is None else value
    # by way of LanguageConfig: one spelling from here on, and everything that cannot be computed refused now
    llm_config = LanguageConfig.from_dict(dict(language)).to_dict()
    llm_config.pop("auto_map", None)
    if vision is not None:
        read |= _read_vision(vision, read)
    return HolotronConfig(llm_config=llm_config, **read)


def _read_vision(vision: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`vision_config` in RadioConfig's names, and what it says about images."""
    args = dict(vision.get("args") or {})
    kept = {key: value for key, value in vision.items() if key not in ("args", "auto_map", "model_type")}
    patch_size = kept.get("patch_size") or top.get("patch_size") or 16
    kept["patch_size"] = patch_size
    if "model" in args:
        if not _STATED <= kept.keys():  # sizes that are written out need no name
            kept |= _tower_sizes(str(args["model"]))
        kept["prefix_tokens"] = _prefix_tokens(args)
        if args.get("cpe_max_size"):
            kept["pos_grid"] = int(args["cpe_max_size"]) // patch_size
    read: dict[str, Any] = {"vision_config": kept, "patch_size": patch_size}
    least = _first(args, "min_num_patches") or vision.get("min_num_patches")
    most = _first(args, "max_num_patches") or vision.get("max_num_patches")
    if least is not None:
        read |= {"image_processor": "dynamic", "min_num_patches": int(least)}
        if most is not None:
            read["max_num_patches"] = int(most)
    return read


def _tower_sizes(name: str) -> dict[str, int]:
    for start, (width, depth, heads) in TOWERS.items():
        if name.startswith(start):
            return {"hidden": width, "depth": depth, "heads": heads, "mlp": 4 * width}
    raise ConfigError(f"vision_config.args.model is {name!r}; known towers: {', '.join(TOWERS)}")


def _prefix_tokens(args: Mapping[str, Any]) -> int:
    """Summary tokens (one per distinct teacher, or one) and the registers that fill up to `register_multiple`."""
    summaries = 1
    if args.get("cls_token_per_teacher"):
        teachers = args.get("teachers") or []
        summaries = len({t.get("name", i) if isinstance(t, Mapping) else t for i, t in enumerate(teachers)}) or 1
    multiple = args.get("register_multiple")
    if multiple:
        return summaries + int(multiple) - summaries % int(multiple)
    return summaries + int(args.get("num_registers") or 0)


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _check_own(config: HolotronConfig) -> None:
    """In files we write ourselves a contradiction is an error, not history to be tolerated."""
    language = config.language
    layers = language.extra.get("num_hidden_layers")
    if layers is not None and layers != len(language.hybrid_override_pattern):
        raise ConfigError(
            f"llm_config says num_hidden_layers {layers}, but its pattern has {len(language.hybrid_override_pattern)}"
        )
