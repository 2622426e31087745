"""Turns whatever holds a picture (PIL image, file bytes, array) into upright RGB pixels, or says why not."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

Picture = Image.Image | bytes | np.ndarray[Any, Any]

# A screenshot of two 8K screens fits; a decompression bomb does not.
MAX_PIXELS = 2**26
_FORMATS = ("PNG", "JPEG", "WEBP")


def rgb_pixels(picture: Picture) -> Tensor:
    """uint8 (H, W, 3). EXIF orientation is applied, transparency composited on white.

    `picture` is a PIL image, the bytes of a PNG, JPEG or WebP file, or a uint8 array (H, W), (H, W, 3) or
    (H, W, 4). Raises ValueError for anything else, for a broken or truncated file, and for more than
    MAX_PIXELS pixels.
    """
    if isinstance(picture, np.ndarray):
        _check_array(picture)
        if picture.ndim == 3 and picture.shape[2] == 3:
            return torch.from_numpy(picture.copy(order="C"))
        image = Image.fromarray(picture)
    elif isinstance(picture, bytes | bytearray | memoryview):
        image = _from_bytes(bytes(picture))
    elif isinstance(picture, Image.Image):
        image = picture
    else:
        raise ValueError(f"a picture is a PIL image, bytes or a uint8 array, not {type(picture).__name__}")
    _check_size(*image.size)
    try:
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
        return torch.from_numpy(np.array(_on_white(image), dtype=np.uint8))
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error) as error:
        raise ValueError(f"image data is truncated or corrupt: {error}") from error


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ValueError(f"image is empty: {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise ValueError(f"image is too large: {width} x {height} pixels, the limit is {MAX_PIXELS} in all")


def _from_bytes(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"{len(data)} bytes are not a {', '.join(_FORMATS)} image") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"image is too large: {error}") from error
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error) as error:
        raise ValueError(f"image header is corrupt: {error}") from error


def _check_array(array: np.ndarray[Any, Any]) -> None:
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise ValueError(f"image array is {array.dtype} {array.shape}; expected uint8 (H, W), (H, W, 3) or (H, W, 4)")
    _check_size(array.shape[1], array.shape[0])


def _on_white(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    if image.mode == "F" or image.mode == "I":
        raise ValueError(f"pixel mode {image.mode} has no fixed range; convert it to 8 bits first")
    if image.mode.startswith("I;16"):
        # Pillow would clip 16-bit greys at 255 instead of scaling them.
        high = (np.array(image).astype(np.uint16) >> 8).astype(np.uint8)
        return Image.fromarray(high).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
