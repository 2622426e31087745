"""The image processor a checkpoint asks for, from its config and, where it has one, its preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.conv_tower import ConvTower
from holotron.model.images import ImageProcessor, image_processor

# What preprocessor_config.json calls the fields of HolotronConfig that it may decide.
_DECIDES = {
    "max_num_tiles": "max_num_tiles",
    "use_thumbnail": "use_thumbnail",
    "image_size": "force_image_size",
    "norm_mean": "norm_mean",
    "image_mean": "norm_mean",
    "norm_std": "norm_std",
    "image_std": "norm_std",
    "min_num_patches": "min_num_patches",
    "max_num_patches": "max_num_patches",
}


def read_preprocessor(config: HolotronConfig, values: Mapping[str, Any]) -> None:
    """Take over, in place, what a released `preprocessor_config.json` says; it knows better than config.json.

    A processor that counts patches keeps the picture's aspect ratio. Raises ConfigError for a contradiction.
    """
    taken: dict[str, Any] = {}
    for theirs, ours in _DECIDES.items():
        value = values.get(theirs)
        if isinstance(value, int | bool | list):
            if ours in taken and taken[ours] != value:
                raise ConfigError(f"preprocessor_config.json gives {ours} twice: {taken[ours]} and {value}")
            taken[ours] = value
    if "min_num_patches" in taken:
        taken["image_processor"] = "dynamic"
    for name, value in taken.items():
        setattr(config, name, value)


def processor_of(config: HolotronConfig) -> ImageProcessor | None:
    """What turns pictures into this model's pixels; None without a vision tower. Raises ConfigError."""
    if config.vision_config is None:
        return None
    if config.norm_mean is None or config.norm_std is None:
        raise ConfigError("config.json has a vision tower but no norm_mean and norm_std for its images")
    values: dict[str, Any] = {
        "kind": config.image_processor,
        "norm_mean": config.norm_mean,
        "norm_std": config.norm_std,
    }
    if config.image_processor == "native":
        patch = ConvTower.patch_size if config.vision_config.get("tower") == "conv" else config.patch_size
        values["multiple"] = round(patch / config.downsample_ratio)
    else:
        values |= {
            "patch_size": config.patch_size,
            "downsample_ratio": config.downsample_ratio,
            "resize": config.image_resize,
        }
    if config.image_processor == "tiles":
        values |= {
            "size": config.force_image_size,
            "max_num_tiles": config.max_num_tiles,
            "use_thumbnail": config.use_thumbnail,
        }
    elif config.image_processor == "dynamic":
        values |= {"min_num_patches": config.min_num_patches, "max_num_patches": config.max_num_patches}
    try:
        return image_processor(values)
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from error
