"""Processors with the family's statistics, pictures to feed them, and what common screens must cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holotron.model.images import (
    DynamicConfig,
    DynamicProcessor,
    NativeConfig,
    NativeProcessor,
    TileConfig,
    TileProcessor,
)

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

# width, height, tile grid (columns, rows), its tokens, canvas pixels per screen pixel, tokens of Qwen3-VL, of Omni
SCREENS = [
    (1024, 768, (4, 3), 3328, (2.00, 2.00), 768, 768),
    (1280, 720, (2, 1), 768, (0.80, 0.71), 880, 920),
    (1280, 800, (3, 2), 1792, (1.20, 1.28), 1000, 1000),
    (1366, 768, (4, 2), 2304, (1.50, 1.33), 1032, 1032),
    (1440, 900, (3, 2), 1792, (1.07, 1.14), 1260, 1305),
    (1600, 900, (4, 2), 2304, (1.28, 1.14), 1400, 1450),
    (1920, 1080, (4, 2), 2304, (1.07, 0.95), 2040, 2040),
    (1920, 1200, (3, 2), 1792, (0.80, 0.85), 2280, 2280),
    (2560, 1440, (4, 2), 2304, (0.80, 0.71), 3600, 3311),
    (3840, 2160, (4, 2), 2304, (0.53, 0.47), 8160, 3311),
    (390, 844, (1, 2), 768, (1.31, 1.21), 312, 351),
    (1080, 2400, (2, 5), 2816, (0.95, 1.07), 2550, 2550),
]


def tiles(**options: Any) -> TileProcessor:
    return TileProcessor(TileConfig(MEAN, STD, **options))


def dynamic(**options: Any) -> DynamicProcessor:
    return DynamicProcessor(DynamicConfig(MEAN, STD, **options))


def native(**options: Any) -> NativeProcessor:
    return NativeProcessor(NativeConfig(MEAN, STD, **options))


def noise(width: int, height: int, low: int = 0, high: int = 255) -> np.ndarray:
    return torch.randint(low, high + 1, (height, width, 3), dtype=torch.uint8).numpy()


def levels(pixel_values: torch.Tensor) -> torch.Tensor:
    """Normalised (..., 3, H, W) back on the scale 0..255, float64."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    return (pixel_values.double() * std + mean) * 255
