"""From an image token to its place on the screen, and from a place to the tokens that see it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holotron.model.images import ImageProcessor
from tests.model.screens import dynamic, native, noise, tiles

PROCESSORS: list[ImageProcessor] = [
    tiles(size=32, patch_size=4, resize="uint8"),
    tiles(size=24, patch_size=4, use_thumbnail=False, resize="uint8"),
    dynamic(patch_size=1, min_num_patches=64, max_num_patches=1000, resize="uint8"),
    dynamic(patch_size=2, downsample_ratio=1, min_num_patches=16, max_num_patches=200, resize="uint8"),
    native(multiple=64),
]


def test_tile_token_boxes_follow_a_marked_pixel() -> None:
    """The token whose box holds a bright dot is the one the dot arrives in, in tiles and in the thumbnail."""
    processor = tiles(size=64, patch_size=4)
    side = processor.config.tokens_per_side
    for x, y in [(5, 5), (150, 20), (299, 101), (203, 199), (0, 199)]:
        picture = np.zeros((200, 300, 3), np.uint8)
        picture[y, x] = 255
        image = processor(picture)
        assert image.grid == (3, 2)
        bright = image.pixel_values.sum(1).unflatten(1, (side, -1)).unflatten(3, (side, -1))
        energy = (bright - bright.min()).sum((2, 4)).flatten()
        for part in (slice(0, 6 * side**2), slice(6 * side**2, None)):
            index = int(energy[part].argmax()) + (part.start or 0)
            x0, y0, x1, y1 = image.token_box(index)
            # Resampling may put most of a pixel across a border that cuts through it.
            assert x0 - 1 <= x <= x1 and y0 - 1 <= y <= y1


def test_token_boxes_cover_the_screen_once(seed: int) -> None:
    image = tiles()(noise(1000, 640))
    boxes = image.token_boxes()
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    columns, rows = image.grid
    cut = columns * rows * 256
    for part in (area[:cut], area[cut:]):
        assert part.min() > 0
        assert part.sum().item() == pytest.approx(1000 * 640)
    assert image.token_box(0)[:2] == (0, 0)
    assert image.token_box(cut - 1)[2:] == pytest.approx((1000, 640))
    assert image.token_box(image.num_tokens - 1)[2:] == pytest.approx((1000, 640))
    # second token of the second tile of the first row
    width, height = 1000 / columns, 640 / rows
    assert image.token_box(257) == pytest.approx((width + width / 16, 0, width + width / 8, height / 16))
    with pytest.raises(IndexError, match=str(image.num_tokens)):
        image.token_box(image.num_tokens)
    with pytest.raises(IndexError):
        image.token_box(-1)


@st.composite
def screens(draw: st.DrawFn) -> tuple[int, int]:
    """Any size up to 5000 a side, but not both at once: these pixels are really resized."""
    long = draw(st.integers(1, 5000))
    short = draw(st.integers(1, max(min(5000, 200_000 // long), 1)))
    return (long, short) if draw(st.booleans()) else (short, long)


@pytest.mark.parametrize("processor", PROCESSORS)
@given(size=screens(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_places_and_tokens(processor: ImageProcessor, size: tuple[int, int], data: st.DataObject) -> None:
    """Boxes cover the screen once per part; a point lies in the boxes of `tokens_at` and of no other token."""
    width, height = size
    image = processor(np.zeros((height, width, 3), np.uint8))
    parts = image.pixel_values.shape[0] // (image.grid[0] * image.grid[1]) if not image.thumbnail else 2
    boxes = image.token_boxes()
    assert len(boxes) == image.num_tokens == processor.num_tokens(width, height)
    assert image.num_tokens == len(image.pixel_values) * image.tokens_per_tile[0] * image.tokens_per_tile[1]
    low, high = boxes[:, :2], boxes[:, 2:]
    assert (low >= 0).all() and (low < high).all()
    assert high.max(0).values.tolist() == [width, height]
    assert ((high - low).prod(1).sum() / (width * height)).item() == pytest.approx(parts)
    border = data.draw(st.integers(0, image.num_tokens - 1))
    places = [
        (data.draw(st.floats(0, width, exclude_max=True)), data.draw(st.floats(0, height, exclude_max=True))),
        (data.draw(st.integers(0, width - 1)) + 0.5, data.draw(st.integers(0, height - 1)) + 0.5),
        (low[border, 0].item(), low[border, 1].item()),
    ]
    for x, y in places:
        inside = (low[:, 0] <= x) & (x < high[:, 0]) & (low[:, 1] <= y) & (y < high[:, 1])
        assert image.tokens_at(x, y) == tuple(inside.nonzero().flatten().tolist())
        assert len(image.tokens_at(x, y)) == parts
    assert border in image.tokens_at(*places[2])


def test_tokens_at_known_places() -> None:
    """4x2 tiles of 16 x 16 tokens and a thumbnail, which begins at token 2048."""
    image = tiles(resize="uint8")(np.zeros((1080, 1920, 3), np.uint8))
    assert image.grid == (4, 2)
    assert image.tokens_at(0, 0) == (0, 2048)
    assert image.tokens_at(479.9, 0) == (15, 2048 + 3)
    assert image.tokens_at(480, 0) == (256, 2048 + 4)
    assert image.tokens_at(960, 540) == (6 * 256, 2048 + 8 * 16 + 8)
    assert image.tokens_at(1919, 1079) == (2047, 2303)
    for x, y in [(-1, 0), (0, -0.1), (1920, 0), (0, 1080), (float("nan"), 5)]:
        with pytest.raises(ValueError, match="outside the picture of 1920 x 1080"):
            image.tokens_at(x, y)
