"""Whatever holds a picture becomes upright RGB pixels, or an error that says why not."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from holotron.model.pictures import MAX_PIXELS, rgb_pixels


def noise(width: int, height: int) -> np.ndarray:
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8).numpy()


def png(picture: np.ndarray | Image.Image, **options: Any) -> bytes:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    buffer = io.BytesIO()
    image.save(buffer, format=options.pop("format", "PNG"), **options)
    return buffer.getvalue()


def test_every_source_gives_the_same_pixels(seed: int) -> None:
    picture = noise(37, 21)
    want = torch.from_numpy(picture)
    image = Image.fromarray(picture)
    palette = Image.fromarray(picture // 200 * 200).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    assert torch.equal(rgb_pixels(picture), want)
    assert torch.equal(rgb_pixels(picture[::-1, ::-2]), want.flip(0, 1)[:, ::2])
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
        rgb_pixels(source)
