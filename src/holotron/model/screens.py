"""How many image tokens a screenshot costs, for the screens that people have."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from holotron.model.config import HolotronConfig
from holotron.model.images import (
    DynamicProcessor,
    ImageProcessor,
    NativeProcessor,
    TileProcessor,
    patch_grid,
    qwen_grid,
    tile_grid,
)
from holotron.model.processing import processor_of

SCREENS = (
    (1024, 768), (1280, 720), (1280, 800), (1366, 768), (1440, 900), (1600, 900), (1920, 1080), (1920, 1200),
    (2560, 1440), (3840, 2160), (390, 844), (1080, 2400),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Screen:
    """One screenshot, `tokens` without delimiters. `grid` is tiles (with a thumbnail) or tokens, columns x rows.

    `scale` is pixels of what the model sees per screen pixel, x and y: below 1 detail is lost.
    """

    width: int
    height: int
    tokens: int
    grid: str
    scale: tuple[float, float]

    @property
    def name(self) -> str:
        return f"{self.width}x{self.height}"


def measure_screens(config: PretrainedConfig, preprocessor: Mapping[str, Any] | None = None) -> list[Screen]:
    """Every screen of SCREENS as the model's image processor would cut it; empty for a text model.

    `preprocessor` holds the values of a preprocessor_config.json, which only the Qwen3-VL baseline needs here: a
    HolotronConfig has taken them over already. Raises ConfigError.
    """
    if not isinstance(config, HolotronConfig):
        return [_qwen_screen(*size, config, preprocessor or {}) for size in SCREENS]
    if config.norm_mean is None or config.norm_std is None:  # they change no count
        config = copy.copy(config)
        config.norm_mean, config.norm_std = [0.0] * 3, [1.0] * 3
    processor = processor_of(config)
    return [] if processor is None else [_screen(*size, processor) for size in SCREENS]


def _screen(width: int, height: int, processor: ImageProcessor) -> Screen:
    tokens = processor.num_tokens(width, height)
    if isinstance(processor, TileProcessor):
        tile = processor.config
        columns, rows = tile_grid(width, height, tile.max_num_tiles, tile.size)
        thumbnail = "+1" if tokens > columns * rows * tile.tokens_per_side**2 else ""
        scale = (columns * tile.size / width, rows * tile.size / height)
        return Screen(width, height, tokens, f"{columns}x{rows}{thumbnail}", scale)
    if isinstance(processor, DynamicProcessor):
        dynamic = processor.config
        columns, rows = patch_grid(
            width, height, patch_size=dynamic.patch_size, merge=dynamic.merge,
            min_num_patches=dynamic.min_num_patches, max_num_patches=dynamic.max_num_patches,
        )  # fmt: skip
        scale = (columns * dynamic.patch_size / width, rows * dynamic.patch_size / height)
        return Screen(width, height, tokens, f"{columns // dynamic.merge}x{rows // dynamic.merge}", scale)
    if isinstance(processor, NativeProcessor):
        multiple = processor.config.multiple
        return Screen(width, height, tokens, f"{-(-width // multiple)}x{-(-height // multiple)}", (1.0, 1.0))
    raise TypeError(f"no grid is known for {type(processor).__name__}")


def _qwen_screen(width: int, height: int, config: PretrainedConfig, preprocessor: Mapping[str, Any]) -> Screen:
    vision: Any = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    stated, limits = preprocessor.get("size") or {}, {}
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):  # areas, whatever the name
        value = preprocessor.get(name) or stated.get(edge)
        if value is not None:
            limits[name] = int(value)
    columns, rows = qwen_grid(width, height, side=side, **limits)
    return Screen(width, height, columns * rows, f"{columns}x{rows}", (columns * side / width, rows * side / height))
