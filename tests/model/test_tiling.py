"""The tile grid, its tokens and limits, and which pixels land in which tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holotron.model.images import tile_grid
from tests.model.screens import MEAN, STD, noise, tiles

SIDES = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (1365, 768, (2, 1)),
        (1366, 768, (4, 2)),
        (724, 724, (1, 1)),
        (725, 725, (2, 2)),
        (1087, 1087, (3, 3)),
        (481, 202, (5, 2)),
        (1178, 1779, (2, 3)),
        (1, 4000, (1, 12)),
        (4000, 1, (12, 1)),
    ],
)
def test_golden_grids(width: int, height: int, grid: tuple[int, int]) -> None:
    """Traps 16 and 17: exact ties go to the larger grid only when the picture fills more than half of it."""
    assert tile_grid(width, height, 12) == grid


def test_larger_limits_know_more_grids() -> None:
    assert tile_grid(4000, 1000, 3) == (3, 1)
    assert tile_grid(5000, 1000, 4) == (4, 1)
    assert tile_grid(1000, 1000, 40, size=64) == (6, 6)
    for width, height, limit in [(0, 5, 12), (5, 0, 12), (5, 5, 0)]:
        with pytest.raises(ValueError, match="empty|max_num_tiles"):
            tile_grid(width, height, limit)


@given(SIDES, SIDES, st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_grids_respect_their_limit(width: int, height: int, limit: int) -> None:
    """And no grid of the same limit is nearer to the aspect ratio of the picture."""
    columns, rows = tile_grid(width, height, limit)
    assert 1 <= columns * rows <= limit
    grids = [(i, j) for i in range(1, limit + 1) for j in range(1, limit + 1) if i * j <= limit]
    assert abs(width / height - columns / rows) == min(abs(width / height - i / j) for i, j in grids)
    processor = tiles(max_num_tiles=limit)
    many = columns * rows
    assert processor.num_tokens(width, height) == 256 * (many + (many > 1))
    assert processor.num_tokens(width, height, max_num_tiles=1) == 256


@given(SIDES, SIDES, st.integers(0, 4000))
@settings(max_examples=100, deadline=None)
def test_token_budget(width: int, height: int, budget: int) -> None:
    """The limit found fits, and every larger one that is allowed does not."""
    processor = tiles()
    if budget < 256:
        with pytest.raises(ValueError, match=f"256 tokens, the budget is {budget}"):
            processor.for_token_budget(width, height, budget)
        return
    limit = processor.for_token_budget(width, height, budget)
    assert processor.num_tokens(width, height, max_num_tiles=limit) <= budget
    for larger in range(limit + 1, 13):
        assert processor.num_tokens(width, height, max_num_tiles=larger) > budget


def test_token_budget_of_full_hd() -> None:
    """4x2+1 tiles from a limit of 8, 2x1+1 from 2 to 7."""
    processor = tiles()
    found = [processor.for_token_budget(1920, 1080, budget) for budget in (10_000, 2304, 2303, 768, 767, 256)]
    assert found == [12, 12, 7, 7, 1, 1]
    with pytest.raises(ValueError, match="one tile needs 256 tokens"):
        processor.for_token_budget(1920, 1080, 255)


@pytest.mark.parametrize(("width", "height"), [(1024, 768), (300, 300), (481, 202)])
def test_count_equals_pixels_sent(seed: int, width: int, height: int) -> None:
    """Trap 17: what the prompt is told equals the feature rows that the pixels will give."""
    for processor in (tiles(size=128), tiles(size=64, patch_size=4), tiles(size=128, use_thumbnail=False)):
        image = processor(noise(width, height))
        count, channels, high, wide = image.pixel_values.shape
        side = processor.config.size
        assert (channels, high, wide) == (3, side, side)
        assert image.num_tokens == count * (side // processor.config.patch_size // 2) ** 2
        assert image.num_tokens == processor.num_tokens(width, height) == len(image.token_boxes())
        assert image.pixel_values.dtype == torch.float32


def test_max_num_tiles_is_obeyed() -> None:
    """Trap 16."""
    screenshot = np.zeros((1080, 1920, 3), np.uint8)
    processor = tiles(size=128)
    assert processor(screenshot).num_tokens == 9 * 16
    single = processor(screenshot, max_num_tiles=1)
    assert (single.num_tokens, single.grid, single.thumbnail) == (16, (1, 1), False)
    assert processor.num_tokens(1920, 1080, max_num_tiles=1) == 16
    assert tiles(size=128, max_num_tiles=1)(screenshot).num_tokens == 16
    assert processor(screenshot).num_tokens == 9 * 16  # nothing sticks
    with pytest.raises(TypeError, match="max_tiles"):
        processor(screenshot, max_tiles=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="max_num_tiles"):
        processor(screenshot, max_num_tiles=0)


def test_tiles_are_cut_row_major_and_the_thumbnail_is_last(seed: int) -> None:
    """A picture that already has the canvas size is not resampled, so every tile is known exactly."""
    picture = noise(3 * 64, 2 * 64)
    image = tiles(size=64, patch_size=4)(picture)
    assert (image.grid, image.thumbnail, len(image.pixel_values)) == ((3, 2), True, 7)
    for row in range(2):
        for column in range(3):
            tile = picture[row * 64 : (row + 1) * 64, column * 64 : (column + 1) * 64]
            want = (tile / 255 - np.array(MEAN)) / np.array(STD)
            got = image.pixel_values[row * 3 + column].permute(1, 2, 0).double().numpy()
            np.testing.assert_allclose(got, want, atol=1e-5)
    alone = tiles(size=64, patch_size=4)(picture, max_num_tiles=1)
    assert torch.equal(image.pixel_values[6], alone.pixel_values[0])
