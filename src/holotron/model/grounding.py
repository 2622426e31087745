"""The grounding head: an attention distribution over 8 x 8 pixel cells that says where to click.

The idea of pointing by attention instead of spelling coordinates is that of GUI-Actor (2025). Here a key joins
what the vision tower saw in a cell with what the decoder made of the image token above it, and the query is the
decoder state at the token that stands right before the x coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GroundingConfig:
    """`cells` per side of an image token (2 for 8 px cells under 16 px tokens)."""

    size: int = 128
    cells: int = 2

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GroundingConfig:
        return cls(int(values.get("size", 128)), int(values.get("cells", 2)))


class GroundingHead(nn.Module):
    def __init__(self, config: GroundingConfig, hidden: int, features: int) -> None:
        super().__init__()
        self.config = config
        self.from_features = nn.Linear(features, config.size)
        self.from_hidden = nn.Linear(hidden, config.cells**2 * config.size, bias=False)
        self.key = nn.Linear(config.size, config.size, bias=False)
        self.query = nn.Linear(hidden, config.size)

    def keys(self, features: Tensor, hidden: Tensor, width: int) -> Tensor:
        """features (n, cells_h * cells_w, F) row-major; hidden (n, tokens, D) row-major, `width` tokens a row.

        Returns (n, cells_h * cells_w, size), row-major over cells.
        """
        n, tokens, _ = hidden.shape
        side, size = self.config.cells, self.config.size
        above = self.from_hidden(hidden).view(n, tokens // width, width, side, side, size)
        above = above.permute(0, 1, 3, 2, 4, 5).reshape(n, -1, size)
        keys: Tensor = self.key(F.relu(self.from_features(features) + above).square())
        return keys

    def scores(self, hidden: Tensor, keys: Tensor) -> Tensor:
        """Logits over cells: hidden (n, q, D), keys (n, cells, size) -> (n, q, cells)."""
        query: Tensor = self.query(hidden)
        return query @ keys.transpose(1, 2) / math.sqrt(self.config.size)
