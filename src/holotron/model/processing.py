"""The image processor a checkpoint asks for, from its config and, where it has one, its preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.conv_tower import ConvTower
from holotron.model.images import ImageProcessor, image_processor
from holotron.model.preprocessor_config import setting_name

# Settings whose names differ between a processor and HolotronConfig.
_CONFIG_NAMES = {"size": "force_image_size", "resize": "image_resize"}
# Of tiles, and without a meaning where a picture keeps its aspect ratio; some files hold them all the same.
_TILES_ONLY = {"max_num_tiles", "use_thumbnail", "image_size", "force_image_size", "size"}


def read_preprocessor(config: HolotronConfig, values: Mapping[str, Any]) -> None:
    """Take over, in place, what a released `preprocessor_config.json` says; it knows better than config.json.

    A processor that counts patches keeps the picture's aspect ratio. Raises ConfigError for missing statistics, for
    a contradiction, and for a key that might change pixels in a way that is not implemented.
    """
    if not values or config.vision_config is None:
        return
    if values.get("min_num_patches") is not None:
        config.image_processor = "dynamic"
    if config.image_processor == "dynamic":
        values = {key: value for key, value in values.items() if key not in _TILES_ONLY}
    stated = {setting_name(key) for key, value in values.items() if value is not None}
    own = {key: value for key, value in _settings(config).items() if key not in stated and value is not None}
    processor: Any = image_processor({**own, **values, "kind": config.image_processor})
    for name in (field.name for field in fields(processor.config)):
        value = getattr(processor.config, name)
        setattr(config, _CONFIG_NAMES.get(name, name), list(value) if isinstance(value, tuple) else value)


def processor_of(config: HolotronConfig) -> ImageProcessor | None:
    """What turns pictures into this model's pixels; None without a vision tower. Raises ConfigError."""
    if config.vision_config is None:
        return None
    if config.norm_mean is None or config.norm_std is None:
        raise ConfigError("config.json has a vision tower but no norm_mean and norm_std for its images")
    try:
        return image_processor(_settings(config))
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from error


def _settings(config: HolotronConfig) -> dict[str, Any]:
    """The config's image settings under the processors' own names."""
    values: dict[str, Any] = {
        "kind": config.image_processor,
        "norm_mean": config.norm_mean,
        "norm_std": config.norm_std,
    }
    if config.image_processor == "native":
        tower = config.vision_config or {}
        patch = ConvTower.patch_size if tower.get("tower") == "conv" else config.patch_size
        return values | {"multiple": round(patch / config.downsample_ratio)}
    values |= {
        "patch_size": config.patch_size,
        "downsample_ratio": config.downsample_ratio,
        "resize": config.image_resize,
    }
    if config.image_processor == "dynamic":
        return values | {"min_num_patches": config.min_num_patches, "max_num_patches": config.max_num_patches}
    return values | {
        "size": config.force_image_size,
        "max_num_tiles": config.max_num_tiles,
        "use_thumbnail": config.use_thumbnail,
    }
