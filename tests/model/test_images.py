"""Tiling, native resolution, and the way back from an image token to the screen."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from holotron.model.images import (
    NativeConfig,
    NativeProcessor,
    TileConfig,
    TileProcessor,
    image_processor,
    tile_grid,
)
from holotron.model.pictures import MAX_PIXELS, rgb_pixels

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
WHITE = (1.9303361, 2.0748837, 2.1458970)  # (1 - mean) / std, by hand
BLACK = (-1.7922626, -1.7520971, -1.4802198)  # -mean / std


def tiles(**options: Any) -> TileProcessor:
    return TileProcessor(TileConfig(MEAN, STD, **options))


def native(**options: Any) -> NativeProcessor:
    return NativeProcessor(NativeConfig(MEAN, STD, **options))


def noise(width: int, height: int) -> np.ndarray:
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8).numpy()


def png(picture: np.ndarray | Image.Image, **options: Any) -> bytes:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    buffer = io.BytesIO()
    image.save(buffer, format=options.pop("format", "PNG"), **options)
    return buffer.getvalue()


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


@pytest.mark.parametrize(
    ("width", "height", "grid", "tokens"),
    [
        (1024, 768, (4, 3), 3328),
        (1280, 720, (2, 1), 768),
        (1280, 800, (3, 2), 1792),
        (1366, 768, (4, 2), 2304),
        (1440, 900, (3, 2), 1792),
        (1600, 900, (4, 2), 2304),
        (1920, 1080, (4, 2), 2304),
        (1920, 1200, (3, 2), 1792),
        (2560, 1440, (4, 2), 2304),
        (3840, 2160, (4, 2), 2304),
        (390, 844, (1, 2), 768),
        (1080, 2400, (2, 5), 2816),
    ],
)
def test_tokens_per_screenshot(width: int, height: int, grid: tuple[int, int], tokens: int) -> None:
    assert tile_grid(width, height, 12) == grid
    assert tiles().num_tokens(width, height) == tokens


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


@pytest.mark.parametrize(("colour", "expected"), [((255, 255, 255), WHITE), ((0, 0, 0), BLACK)])
def test_constant_colour(colour: tuple[int, int, int], expected: tuple[float, ...]) -> None:
    """Trap 12: golden values after normalisation, whatever the resize."""
    picture = np.full((90, 140, 3), colour, np.uint8)
    for processor in (tiles(), tiles(resize="uint8"), native(multiple=2)):
        values = processor(picture).pixel_values
        want = torch.tensor(expected).view(1, 3, 1, 1).expand_as(values)
        torch.testing.assert_close(values, want, atol=1e-5, rtol=0)


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


def test_resize_modes_differ_only_by_overshoot() -> None:
    """Trap 15: at a black/white edge `float` leaves 0..1, `uint8` does not; clamped they agree to 1/255."""
    picture = np.zeros((100, 100, 3), np.uint8)
    picture[:, 50:] = 255

    def unit(processor: TileProcessor) -> torch.Tensor:
        values = processor(picture).pixel_values
        return values * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)

    loose, clamped = unit(tiles()), unit(tiles(resize="uint8"))
    assert loose.max() > 1.02 and loose.min() < -0.02
    assert clamped.max() <= 1 + 1e-6 and clamped.min() >= -1e-6
    # Integers round once per pass, so half a step twice.
    assert (loose.clamp(0, 1) - clamped).abs().max() <= 1 / 255 + 1e-6


def test_resize_agrees_with_pillow(seed: int) -> None:
    """Antialiasing when shrinking: an independent bicubic gives the same pixels within a rounding step."""
    picture = noise(300, 200)
    values = tiles(size=64, patch_size=4, max_num_tiles=1, resize="uint8")(picture).pixel_values[0]
    ours = (values * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)) * 255
    theirs = np.asarray(Image.fromarray(picture).resize((64, 64), Image.Resampling.BICUBIC), np.float32)
    assert np.abs(ours.permute(1, 2, 0).numpy() - theirs).max() <= 1.01


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


@pytest.mark.parametrize(("width", "height"), [(160, 210), (161, 209), (1, 1), (15, 33)])
def test_native_keeps_every_pixel(seed: int, width: int, height: int) -> None:
    picture = noise(width, height)
    processor = native(pad_value=-3.0)
    image = processor(picture)
    columns, rows = -(-width // 16), -(-height // 16)
    assert image.pixel_values.shape == (1, 3, rows * 16, columns * 16)
    assert (image.canvas_width, image.canvas_height) == (columns * 16, rows * 16)
    assert image.num_tokens == columns * rows == processor.num_tokens(width, height)
    assert image.tokens_per_tile == (columns, rows)
    want = (picture / 255 - np.array(MEAN)) / np.array(STD)
    got = image.pixel_values[0].permute(1, 2, 0).double().numpy()
    np.testing.assert_allclose(got[:height, :width], want, atol=1e-5)
    assert (got[height:] == -3).all() and (got[:, width:] == -3).all()
    boxes = image.token_boxes().tolist()
    for row in range(rows):
        for column in range(columns):
            box = [column * 16, row * 16, min(column * 16 + 16, width), min(row * 16 + 16, height)]
            assert boxes[row * columns + column] == box


def test_every_source_gives_the_same_pixels(seed: int) -> None:
    picture = noise(37, 21)
    want = torch.from_numpy(picture)
    image = Image.fromarray(picture)
    palette = Image.fromarray(picture // 200 * 200).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    assert torch.equal(rgb_pixels(picture), want)
    assert torch.equal(rgb_pixels(image), want)
    assert torch.equal(rgb_pixels(png(picture)), want)
    assert torch.equal(rgb_pixels(png(picture, format="WEBP", lossless=True)), want)
    assert torch.equal(rgb_pixels(png(palette)), torch.from_numpy(np.array(palette.convert("RGB"))))
    assert torch.equal(rgb_pixels(picture[..., 0]), want[..., :1].expand(-1, -1, 3))
    deep = Image.fromarray(picture[..., 0].astype(np.uint16) * 257)
    assert torch.equal(rgb_pixels(deep), want[..., :1].expand(-1, -1, 3))


def test_transparency_is_seen_on_white() -> None:
    picture = np.zeros((2, 3, 4), np.uint8)
    picture[..., 0] = 200
    picture[0, :, 3] = [0, 255, 51]
    picture[1, :, 3] = 255
    for source in (picture, png(picture)):
        pixels = rgb_pixels(source)
        assert pixels[0].tolist() == [[255, 255, 255], [200, 0, 0], [244, 204, 204]]
        assert pixels[1, 0].tolist() == [200, 0, 0]
    keyed = Image.new("P", (2, 1))
    keyed.putpalette([255, 0, 0, 0, 0, 255])
    keyed.putpixel((1, 0), 1)
    assert rgb_pixels(png(keyed, transparency=0)).tolist() == [[[255, 255, 255], [0, 0, 255]]]


@pytest.mark.parametrize("encoding", ["PNG", "JPEG"])
def test_exif_orientation(encoding: str) -> None:
    """Orientation 6: stored on its side, to be turned clockwise. The red half starts left, ends on top."""
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:, :32, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = rgb_pixels(png(picture, format=encoding, exif=exif))
    assert pixels.shape == (64, 32, 3)
    assert pixels[:30, :, 0].min() > 200 and pixels[34:, :, 0].max() < 50
    assert native()(png(picture, format=encoding, exif=exif)).num_tokens == 4 * 2


def broken_sources() -> list[Any]:
    whole = png(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    header = b"IHDR" + (40000).to_bytes(4, "big") * 2 + whole[24:29]
    bomb = whole[:12] + header + zlib.crc32(header).to_bytes(4, "big") + whole[33:]
    return [
        pytest.param(whole[: len(whole) // 2], "truncated|corrupt", id="truncated"),
        pytest.param(whole[:20], "not a PNG|corrupt", id="header only"),
        pytest.param(bytes(flipped), "truncated|corrupt", id="flipped byte"),
        pytest.param(b"", "0 bytes are not a PNG", id="empty"),
        pytest.param(b"<html>no screenshot</html>", "not a PNG", id="html"),
        pytest.param(bomb, "too large", id="bomb"),
        pytest.param(Image.new("L", (MAX_PIXELS // 1024 + 1, 1024)), "too large", id="too many pixels"),
        pytest.param(np.zeros((0, 5, 3), np.uint8), "empty", id="no rows"),
        pytest.param(np.zeros((4, 4, 3), np.float32), "float32", id="float array"),
        pytest.param(np.zeros((4, 4, 2), np.uint8), "shape|uint8", id="two channels"),
        pytest.param(Image.new("F", (4, 4)), "mode F", id="float image"),
        pytest.param("screenshot.png", "not str", id="path"),
    ]


@pytest.mark.parametrize(("source", "message"), broken_sources())
def test_unusable_pictures_say_why(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiles()(source)


def test_config_dicts() -> None:
    """Trap 12: statistics are never guessed; an unknown key is not silently dropped."""
    stats = {"norm_mean": list(MEAN), "norm_std": list(STD)}
    made = image_processor({**stats, "image_size": 448, "max_num_tiles": 6, "auto_map": {}, "patch_size": 14})
    assert isinstance(made, TileProcessor)
    assert made.config == TileConfig(MEAN, STD, size=448, max_num_tiles=6, patch_size=14)
    small = image_processor({**stats, "kind": "native", "multiple": 8})
    assert isinstance(small, NativeProcessor) and small.config == NativeConfig(MEAN, STD, 8)
    for values, message in [
        ({"norm_mean": MEAN}, "norm_std"),
        ({}, "norm_mean, norm_std"),
        ({**stats, "max_tiles": 3}, "max_tiles"),
        ({**stats, "resize": "lanczos"}, "lanczos"),
        ({**stats, "kind": "other"}, "other"),
        ({**stats, "size": 500}, "500"),
        ({**stats, "norm_std": (0.0, 1.0, 1.0)}, "positive"),
        ({**stats, "kind": "native", "multiple": 0}, "multiple"),
    ]:
        with pytest.raises(ValueError, match=message):
            image_processor(values)
