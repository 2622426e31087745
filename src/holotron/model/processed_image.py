"""One picture as the model sees it, and the way between a place on the screen and the tokens that look there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from holotron.model.pictures import Picture

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
        index = torch.arange(columns * rows * across * down)
        tile, place = index // (across * down), index % (across * down)
        boxes = self._boxes(
            (tile % columns) * across + place % across, (tile // columns) * down + place // across, whole=False
        )
        if not self.thumbnail:
            return boxes
        place = torch.arange(across * down)
        return torch.cat([boxes, self._boxes(place % across, place // across, whole=True)])

    def token_box(self, index: int) -> Box:
        """Where token `index` looks: x0, y0, x1, y1 in pixels of the original picture. Raises IndexError."""
        if not 0 <= index < self.num_tokens:
            raise IndexError(f"image token {index} does not exist: this image has {self.num_tokens}")
        x0, y0, x1, y1 = self.token_boxes()[index].tolist()
        return x0, y0, x1, y1

    def tokens_at(self, x: float, y: float) -> tuple[int, ...]:
        """The tokens that see a point: one of the tiles and, with a thumbnail, one of that, in this order.

        x, y are pixels of the original picture, 0 <= x < width, 0 <= y < height (the middle of the first pixel
        is 0.5, 0.5). The box of each token contains the point: x0 <= x < x1. Raises ValueError off the picture.
        """
        if not (0 <= x < self.width and 0 <= y < self.height):
            raise ValueError(f"({x}, {y}) is outside the picture of {self.width} x {self.height} pixels")
        (columns, rows), (across, down) = self.grid, self.tokens_per_tile
        column, row = (_last_edge(edges, at) for edges, at in zip(self._edges(False), (x, y), strict=True))
        tile = row // down * columns + column // across
        token = (tile * down + row % down) * across + column % across
        if not self.thumbnail:
            return (token,)
        column, row = (_last_edge(edges, at) for edges, at in zip(self._edges(True), (x, y), strict=True))
        return token, (columns * rows * down + row) * across + column

    def _boxes(self, column: Tensor, row: Tensor, whole: bool) -> Tensor:
        x, y = self._edges(whole)
        return torch.stack([x[column], y[row], x[column + 1], y[row + 1]], dim=1)

    def _edges(self, whole: bool) -> tuple[Tensor, Tensor]:
        """float64 edges of token columns and of rows, in original pixels; `whole` means the thumbnail's."""

        def axis(tiles: int, tokens: int, size: int, canvas: int, scale: float) -> Tensor:
            count = tokens if whole else tiles * tokens
            step = size / count if whole else canvas / (count * scale)
            edges = torch.arange(count + 1, dtype=torch.float64) * step
            edges[-1] = size  # of padding, or of rounding, only the picture is left
            return edges.clamp(max=size)

        return (
            axis(self.grid[0], self.tokens_per_tile[0], self.width, self.canvas_width, self.scale[0]),
            axis(self.grid[1], self.tokens_per_tile[1], self.height, self.canvas_height, self.scale[1]),
        )


def _last_edge(edges: Tensor, at: float) -> int:
    """Index of the last edge that is not beyond `at`."""
    return int(torch.searchsorted(edges, torch.tensor(at, dtype=edges.dtype), right=True)) - 1


class ImageProcessor(Protocol):
    """What the model asks of a processor. `num_tokens` needs no pixels, so a planner can call it too."""

    def __call__(self, picture: Picture) -> ProcessedImage: ...

    def num_tokens(self, width: int, height: int) -> int: ...
