"""From a picture to the model's pixels, and from an image token back to a place on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from holotron.model.pictures import Picture, rgb_pixels

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """One picture as the model sees it.

    `pixel_values` is float32 (tiles, 3, tile height, tile width), normalised. The first columns*rows tiles
    cut a canvas row-major; with `thumbnail` one last tile holds the whole picture. `num_tokens` counts image
    tokens without delimiters, tile by tile, row-major inside a tile.
    """

    pixel_values: Tensor
    grid: tuple[int, int]  # columns, rows of tiles
    num_tokens: int
    width: int  # of the original, pixels, upright
    height: int
    canvas_width: int  # of what was cut into tiles: resized, or padded right and bottom
    canvas_height: int
    tokens_per_tile: tuple[int, int]  # columns, rows
    scale: tuple[float, float]  # canvas pixels per original pixel, x and y
    thumbnail: bool

    def token_boxes(self) -> Tensor:
        """float64 (num_tokens, 4): for every token x0, y0, x1, y1 in pixels of the original picture.

        A box is clipped to the picture where the canvas was padded.
        """
        (columns, rows), (across, down) = self.grid, self.tokens_per_tile
        index = torch.arange(self.num_tokens)
        tile, place = index // (across * down), index % (across * down)
        whole = tile == columns * rows  # the thumbnail, if any
        x = torch.where(whole, 0, tile % columns) * across + place % across
        y = torch.where(whole, 0, tile // columns) * down + place // across
        unit_x = self.canvas_width / (columns * across * self.scale[0])
        unit_y = self.canvas_height / (rows * down * self.scale[1])
        wide = torch.where(whole, self.width / across, unit_x)
        high = torch.where(whole, self.height / down, unit_y)
        boxes = torch.stack([x * wide, y * high, (x + 1) * wide, (y + 1) * high], dim=1)
        return boxes.minimum(torch.tensor([self.width, self.height] * 2, dtype=boxes.dtype))

    def token_box(self, index: int) -> Box:
        """Where token `index` looks: x0, y0, x1, y1 in pixels of the original picture. Raises IndexError."""
        if not 0 <= index < self.num_tokens:
            raise IndexError(f"image token {index} does not exist: this image has {self.num_tokens}")
        x0, y0, x1, y1 = self.token_boxes()[index].tolist()
        return x0, y0, x1, y1


class ImageProcessor(Protocol):
    """What the model asks of a processor. `num_tokens` needs no pixels, so a planner can call it too."""

    def __call__(self, picture: Picture) -> ProcessedImage: ...

    def num_tokens(self, width: int, height: int) -> int: ...


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
    resize: Literal["float", "uint8"] = "float"

    def __post_init__(self) -> None:
        _check_statistics(self.norm_mean, self.norm_std)
        if self.resize not in ("float", "uint8"):
            raise ValueError(f"resize must be 'float' or 'uint8', got {self.resize!r}")
        if self.max_num_tiles < 1:
            raise ValueError(f"max_num_tiles must be at least 1, got {self.max_num_tiles}")
        step = self.patch_size / self.downsample_ratio
        if step != int(step) or self.size % int(step):
            raise ValueError(
                f"size {self.size} is no multiple of patch_size {self.patch_size} / downsample_ratio "
                f"{self.downsample_ratio}"
            )

    @property
    def tokens_per_side(self) -> int:
        return int(self.size // self.patch_size * self.downsample_ratio)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TileConfig:
        """From a `preprocessor_config.json`. Raises ValueError for missing statistics or an unknown key."""
        renamed = {"image_size": "size", "force_image_size": "size"}
        return cls(**_checked(cls, {renamed.get(key, key): value for key, value in values.items()}))


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """Whole pictures at their own resolution; `multiple` pixels a side make one token."""

    norm_mean: tuple[float, float, float]
    norm_std: tuple[float, float, float]
    multiple: int = 16
    pad_value: float = 0.0  # after normalisation, so 0 is the mean colour

    def __post_init__(self) -> None:
        _check_statistics(self.norm_mean, self.norm_std)
        if self.multiple < 1:
            raise ValueError(f"multiple must be at least 1, got {self.multiple}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NativeConfig:
        """Raises ValueError for missing statistics or an unknown key."""
        return cls(**_checked(cls, values))


def tile_grid(width: int, height: int, max_num_tiles: int, size: int = 512) -> tuple[int, int]:
    """Columns and rows of the tile grid for a picture: of the grids allowed, the one closest in aspect ratio.

    Of grids equally close, a larger one is taken only if the picture has more than half its pixels.
    """
    ratio = width / height
    sides = range(1, max_num_tiles + 1)
    candidates = sorted(
        ((i, j) for i in sides for j in sides if i * j <= max_num_tiles), key=lambda grid: grid[0] * grid[1]
    )
    best, best_distance = (1, 1), float("inf")
    for i, j in candidates:
        distance = abs(ratio - i / j)
        filled = width * height > 0.5 * size * size * i * j
        if distance < best_distance or (distance == best_distance and filled):
            best, best_distance = (i, j), distance
    return best


class TileProcessor:
    """Resizes a picture onto the best tile grid, ignoring its aspect ratio, and appends a thumbnail."""

    def __init__(self, config: TileConfig) -> None:
        self.config = config

    def num_tokens(self, width: int, height: int, *, max_num_tiles: int | None = None) -> int:
        """Image tokens, without delimiters, for a picture of that size."""
        columns, rows = self._grid(width, height, max_num_tiles)
        tiles = columns * rows
        return (tiles + self._has_thumbnail(tiles)) * self.config.tokens_per_side**2

    def __call__(self, picture: Picture, *, max_num_tiles: int | None = None) -> ProcessedImage:
        """`max_num_tiles` overrides the config's. Raises ValueError for an unusable picture."""
        config = self.config
        pixels = rgb_pixels(picture).permute(2, 0, 1)[None]
        height, width = pixels.shape[2:]
        columns, rows = self._grid(width, height, max_num_tiles)
        size, thumbnail = config.size, self._has_thumbnail(columns * rows)
        canvas = self._resize(pixels, rows * size, columns * size)
        tiles = canvas.view(3, rows, size, columns, size).permute(1, 3, 0, 2, 4).reshape(-1, 3, size, size)
        if thumbnail:
            tiles = torch.cat([tiles, self._resize(pixels, size, size)])
        return ProcessedImage(
            pixel_values=_normalise(tiles, config.norm_mean, config.norm_std),
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
        if limit < 1:
            raise ValueError(f"max_num_tiles must be at least 1, got {limit}")
        return tile_grid(width, height, limit, self.config.size)

    def _has_thumbnail(self, tiles: int) -> bool:
        return self.config.use_thumbnail and tiles > 1

    def _resize(self, pixels: Tensor, height: int, width: int) -> Tensor:
        """uint8 (1, 3, H, W) -> float32 (1, 3, height, width) on the 0..255 scale, bicubic, antialiased."""
        source = pixels if self.config.resize == "uint8" else pixels.float()
        return F.interpolate(source, size=(height, width), mode="bicubic", antialias=True, align_corners=False).float()


class NativeProcessor:
    """Keeps every pixel: no resize, padding right and bottom up to the multiple."""

    def __init__(self, config: NativeConfig) -> None:
        self.config = config

    def num_tokens(self, width: int, height: int) -> int:
        """Image tokens, without delimiters, for a picture of that size."""
        return -(-width // self.config.multiple) * -(-height // self.config.multiple)

    def __call__(self, picture: Picture) -> ProcessedImage:
        """Raises ValueError for an unusable picture."""
        config = self.config
        pixels = rgb_pixels(picture).permute(2, 0, 1)[None].float()
        height, width = pixels.shape[2:]
        columns, rows = -(-width // config.multiple), -(-height // config.multiple)
        canvas_width, canvas_height = columns * config.multiple, rows * config.multiple
        values = F.pad(
            _normalise(pixels, config.norm_mean, config.norm_std),
            (0, canvas_width - width, 0, canvas_height - height),
            value=config.pad_value,
        )
        return ProcessedImage(
            pixel_values=values,
            grid=(1, 1),
            num_tokens=columns * rows,
            width=width,
            height=height,
            canvas_width=canvas_width,
            canvas_height=canvas_height,
            tokens_per_tile=(columns, rows),
            scale=(1.0, 1.0),
            thumbnail=False,
        )


def _normalise(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """float (n, 3, H, W) on 0..255 -> (x/255 - mean) / std, contiguous."""
    shift, spread = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
    return ((pixels / 255 - shift) / spread).contiguous()


def _check_statistics(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"norm_mean, norm_std need three numbers each, std positive; got {mean}, {std}")


# Keys with which Hugging Face files describe themselves; they do not change a pixel.
_BOOKKEEPING = {"auto_map", "image_processor_type", "video_processor_type", "processor_class", "kind"}


def _checked(config: type[TileConfig] | type[NativeConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(config)}
    missing = {"norm_mean", "norm_std"} - set(values)
    unknown = set(values) - known - _BOOKKEEPING
    if missing:
        raise ValueError(f"image processor config lacks {', '.join(sorted(missing))}")
    if unknown:
        raise ValueError(f"image processor config has unknown keys: {', '.join(sorted(unknown))}")
    read = {key: value for key, value in values.items() if key in known}
    return read | {key: tuple(float(v) for v in read[key]) for key in ("norm_mean", "norm_std")}


def image_processor(values: Mapping[str, Any]) -> ImageProcessor:
    """The processor a config dict names as its `kind`: "tiles" or "native". Raises ValueError."""
    kind = values.get("kind", "tiles")
    if kind == "tiles":
        return TileProcessor(TileConfig.from_dict(values))
    if kind == "native":
        return NativeProcessor(NativeConfig.from_dict(values))
    raise ValueError(f"image processor kind {kind!r} is unknown; it is 'tiles' or 'native'")
