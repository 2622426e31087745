"""A cheap vision tower for small models: a residual convolutional stem down to one feature per 8 x 8 pixels.

It stands beside RADIO and is chosen by `vision_config.tower = "conv"`. Text of 10 px stays legible because the
first half of the network works at a stride of 4; nothing is normalised across space, so what a cell says
depends on its neighbourhood alone and the tower takes images of any size that is a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ConvTowerConfig:
    """Channels at strides 2, 4, 8 and residual blocks at strides 4 and 8."""

    channels: tuple[int, int, int] = (32, 64, 128)
    blocks: tuple[int, int] = (2, 3)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ConvTowerConfig:
        a, b, c = values["channels"]
        d, e = values["blocks"]
        return cls((a, b, c), (d, e))


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), the second convolution starting at zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.conv2(F.relu(self.conv1(F.relu(x))))
        return x + change


class ConvTower(nn.Module):
    """pixel_values (n, 3, H, W) -> features (n, H/8 * W/8, C), row-major; H and W multiples of 16."""

    patch_size = 8

    def __init__(self, config: ConvTowerConfig) -> None:
        super().__init__()
        first, second, third = config.channels
        self.stem1 = nn.Conv2d(3, first, 3, stride=2, padding=1)
        self.stem2 = nn.Conv2d(first, second, 3, stride=2, padding=1)
        self.fine = nn.ModuleList(ResidualBlock(second) for _ in range(config.blocks[0]))
        self.stem3 = nn.Conv2d(second, third, 3, stride=2, padding=1)
        self.coarse = nn.ModuleList(ResidualBlock(third) for _ in range(config.blocks[1]))
        self.out_features = third

    def forward(self, pixel_values: Tensor) -> Tensor:
        x: Tensor = self.stem2(F.relu(self.stem1(pixel_values)))
        for block in self.fine:
            x = block(x)
        x = self.stem3(F.relu(x))
        for block in self.coarse:
            x = block(x)
        return x.flatten(2).transpose(1, 2)
