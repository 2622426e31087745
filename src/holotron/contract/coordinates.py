"""The only place where a model's x, y become CSS pixels, and back.

Three conventions exist (origin top left, both axes alike): integers 0..1000 and floats 0..1, both relative to
the exact image that was sent, and pixels of that image. A normalised c lands on image pixel
`min(W - 1, max(0, round(c * W)))`, so the far edge is the last pixel column and never outside; image pixels
become CSS pixels by the scale measured from the sent image and the viewport at capture, whatever device pixel
ratio or resize lies between them. Which convention holds is the contract's to say: values are checked, never
guessed at.
"""

from __future__ import annotations

import math
import struct
from enum import Enum

from holotron.contract.conversation import Screenshot
from holotron.contract.policy import ContractError

Number = int | float
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Convention(Enum):
    """How a contract writes a position; the value is the words used in error messages."""

    PERMILLE = "integers 0..1000 of the sent image (as in holotron3)"
    UNIT = "floats 0..1 of the sent image (as in nemotron_omni)"
    PIXEL = "whole pixels of the sent image (as in holo1_5)"


def encoded_size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels as the PNG bytes themselves say. Raises ValueError for anything else."""
    if len(png) < 24 or png[:8] != PNG_SIGNATURE or png[12:16] != b"IHDR":
        raise ValueError(f"not a PNG image ({len(png)} bytes beginning {png[:8]!r}): encode the screenshot as PNG")
    width, height = struct.unpack(">II", png[16:24])
    return int(width), int(height)


def check(value: object, convention: Convention, *, size: int | None = None, field: str = "x") -> Number:
    """Return `value` if it is a legal coordinate of `convention`, else raise ContractError naming `field`.

    `size` is the extent of the sent image along this axis in pixels; only PIXEL needs it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ContractError(f"{field}: {_show(value)} is not a number; this contract uses {convention.value}")
    if convention is Convention.UNIT:
        return _check_unit(value, field)
    other = Convention.UNIT.value
    if isinstance(value, float):
        raise ContractError(
            f"{field}: {_show(value)} is a float, but this contract uses {convention.value}, not {other}; "
            "write an integer, or choose the contract that the model was trained on"
        )
    if convention is Convention.PIXEL and size is None:
        raise ValueError("the size of the sent image is needed to check pixel coordinates")
    last = 1000 if convention is Convention.PERMILLE or size is None else size - 1
    if not 0 <= value <= last:
        rival = Convention.PIXEL if convention is Convention.PERMILLE else Convention.PERMILLE
        raise ContractError(
            f"{field}: {_show(value)} is outside 0..{last}; this contract uses {convention.value}, "
            f"not {rival.value}; choose a point on the image"
        )
    return value


def to_image(x: object, y: object, convention: Convention, width: int, height: int) -> tuple[int, int]:
    """The pixel of a sent image of `width` x `height` that x, y mean. ContractError for illegal values."""
    _check_extent(width, height)
    return _pixel(x, convention, width, "x"), _pixel(y, convention, height, "y")


def to_css(x: object, y: object, convention: Convention, screenshot: Screenshot) -> tuple[float, float]:
    """Where x, y fall in CSS pixels of the viewport; always inside it. ContractError for illegal values.

    The error against a point written by `from_css` is at most half a step of the convention plus half a pixel
    of the sent image, or one such pixel where the far edge is clamped.
    """
    px, py = to_image(x, y, convention, screenshot.width, screenshot.height)
    _check_extent(screenshot.css_width, screenshot.css_height)
    return px * screenshot.css_width / screenshot.width, py * screenshot.css_height / screenshot.height


def from_css(x: float, y: float, convention: Convention, screenshot: Screenshot) -> tuple[Number, Number]:
    """How the contract writes a point given in CSS pixels. ValueError for a point outside the viewport."""
    _check_extent(screenshot.width, screenshot.height)
    return (
        _write(x, screenshot.css_width, screenshot.width, convention, "x"),
        _write(y, screenshot.css_height, screenshot.height, convention, "y"),
    )


def from_image(x: float, y: float, convention: Convention, width: int, height: int) -> tuple[Number, Number]:
    """How the contract writes a point given in pixels of a `width` x `height` image sent as it is."""
    _check_extent(width, height)
    return _write(x, width, width, convention, "x"), _write(y, height, height, convention, "y")


def permille(position: float, extent: float) -> int:
    """A position along an axis of `extent` (same unit) as an integer 0..1000. ValueError if outside."""
    return int(_write(position, extent, 1, Convention.PERMILLE, "position"))


def _check_unit(value: Number, field: str) -> Number:
    if not math.isfinite(value) or not 0 <= value <= 1:
        raise ContractError(
            f"{field}: {_show(value)} is outside 0..1; this contract uses {Convention.UNIT.value}, "
            f"not {Convention.PERMILLE.value}"
        )
    return value


def _check_extent(width: float, height: float) -> None:
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise ValueError(f"a screenshot cannot be {width} x {height}: both sides must be positive")


def _pixel(value: object, convention: Convention, size: int, field: str) -> int:
    number = check(value, convention, size=size, field=field)
    if convention is Convention.PIXEL:
        return int(number)
    fraction = number / 1000 if convention is Convention.PERMILLE else number
    return min(size - 1, max(0, round(fraction * size)))


def _write(position: float, extent: float, size: int, convention: Convention, field: str) -> Number:
    if not 0 < extent < math.inf:
        raise ValueError(f"{field}: an axis of length {extent} has no positions")
    if not 0 <= position <= extent:
        raise ValueError(f"{field}: {position} lies outside the image (0..{extent}); choose a visible point")
    fraction = position / extent
    if convention is Convention.UNIT:
        return fraction
    if convention is Convention.PERMILLE:
        return round(fraction * 1000)
    return min(size - 1, round(fraction * size))


def _show(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
