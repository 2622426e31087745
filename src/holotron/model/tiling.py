"""VL_V2 images: the picture is stretched onto the tile grid nearest in aspect ratio; a thumbnail goes last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from holotron.model.pictures import Picture, rgb_pixels
from holotron.model.preprocessor_config import check_resize, check_statistics, read_preprocessor
from holotron.model.processed_image import ProcessedImage
from holotron.model.resampling import Resize, fill_tiles


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tiling of the VL_V2 family. The statistics have no default: a wrong guess changes every feature."""

    norm_mean: tuple[float, float, float]
    norm_std: tuple[float, float, float]
    size: int = 512
    max_num_tiles: int = 12
    use_thumbnail: bool = True
    patch_size: int = 16
    downsample_ratio: float = 0.5
    # Bicubic overshoots at hard edges. "float" keeps values outside 0..255, "uint8" rounds and clamps them.
    resize: Resize = "float"

    def __post_init__(self) -> None:
        check_statistics(self.norm_mean, self.norm_std)
        check_resize(self.resize)
        if self.max_num_tiles < 1:
            raise ValueError(f"max_num_tiles must be at least 1, got {self.max_num_tiles}")
        step = self.patch_size / self.downsample_ratio
        if step != int(step) or self.size < 1 or self.size % int(step):
            raise ValueError(
                f"size {self.size} is no multiple of patch_size {self.patch_size} / downsample_ratio "
                f"{self.downsample_ratio}"
            )

    @property
    def tokens_per_side(self) -> int:
        return int(self.size // self.patch_size * self.downsample_ratio)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TileConfig:
        """From a `preprocessor_config.json`.

        Raises ConfigError for missing statistics, for two values of one setting, and for a key that may change
        pixels in a way that this processor does not follow.
        """
        return read_preprocessor(cls, values)


def tile_grid(width: int, height: int, max_num_tiles: int, size: int = 512) -> tuple[int, int]:
    """Columns and rows of the tile grid for a picture: of the grids allowed, the one closest in aspect ratio.

    Of grids equally close, a larger one is taken only if the picture has more than half its pixels. Raises
    ValueError for an empty picture or max_num_tiles < 1.
    """
    if width < 1 or height < 1:
        raise ValueError(f"image is empty: {width} x {height} pixels")
    if max_num_tiles < 1:
        raise ValueError(f"max_num_tiles must be at least 1, got {max_num_tiles}")
    ratio = width / height
    best, best_distance = (1, 1), float("inf")
    for i, j in _grids(max_num_tiles):
        distance = abs(ratio - i / j)
        filled = width * height > 0.5 * size * size * i * j
        if distance < best_distance or (distance == best_distance and filled):
            best, best_distance = (i, j), distance
    return best


@lru_cache(maxsize=32)
def _grids(max_num_tiles: int) -> tuple[tuple[int, int], ...]:
    """Every columns, rows of at most max_num_tiles tiles, small areas first."""
    sides = range(1, max_num_tiles + 1)
    grids = ((i, j) for i in sides for j in range(1, max_num_tiles // i + 1))
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


class TileProcessor:
    """Resizes a picture onto the best tile grid, ignoring its aspect ratio, and appends a thumbnail."""

    def __init__(self, config: TileConfig) -> None:
        self.config = config

    def num_tokens(self, width: int, height: int, *, max_num_tiles: int | None = None) -> int:
        """Image tokens, without delimiters, for a picture of that size."""
        columns, rows = self._grid(width, height, max_num_tiles)
        tiles = columns * rows
        return (tiles + self._has_thumbnail(tiles)) * self.config.tokens_per_side**2

    def for_token_budget(self, width: int, height: int, tokens: int) -> int:
        """The largest max_num_tiles, up to the config's, with which such a picture needs at most `tokens`.

        Counts image tokens without delimiters. Raises ValueError where a single tile already needs more.
        """
        for limit in range(self.config.max_num_tiles, 0, -1):
            if self.num_tokens(width, height, max_num_tiles=limit) <= tokens:
                return limit
        raise ValueError(f"one tile needs {self.config.tokens_per_side**2} tokens, the budget is {tokens}")

    def __call__(self, picture: Picture, *, max_num_tiles: int | None = None) -> ProcessedImage:
        """`max_num_tiles` overrides the config's. Raises ValueError for an unusable picture."""
        config = self.config
        pixels = rgb_pixels(picture)
        height, width = pixels.shape[:2]
        columns, rows = self._grid(width, height, max_num_tiles)
        size, cut = config.size, columns * rows
        thumbnail = self._has_thumbnail(cut)
        tiles = torch.empty(cut + thumbnail, 3, size, size, dtype=torch.float32, device="cpu")
        targets = [tiles[:cut].view(rows, columns, 3, size, size)]
        if thumbnail:
            targets.append(tiles[cut:, None])
        fill_tiles(pixels, targets, config.norm_mean, config.norm_std, config.resize)
        return ProcessedImage(
            pixel_values=tiles,
            grid=(columns, rows),
            num_tokens=len(tiles) * config.tokens_per_side**2,
            width=width,
            height=height,
            canvas_width=columns * size,
            canvas_height=rows * size,
            tokens_per_tile=(config.tokens_per_side, config.tokens_per_side),
            scale=(columns * size / width, rows * size / height),
            thumbnail=thumbnail,
        )

    def _grid(self, width: int, height: int, max_num_tiles: int | None) -> tuple[int, int]:
        limit = self.config.max_num_tiles if max_num_tiles is None else max_num_tiles
        return tile_grid(width, height, limit, self.config.size)

    def _has_thumbnail(self, tiles: int) -> bool:
        return self.config.use_thumbnail and tiles > 1
