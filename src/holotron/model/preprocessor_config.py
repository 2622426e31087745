"""Reads a `preprocessor_config.json`: other names for our settings, notes that change no pixel, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from holotron.model.config import ConfigError
from holotron.model.resampling import RESIZES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

# Names that released files use for the same setting.
_OTHER_NAMES = {
    "image_size": "size",
    "force_image_size": "size",
    "image_mean": "norm_mean",
    "image_std": "norm_std",
}

# Keys with which files describe themselves or the form of a result; they do not change a pixel.
_NOTES = {
    "auto_map",
    "kind",
    "processor_class",
    "feature_extractor_type",
    "image_processor_type",
    "video_processor_type",
    "model_type",
    "dtype",
    "torch_dtype",
    "return_tensors",
    "disable_grouping",
    "transformers_version",
}

# Settings of others' processors that ask for what ours do anyway, with a test of the values that do.
_FOLLOWED: dict[str, Callable[[Any], bool]] = {
    "do_convert_rgb": lambda value: value is True,
    "do_normalize": lambda value: value is True,
    "do_rescale": lambda value: value is True,
    "do_center_crop": lambda value: value is False,
    "do_pad": lambda value: value is False,
    "rescale_factor": lambda value: _number(value) and math.isclose(value, 1 / 255, rel_tol=1e-6),
    "num_channels": lambda value: value == 3,
    "data_format": lambda value: value == "channels_first",
}
_RESAMPLED: dict[str, Callable[[Any], bool]] = {  # where the processor resizes
    "do_resize": lambda value: value is True,
    "resample": lambda value: value in (3, "bicubic"),
}


def setting_name(key: str) -> str:
    """Our name for the setting that `key` of a file decides."""
    return _OTHER_NAMES.get(key, key)


def read_preprocessor(config: type[Config], values: Mapping[str, Any]) -> Config:
    """Make `config`, a dataclass with norm_mean and norm_std, from a file's values; null counts as absent.

    Raises ConfigError that names the key: for missing statistics, two different values of one setting, a value
    of the wrong kind, and any key that might change pixels in a way our processors do not follow.
    """
    types = {field.name: str(field.type) for field in fields(config)}
    defaults = {field.name: field.default for field in fields(config)}
    read: dict[str, Any] = {}
    origin: dict[str, str] = {}
    others: dict[str, Any] = {}
    for key, value in values.items():
        name = setting_name(key)
        if value is None or key in _NOTES:
            continue
        if name not in types:
            others[key] = value
            continue
        value = _plain(key, types[name], value)
        if read.get(name, value) != value:
            raise ConfigError(f"image processor config: {origin[name]} is {read[name]}, but {key} is {value}")
        read[name], origin[name] = value, key
    missing = sorted({"norm_mean", "norm_std"} - set(read))
    if missing:
        raise ConfigError(f"image processor config lacks {', '.join(missing)}; statistics are never guessed")
    settings = defaults | read
    unknown = sorted(f"{key} = {value!r}" for key, value in others.items() if not _is_followed(key, value, settings))
    if unknown:
        raise ConfigError(
            f"image processor config has unknown keys, which may change pixels: {', '.join(unknown)}; known settings "
            f"are {', '.join(types)}"
        )
    try:
        return config(**read)
    except ValueError as error:
        raise ConfigError(f"image processor config: {error}") from error


def _is_followed(key: str, value: Any, settings: Mapping[str, Any]) -> bool:
    """Whether our processor does what this key of somebody else's asks for."""
    if key in _FOLLOWED:
        return _FOLLOWED[key](value)
    if key in _RESAMPLED:
        return "resize" in settings and _RESAMPLED[key](value)
    if not _number(value):
        return False
    if key == "_downsample_factor" and "downsample_ratio" in settings:
        return bool(value * settings["downsample_ratio"] == 1)
    if key == "max_model_len" and "max_num_patches" in settings:
        # Caps an image's patches at what fits a context after 4 other tokens: of no effect if our limit is lower.
        return bool((value - 4) / settings["downsample_ratio"] ** 2 >= settings["max_num_patches"])
    return False


def _plain(key: str, type_name: str, value: Any) -> Any:
    """`value` in the form of a field of that type. Raises ConfigError."""
    if type_name.startswith("tuple"):
        if isinstance(value, list | tuple) and all(map(_number, value)):
            return tuple(float(v) for v in value)
        raise ConfigError(f"image processor config: {key} must be a list of numbers, got {value!r}")
    if isinstance(value, Mapping) and key == "size" and set(value) == {"height", "width"}:
        if value["height"] != value["width"]:
            raise ConfigError(f"image processor config: {key} must be square, got {value!r}")
        value = value["height"]
    good = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": _number(value),
        "bool": isinstance(value, bool),
    }
    if not good.get(type_name, isinstance(value, str)):
        raise ConfigError(f"image processor config: {key} must be of type {type_name}, got {value!r}")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_statistics(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Raises ValueError unless both have three numbers and std is positive."""
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"norm_mean, norm_std need three numbers each, std positive; got {mean}, {std}")


def check_resize(resize: str) -> None:
    if resize not in RESIZES:
        raise ValueError(f"resize must be 'float' or 'uint8', got {resize!r}")
