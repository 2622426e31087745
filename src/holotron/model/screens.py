"""How many image tokens a screenshot costs, for the screens that people have."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from holotron.model.config import HolotronConfig
from holotron.model.images import TileProcessor, tile_grid
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
    HolotronConfig has taken them over already.
    """
    if not isinstance(config, HolotronConfig):
        return []
    if config.norm_mean is None or config.norm_std is None:  # they change no count
        config = copy.copy(config)
        config.norm_mean, config.norm_std = [0.0] * 3, [1.0] * 3
    processor = processor_of(config)
    if processor is None:
        return []
    screens = []
    for width, height in SCREENS:
        tokens = processor.num_tokens(width, height)
        if isinstance(processor, TileProcessor):
            tile = processor.config
            columns, rows = tile_grid(width, height, tile.max_num_tiles, tile.size)
            thumbnail = "+1" if tokens > columns * rows * tile.tokens_per_side**2 else ""
            grid, scale = f"{columns}x{rows}{thumbnail}", (columns * tile.size / width, rows * tile.size / height)
        else:
            multiple = round(config.patch_size / config.downsample_ratio)
            grid, scale = f"{-(-width // multiple)}x{-(-height // multiple)}", (1.0, 1.0)
        screens.append(Screen(width, height, tokens, grid, scale))
    return screens
