"""Omni images: the picture is resized to a grid of patches near its own size; no tiles, no thumbnail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holotron.model.pictures import Picture, rgb_pixels
from holotron.model.preprocessor_config import check_resize, check_statistics, read_preprocessor
from holotron.model.processed_image import ProcessedImage
from holotron.model.resampling import Resize, fill_tiles


@dataclass(frozen=True, slots=True)
class DynamicConfig:
    """Dynamic resolution of the Omni family. The statistics have no default: a wrong guess changes every feature.

    Limits count vision patches, of which (1 / downsample_ratio)^2 make one token.
    """

    norm_mean: tuple[float, float, float]
    norm_std: tuple[float, float, float]
    patch_size: int = 16
    downsample_ratio: float = 0.5
    min_num_patches: int = 1024
    max_num_patches: int = 13312
    # Bicubic overshoots at hard edges. "float" keeps values outside 0..255, "uint8" rounds and clamps them.
    resize: Resize = "float"

    def __post_init__(self) -> None:
        check_statistics(self.norm_mean, self.norm_std)
        check_resize(self.resize)
        if self.patch_size < 1:
            raise ValueError(f"patch_size must be at least 1, got {self.patch_size}")
        if self.downsample_ratio <= 0 or self.merge < 1 or self.merge * self.downsample_ratio != 1:
            raise ValueError(f"downsample_ratio must be 1 / a whole number, got {self.downsample_ratio}")
        if self.min_num_patches < 1:
            raise ValueError(f"min_num_patches must be at least 1, got {self.min_num_patches}")
        if self.max_num_patches < max(self.min_num_patches, self.merge**2):
            raise ValueError(
                f"max_num_patches {self.max_num_patches} is less than min_num_patches {self.min_num_patches} "
                f"or than the {self.merge**2} patches of one token"
            )

    @property
    def merge(self) -> int:
        """Patches along each side of a token."""
        return round(1 / self.downsample_ratio)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DynamicConfig:
        """From a `preprocessor_config.json`.

        Raises ConfigError for missing statistics, for two values of one setting, and for a key that may change
        pixels in a way that this processor does not follow.
        """
        return read_preprocessor(cls, values)


def patch_grid(
    width: int, height: int, *, patch_size: int, merge: int, min_num_patches: int, max_num_patches: int
) -> tuple[int, int]:
    """Columns and rows of patches for a picture, both multiples of `merge`, at most max_num_patches in all.

    The released rule, with its round half to even: sides in patches plus a half, rounded; shrunk to the upper
    limit rounding down; else grown to the lower limit rounding up (not where that is not below the upper one);
    rows, then columns, made multiples of `merge`, upward if the limit allows. Where that rule breaks its own
    limit or leaves no patch (pictures a few pixels thin, limits close together), the longer side gives way.
    """
    if width < 1 or height < 1:
        raise ValueError(f"image is empty: {width} x {height} pixels")
    rows, columns = round(height / patch_size + 0.5), round(width / patch_size + 0.5)
    shrink = min(math.sqrt(max_num_patches / (rows * columns)), 1.0)
    rows, columns = max(math.floor(rows * shrink), 1), max(math.floor(columns * shrink), 1)
    if rows * columns < min_num_patches < max_num_patches:
        grow = math.sqrt(min_num_patches / (rows * columns))
        rows, columns = math.ceil(rows * grow), math.ceil(columns * grow)
    rows = _whole_tokens(rows, merge, max_num_patches // columns)
    columns = _whole_tokens(columns, merge, max_num_patches // rows)
    if rows * columns > max_num_patches:
        short = min(rows, columns)
        long = max_num_patches // short // merge * merge
        rows, columns = (long, short) if rows > columns else (short, long)
    return columns, rows


def _whole_tokens(side: int, merge: int, limit: int) -> int:
    """`side` patches made a multiple of `merge`: up if that is within the limit, else down, never to 0."""
    up = -(-side // merge) * merge
    return up if up <= limit or up == side else max(side // merge * merge, merge)


class DynamicProcessor:
    """Resizes a picture to whole tokens near its own size.

    What one picture becomes depends on that picture and the limits alone. Servers that share the context left
    among all images of a prompt give the same screenshot other grids as the history grows; this does not.
    """

    def __init__(self, config: DynamicConfig) -> None:
        self.config = config

    def num_tokens(self, width: int, height: int, *, max_num_patches: int | None = None) -> int:
        """Image tokens, without delimiters, for a picture of that size."""
        columns, rows = self._grid(width, height, max_num_patches)
        return columns * rows // self.config.merge**2

    def __call__(self, picture: Picture, *, max_num_patches: int | None = None) -> ProcessedImage:
        """`max_num_patches` overrides the config's and wins over its minimum. Raises ValueError.

        `pixel_values` is (1, 3, rows * patch_size, columns * patch_size) for rows x columns patches.
        """
        config = self.config
        pixels = rgb_pixels(picture)
        height, width = pixels.shape[:2]
        columns, rows = self._grid(width, height, max_num_patches)
        canvas_width, canvas_height = columns * config.patch_size, rows * config.patch_size
        values = torch.empty(1, 3, canvas_height, canvas_width, dtype=torch.float32, device="cpu")
        fill_tiles(pixels, [values[None]], config.norm_mean, config.norm_std, config.resize)
        return ProcessedImage(
            pixel_values=values,
            grid=(1, 1),
            num_tokens=columns * rows // config.merge**2,
            width=width,
            height=height,
            canvas_width=canvas_width,
            canvas_height=canvas_height,
            tokens_per_tile=(columns // config.merge, rows // config.merge),
            scale=(canvas_width / width, canvas_height / height),
            thumbnail=False,
        )

    def _grid(self, width: int, height: int, max_num_patches: int | None) -> tuple[int, int]:
        config = self.config
        limit = config.max_num_patches if max_num_patches is None else max_num_patches
        if limit < config.merge**2:
            raise ValueError(f"max_num_patches must be at least {config.merge**2}, one token, got {limit}")
        return patch_grid(
            width,
            height,
            patch_size=config.patch_size,
            merge=config.merge,
            min_num_patches=config.min_num_patches,
            max_num_patches=limit,
        )
