"""Image processors of the family: which there are, which a config asks for, what a screenshot costs.

From a picture to the model's pixels, and from an image token back to a place on the screen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holotron.model.config import ConfigError
from holotron.model.dynamic_resolution import DynamicConfig, DynamicProcessor, patch_grid
from holotron.model.native_resolution import NativeConfig, NativeProcessor
from holotron.model.processed_image import Box, ImageProcessor, ProcessedImage
from holotron.model.tiling import TileConfig, TileProcessor, tile_grid

__all__ = [
    "Box",
    "DynamicConfig",
    "DynamicProcessor",
    "ImageProcessor",
    "NativeConfig",
    "NativeProcessor",
    "ProcessedImage",
    "TileConfig",
    "TileProcessor",
    "image_processor",
    "patch_grid",
    "qwen_grid",
    "qwen_tokens",
    "tile_grid",
]


def image_processor(values: Mapping[str, Any]) -> ImageProcessor:
    """The processor that a config dict, ours or a released `preprocessor_config.json`, asks for.

    `kind` names it: "tiles", "dynamic" or "native". Without one, a file with `min_num_patches` means "dynamic",
    any other "tiles". Raises ConfigError.
    """
    kind = values.get("kind") or ("dynamic" if values.get("min_num_patches") is not None else "tiles")
    if kind == "tiles":
        return TileProcessor(TileConfig.from_dict(values))
    if kind == "dynamic":
        return DynamicProcessor(DynamicConfig.from_dict(values))
    if kind == "native":
        return NativeProcessor(NativeConfig.from_dict(values))
    raise ConfigError(f"image processor kind {kind!r} is unknown; it is 'tiles', 'dynamic' or 'native'")


def qwen_tokens(width: int, height: int, *, min_pixels: int = 65_536, max_pixels: int = 16_777_216) -> int:
    """Image tokens of the attention baseline (Qwen3-VL, Holo2) for a picture, to plan and compare with.

    Raises ValueError for an empty picture.
    """
    columns, rows = qwen_grid(width, height, min_pixels=min_pixels, max_pixels=max_pixels)
    return columns * rows


def qwen_grid(
    width: int, height: int, *, min_pixels: int = 65_536, max_pixels: int = 16_777_216, side: int = 32
) -> tuple[int, int]:
    """Columns and rows of the attention baseline's image tokens, each of `side` x `side` pixels.

    Its smart resize: both sides to the nearest multiple of `side` (half to even), then, where the area is out
    of bounds, both scaled by the same factor and rounded inward. Raises ValueError for an empty picture;
    pictures longer than 200 times their width, which Qwen refuses, are counted.
    """
    if width < 1 or height < 1:
        raise ValueError(f"image is empty: {width} x {height} pixels")
    columns, rows = round(width / side), round(height / side)
    area = columns * rows * side * side
    if area > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        columns = max(math.floor(width / shrink / side), 1)
        rows = max(math.floor(height / shrink / side), 1)
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        columns, rows = math.ceil(width * grow / side), math.ceil(height * grow / side)
    return columns, rows
