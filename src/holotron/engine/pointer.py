"""The grounding head at work: where the model is about to write an x coordinate, it points at a cell.

The vocabulary holds one token for each `,"x":N` and `,"y":N`. When the next token would be one of the x run,
the head's choice of a cell replaces the value, and the paired y follows if the grammar allows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holotron.engine.sampler import choose
from holotron.engine.sampling_params import SamplingParams
from holotron.model.images import ProcessedImage
from holotron.model.modeling import EncodedImages, HolotronForConditionalGeneration
from holotron.model.tokenizer import COORDINATES


@dataclass(frozen=True, slots=True)
class Choice:
    x_token: int
    y_token: int
    x: int
    y: int
    probability: float


class Pointer:
    """What one sequence needs to point into its newest image. Cells off the picture are never chosen.

    keys (cells, size); points (cells, 2) int64, cell centres in 0..1000 of the image as sent.
    """

    def __init__(self, model: HolotronForConditionalGeneration, keys: Tensor, image: ProcessedImage) -> None:
        head, first = model.grounding_head, model.config.coordinate_tokens
        assert head is not None and first is not None
        self._head, self._keys = head, keys
        self._first_x, self._first_y = int(first["x"]), int(first["y"])
        centres = cell_centres(image, head.config.cells)
        size = torch.tensor([image.width, image.height], dtype=torch.float64)
        self._inside = (centres < size).all(dim=1)
        self._points = (1000 * centres / size).round().long()

    @classmethod
    def available(cls, model: HolotronForConditionalGeneration) -> bool:
        return model.grounding_head is not None and model.config.coordinate_tokens is not None

    @classmethod
    def build(
        cls,
        model: HolotronForConditionalGeneration,
        encoded: EncodedImages,
        hidden: Tensor,
        image: ProcessedImage,
    ) -> Pointer:
        """`hidden` (image tokens, D): final hidden states at the tokens of `image`."""
        assert model.grounding_head is not None
        above = hidden.view(len(encoded.features), -1, hidden.shape[-1])
        keys = model.grounding_head.keys(encoded.features, above, encoded.columns)
        return cls(model, keys.flatten(0, 1), image)

    def starts_at(self, token: int) -> bool:
        return self._first_x <= token < self._first_x + COORDINATES

    def choose(
        self, hidden: Tensor, allowed: Tensor | None, params: SamplingParams, generator: torch.Generator
    ) -> Choice | None:
        """A cell for the x about to be written; None if what constrains the text allows no cell's x.

        hidden (D,): the final hidden state that the x token would be sampled from; allowed (V,) bool.
        """
        scores = self._head.scores(hidden.view(1, 1, -1), self._keys.unsqueeze(0)).flatten()
        possible = self._inside
        if allowed is not None:
            possible = possible & allowed[self._first_x + self._points[:, 0]]
        if not bool(possible.any()):
            return None
        scores = scores.masked_fill(~possible, -torch.inf)
        cell = choose(scores, params, generator)
        x, y = (int(v) for v in self._points[cell])
        share = float(scores.softmax(-1)[cell])
        return Choice(self._first_x + x, self._first_y + y, x, y, share)


def cell_centres(image: ProcessedImage, cells: int) -> Tensor:
    """float64 (cells, 2): x, y in pixels of the original picture, tile by tile, row-major inside a tile.

    `cells` per side of an image token. Centres of cells that lie in padding fall outside the picture.
    """
    (columns, rows), (across, down) = image.grid, (n * cells for n in image.tokens_per_tile)
    tile_w, tile_h = (
        canvas / n / scale
        for canvas, n, scale in zip((image.canvas_width, image.canvas_height), image.grid, image.scale, strict=True)
    )
    frames = [(c * tile_w, r * tile_h, tile_w, tile_h) for r in range(rows) for c in range(columns)]
    if image.thumbnail:
        frames.append((0.0, 0.0, image.width, image.height))
    y, x = torch.meshgrid(
        (torch.arange(down, dtype=torch.float64) + 0.5) / down,
        (torch.arange(across, dtype=torch.float64) + 0.5) / across,
        indexing="ij",
    )
    unit = torch.stack([x.flatten(), y.flatten()], dim=1)
    return torch.cat(
        [
            torch.tensor([x0, y0], dtype=torch.float64) + unit * torch.tensor([w, h], dtype=torch.float64)
            for x0, y0, w, h in frames
        ]
    )
