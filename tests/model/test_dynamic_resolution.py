"""The patch grid of the Omni family, against released numbers and the rule as transformers writes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holotron.model.images import DynamicConfig, patch_grid
from tests.model.screens import MEAN, STD, dynamic, noise
from tests.oracles.transformers_rules import from_transformers

SIDES = st.integers(1, 5000)


def default_grid(width: int, height: int) -> tuple[int, int]:
    return patch_grid(width, height, patch_size=16, merge=2, min_num_patches=1024, max_num_patches=13312)


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (1920, 1080, (120, 68)),  # 1080 / 16 + 0.5 = 68: not a half, so nothing to round
        (1280, 720, (80, 46)),  # 45.5 rounds to the even 46
        (1440, 900, (90, 58)),  # 56.75 -> 57, then made even
        (3840, 2160, (154, 86)),  # over the limit: 152.9 and 86.5 cut off, 153 -> 154 still fits
        (390, 844, (26, 54)),  # 24.875 and 53.25, 351 tokens
        (224, 224, (32, 32)),  # under the least: grown
        (48, 32, (46, 24)),  # 3.5 -> 4 and 2.5 -> 2, then grown to 45.3 x 22.6
        (64, 32, (46, 24)),
        (512, 512, (32, 32)),
        (1000, 500, (64, 32)),
        (500, 1000, (32, 64)),
        (1024, 1024, (64, 64)),
        (1536, 1536, (96, 96)),
        (13312 * 16, 1, (6656, 2)),
    ],
)
def test_golden_grids(width: int, height: int, grid: tuple[int, int]) -> None:
    assert default_grid(width, height) == grid
    assert dynamic().num_tokens(width, height) == grid[0] * grid[1] // 4


@given(SIDES, SIDES)
@settings(max_examples=300, deadline=None)
@example(5000, 5000)
@example(1, 1)
def test_grid_equals_transformers(width: int, height: int) -> None:
    theirs = from_transformers("nemotron_h_omni/image_processing_nemotron_h_omni.py", "get_patch_grid_size")
    rows, columns = theirs(height, width, 16, 2, 1024, 13312)
    assert default_grid(width, height) == (columns, rows)


@given(st.integers(1, 70_000), SIDES, st.integers(1, 4), st.integers(1, 3000), st.integers(0, 3000))
@settings(max_examples=300, deadline=None)
def test_any_limit_is_respected(width: int, height: int, merge: int, least: int, more: int) -> None:
    """Whole tokens within the limit, whatever the limits; equal to transformers' rule where that keeps them too."""
    limit = max(least + more, merge**2)
    options = {"patch_size": 16, "min_num_patches": least, "max_num_patches": limit}
    columns, rows = patch_grid(width, height, merge=merge, **options)
    assert columns % merge == rows % merge == 0 and min(columns, rows) >= merge
    assert columns * rows <= limit
    theirs = from_transformers("nemotron_h_omni/image_processing_nemotron_h_omni.py", "get_patch_grid_size")
    try:
        their_rows, their_columns = theirs(height, width, 16, merge, least, limit)
    except ZeroDivisionError:
        return
    if 0 < their_rows * their_columns <= limit and their_rows % merge == their_columns % merge == 0:
        assert (columns, rows) == (their_columns, their_rows)


@given(SIDES, SIDES, st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_token_budget(width: int, height: int, tokens: int) -> None:
    """A limit per call counts patches, four to a token, and wins over the config's minimum."""
    assert 1 <= dynamic().num_tokens(width, height, max_num_patches=4 * tokens) <= tokens


def test_limits_come_from_config_and_call() -> None:
    """Trap 16: both are obeyed, nothing sticks, other keywords are errors."""
    screenshot = np.zeros((108, 192, 3), np.uint8)
    processor = dynamic(patch_size=4, min_num_patches=64)
    assert processor(screenshot).pixel_values.shape == (1, 3, 112, 192)
    small = processor(screenshot, max_num_patches=400)
    assert small.pixel_values.shape == (1, 3, 14 * 4, 26 * 4) and small.num_tokens == 7 * 13
    assert processor(screenshot).num_tokens == 28 * 48 // 4
    assert dynamic(patch_size=4, min_num_patches=64, max_num_patches=400)(screenshot).num_tokens == small.num_tokens
    with pytest.raises(TypeError, match="max_num_tiles"):
        processor(screenshot, max_num_tiles=1)  # type: ignore[call-arg]
    for limit in (3, 0, -5):
        with pytest.raises(ValueError, match="max_num_patches"):
            processor(screenshot, max_num_patches=limit)


def test_one_picture_gives_one_grid(seed: int) -> None:
    """Trap 23: nothing but the picture decides, however many went before."""
    processor = dynamic(patch_size=2, min_num_patches=64)
    picture = noise(150, 90)
    first = processor(picture)
    for _ in range(5):
        processor(noise(211, 77))
    again = processor(picture)
    assert (again.num_tokens, again.tokens_per_tile) == (first.num_tokens, first.tokens_per_tile)
    assert (again.pixel_values == first.pixel_values).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_patches": 1023}, "min_num_patches 1024"),
        ({"min_num_patches": 0}, "min_num_patches"),
        ({"min_num_patches": 1, "max_num_patches": 3}, "4 patches"),
        ({"downsample_ratio": 0.3}, "downsample_ratio"),
        ({"downsample_ratio": 2}, "downsample_ratio"),
        ({"downsample_ratio": 0}, "downsample_ratio"),
        ({"patch_size": 0}, "patch_size"),
        ({"resize": "nearest"}, "nearest"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicConfig(MEAN, STD, **options)
    with pytest.raises(ValueError, match="empty"):
        dynamic().num_tokens(0, 5)
