"""Resizing against torch's own bicubic in double precision, against Pillow, and against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from holotron.model.resampling import cubic_taps
from tests.model.screens import MEAN, STD, dynamic, levels, native, noise, tiles

# Cubic weights (a = -0.5) at a quarter pixel beside the middle; across a step from 0 to 1, enlarged twice.
STEP = [0.0, -0.0234375, -0.0703125, 0.203125, 0.796875, 1.0703125, 1.0234375, 1.0]


def interpolated(picture: np.ndarray, height: int, width: int) -> torch.Tensor:
    """The oracle: float64 (3, height, width) on 0..255, overshoot kept."""
    source = torch.from_numpy(picture).permute(2, 0, 1)[None].double()
    return F.interpolate(source, size=(height, width), mode="bicubic", antialias=True, align_corners=False)[0]


def random_size(limit: int = 400) -> tuple[int, int]:
    width, height = torch.randint(1, limit, (2,)).tolist()
    return width, height


@pytest.mark.parametrize("size", [(1, 1), (1920, 1080), (64, 500), None, None, None])
def test_float_resize_equals_double_precision(seed: int, size: tuple[int, int] | None) -> None:
    """Every tile, the thumbnail and a dynamic canvas; enlarged, shrunk and unchanged sides. Within 1e-3 of 255."""
    width, height = size or random_size()
    picture = noise(width, height)
    image = tiles(size=64, patch_size=4)(picture)
    canvas = interpolated(picture, image.canvas_height, image.canvas_width)
    want = [
        canvas[:, y : y + 64, x : x + 64]
        for y in range(0, image.canvas_height, 64)
        for x in range(0, image.canvas_width, 64)
    ]
    if image.thumbnail:
        want.append(interpolated(picture, 64, 64))
    torch.testing.assert_close(levels(image.pixel_values), torch.stack(want), atol=1e-3, rtol=0)
    whole = dynamic(patch_size=2, min_num_patches=16, max_num_patches=4096)(picture)
    canvas = interpolated(picture, whole.canvas_height, whole.canvas_width)
    torch.testing.assert_close(levels(whole.pixel_values[0]), canvas, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("make", "options"), [(tiles, {"size": 64, "patch_size": 4}), (dynamic, {"patch_size": 4})])
def test_uint8_resize_is_float_rounded(seed: int, make: Callable[..., Any], options: dict[str, int]) -> None:
    """Where nothing is clamped, each of the two directions rounds once: half a level, and half of one spread."""
    picture = noise(*random_size(300), 100, 150)
    rounded = levels(make(resize="uint8", **options)(picture).pixel_values)
    assert (rounded - rounded.round()).abs().max() < 1e-4
    assert (levels(make(**options)(picture).pixel_values) - rounded).abs().max() <= 1.2


def test_golden_edge() -> None:
    """Trap 15: what bicubic does to a black/white edge. "float" keeps the overshoot, "uint8" rounds and clamps."""
    picture = np.zeros((32, 32, 3), np.uint8)
    picture[:, 16:] = 255
    for turned in (False, True):
        source = picture.transpose(1, 0, 2) if turned else picture
        for make, options in ((tiles, {"size": 64, "patch_size": 4, "max_num_tiles": 1}), (dynamic, {"patch_size": 2})):
            for resize, want in (
                ("float", [255 * step for step in STEP]),
                ("uint8", [0, 0, 0, 52, 203, 255, 255, 255]),
            ):
                values = levels(make(**options, resize=resize)(source).pixel_values)
                assert values.shape == (1, 3, 64, 64)
                line = values.transpose(2, 3) if turned else values
                wanted = torch.tensor(want, dtype=torch.float64).expand(1, 3, 64, 8)
                torch.testing.assert_close(line[..., 28:36], wanted, atol=1e-3, rtol=0)
                assert line[..., :28].abs().max() < 1e-3 and (line[..., 36:] - 255).abs().max() < 1e-3


def test_resize_agrees_with_pillow(seed: int) -> None:
    """Antialiasing when shrinking: an independent bicubic gives the same pixels within a rounding step."""
    picture = noise(300, 200)
    for resize, bound in (("uint8", 1.01), ("float", 1.01)):
        values = tiles(size=64, patch_size=4, max_num_tiles=1, resize=resize)(picture).pixel_values[0]
        theirs = np.asarray(Image.fromarray(picture).resize((64, 64), Image.Resampling.BICUBIC), np.float32)
        assert np.abs(levels(values).permute(1, 2, 0).numpy() - theirs).max() <= bound


def test_weights_sum_to_one(seed: int) -> None:
    for source, target in [(1, 7), (7, 1), (5, 5), (3, 1000), tuple(torch.randint(1, 3000, (2,)).tolist())]:
        first, weights = cubic_taps(source, target)
        assert first.shape == (target,) and len(weights) == target
        torch.testing.assert_close(weights.sum(1), torch.ones(target, dtype=torch.float64))
        used = first[:, None] + torch.arange(weights.shape[1])
        assert not weights[used >= source].any() and first.min() >= 0


def test_unresized_pixels_are_exact(seed: int) -> None:
    """Nothing but (x / 255 - mean) / std, in that order, in float32: bit for bit."""
    picture = noise(3 * 64, 2 * 64)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    want = (torch.from_numpy(picture).permute(2, 0, 1).float() / 255 - mean) / std
    assert torch.equal(native()(picture).pixel_values[0], want)
    for resize in ("float", "uint8"):
        image = tiles(size=64, patch_size=4, resize=resize, use_thumbnail=False)(picture)
        assert image.grid == (3, 2)
        rows = image.pixel_values.view(2, 3, 3, 64, 64).permute(2, 0, 3, 1, 4)
        assert torch.equal(rows.reshape(3, 128, 192), want)
        whole = dynamic(patch_size=4, min_num_patches=64, resize=resize)(picture)
        assert torch.equal(whole.pixel_values[0], want)


def test_pixels_do_not_depend_on_the_mode_of_torch(seed: int) -> None:
    """Weights are remembered between calls; neither inference mode nor autocast may leave a mark on them."""
    picture = noise(150, 90)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        first = tiles(size=64, patch_size=4)(picture).pixel_values.clone()
    again = tiles(size=64, patch_size=4)(picture).pixel_values
    assert again.dtype == torch.float32 and not again.is_inference()
    assert torch.equal(first, again)
