"""Pictures at their own resolution, for towers that take any size: no pixel is resampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holotron.model.pictures import Picture, rgb_pixels
from holotron.model.preprocessor_config import check_statistics, read_preprocessor
from holotron.model.processed_image import ProcessedImage
from holotron.model.resampling import write_normalised


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """Whole pictures at their own resolution; `multiple` pixels a side make one token."""

    norm_mean: tuple[float, float, float]
    norm_std: tuple[float, float, float]
    multiple: int = 16
    pad_value: float = 0.0  # after normalisation, so 0 is the mean colour

    def __post_init__(self) -> None:
        check_statistics(self.norm_mean, self.norm_std)
        if self.multiple < 1:
            raise ValueError(f"multiple must be at least 1, got {self.multiple}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NativeConfig:
        """Raises ConfigError for missing statistics or an unknown key."""
        return read_preprocessor(cls, values)


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
        pixels = rgb_pixels(picture)
        height, width = pixels.shape[:2]
        columns, rows = -(-width // config.multiple), -(-height // config.multiple)
        canvas_width, canvas_height = columns * config.multiple, rows * config.multiple
        values = torch.empty(1, 3, canvas_height, canvas_width, dtype=torch.float32, device="cpu")
        values[:, :, height:].fill_(config.pad_value)
        values[:, :, :height, width:].fill_(config.pad_value)
        write_normalised(pixels, values[0, :, :height, :width], config.norm_mean, config.norm_std)
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
