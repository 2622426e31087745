"""From upright RGB pixels to normalised float tiles: bicubic, antialiased, cut while it is resized.

Two ways, named by a processor's config. "float" keeps the overshoot of the cubic at hard edges, so values may
leave the range of the picture. "uint8" rounds to whole steps after each direction and clamps to 0..255.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Resize = Literal["float", "uint8"]
RESIZES: tuple[Resize, ...] = get_args(Resize)

Plane = NDArray[np.float32]

# Outputs per matrix product. A product of b outputs reads about (b + 4) * shrink inputs and uses 4 * shrink of
# each row: larger blocks multiply more zeros, smaller ones cost more calls.
_BLOCK = 16
# Multiply-adds up to which OpenBLAS stays on the calling thread; waking others costs more than these products.
_ONE_THREAD = 2**18


class _Band(NamedTuple):
    """Outputs begin:end of a tile are `weight` (outputs, inputs) times inputs start:stop of the whole axis."""

    begin: int
    end: int
    start: int
    stop: int
    weight: Plane

    @property
    def stride(self) -> int:
        """How many rows or columns of pixels one product takes."""
        return max(_ONE_THREAD // self.weight.size, 1)


def fill_tiles(
    pixels: Tensor, targets: Sequence[Tensor], mean: Sequence[float], std: Sequence[float], resize: Resize
) -> None:
    """Resize a whole picture onto each target's canvas, normalise to (x / 255 - mean) / std, cut into tiles.

    `pixels` is uint8 (H, W, 3); every target float32 (rows, columns, 3, h, w) for a canvas of rows * h by
    columns * w pixels. The weights are Keys' cubic (a = -0.5) of support 2, widened by the factor of shrinking,
    cut at the border and rescaled to sum 1: those of `F.interpolate(mode="bicubic", antialias=True)` and Pillow.
    """
    if resize == "uint8":
        for target in targets:
            _fill_rounded(pixels, target, mean, std)
        return
    plane = torch.empty(pixels.shape[:2], dtype=torch.float32, device="cpu")
    for channel in range(3):
        # Weights sum to 1, so normalising first gives the same values and touches the smaller side.
        plane.copy_(pixels[..., channel])
        _normalise(plane, mean[channel], std[channel])
        for target in targets:
            _fill_plane(plane.numpy(), target[:, :, channel].numpy())


def write_normalised(pixels: Tensor, out: Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
    """uint8 (H, W, 3) -> float32 `out` (3, H, W), (x / 255 - mean) / std in that order of operations."""
    for channel in range(3):
        out[channel].copy_(pixels[..., channel])
        _normalise(out[channel], mean[channel], std[channel])


def _normalise(plane: Tensor, mean: float, std: float) -> None:
    for strip in torch.split(plane, 128):  # stays in the cache for all three operations
        strip.div_(255).sub_(mean).div_(std)


def _fill_rounded(pixels: Tensor, target: Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
    rows, columns, _, h, w = target.shape
    # This view is channels-last, for which torch has a vectorised integer path.
    source = pixels.permute(2, 0, 1)[None]
    canvas = F.interpolate(source, size=(rows * h, columns * w), mode="bicubic", antialias=True, align_corners=False)
    canvas = canvas[0].permute(1, 2, 0)
    for row in range(rows):
        for column in range(columns):
            tile = canvas[row * h : (row + 1) * h, column * w : (column + 1) * w]
            write_normalised(tile, target[row, column], mean, std)


def _fill_plane(plane: Plane, target: Plane) -> None:
    """(H, W) -> (rows, columns, h, w): first down, then across, as products with banded matrices.

    In NumPy, because there are hundreds of small products and torch takes longer to start one than to do it.
    """
    (height, width), (rows, columns, h, w) = plane.shape, target.shape
    high = plane
    if height != rows * h:
        high = np.empty((rows * h, width), np.float32)
        for band in _bands(height, rows * h, 1)[0]:
            for x in range(0, width, band.stride):
                part = slice(x, x + band.stride)
                np.matmul(band.weight, plane[band.start : band.stop, part], out=high[band.begin : band.end, part])
    for row in range(rows):
        strip = high[row * h : (row + 1) * h]
        if width == columns * w:
            target[row] = strip.reshape(h, columns, w).transpose(1, 0, 2)
            continue
        for tile, bands in zip(target[row], _bands(width, columns * w, columns), strict=True):
            for band in bands:
                for y in range(0, h, band.stride):
                    part = slice(y, y + band.stride)
                    source = strip[part, band.start : band.stop]
                    np.matmul(source, band.weight.T, out=tile[part, band.begin : band.end])


@lru_cache(maxsize=64)
def _bands(source: int, target: int, tiles: int) -> tuple[tuple[_Band, ...], ...]:
    """For each of the `tiles` equal parts of the target axis, the bands of the matrix (target, source)."""
    first, taps = cubic_taps(source, target)
    size = target // tiles
    parts = []
    for origin in range(0, target, size):
        bands = []
        for begin in range(0, size, _BLOCK):
            end = min(begin + _BLOCK, size)
            own = slice(origin + begin, origin + end)
            start = int(first[own].min())
            offset = first[own] - start
            columns = offset[:, None] + torch.arange(taps.shape[1], device="cpu")
            stop = min(start + int(columns.max()) + 1, source)
            weight = torch.zeros(end - begin, int(columns.max()) + 1, dtype=torch.float64, device="cpu")
            weight.scatter_(1, columns, taps[own])
            bands.append(_Band(begin, end, start, stop, weight[:, : stop - start].float().contiguous().numpy()))
        parts.append(tuple(bands))
    return tuple(parts)


def cubic_taps(source: int, target: int) -> tuple[Tensor, Tensor]:
    """Where each output looks and how much: first input index (target), weights float64 (target, taps).

    Weights beyond the last input are 0; each row sums to 1.
    """
    scale = source / target
    widen = max(scale, 1.0)
    centre = (torch.arange(target, dtype=torch.float64, device="cpu") + 0.5) * scale
    first = (centre - 2 * widen + 0.5).clamp(min=0).long()
    stop = (centre + 2 * widen + 0.5).long().clamp(max=source)
    index = first[:, None] + torch.arange(int((stop - first).max()), device="cpu")
    weights = _cubic((index + 0.5 - centre[:, None]) / widen).where(index < stop[:, None], 0.0)
    return first, weights / weights.sum(1, keepdim=True)


def _cubic(x: Tensor) -> Tensor:
    """R. Keys, Cubic convolution interpolation for digital image processing (1981), a = -0.5."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return near.where(x <= 1, far.where(x < 2, 0.0))
