"""Screenshots made small enough to travel inside one HTML file."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

SMALL_WIDTH = 300  # up to here a screenshot is kept lossless
LARGE_BUDGET = 6_000_000  # bytes of encoded images that all large screenshots of a run may take together
WIDTHS_AND_BYTES = ((1280, 60_000), (960, 38_000), (640, 20_000))  # width, and about what a page weighs at it
NARROWEST = 420


@dataclass(frozen=True, slots=True)
class Frame:
    """An image as a data URI and its size in pixels. `uri` is empty where the file could not be read."""

    uri: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""


def width_limit(screenshots: int) -> int:
    """How wide large screenshots may stay when there are this many of them."""
    for width, expected in WIDTHS_AND_BYTES:
        if screenshots * expected <= LARGE_BUDGET:
            return width
    return NARROWEST


def open_screenshot(path: Path) -> tuple[Image.Image | None, str]:
    """The picture in RGB, or None and a sentence about what is wrong with the file."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB"), ""
    except FileNotFoundError:
        return None, f"{path.name} is missing"
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        # Pillow reports a cut or damaged PNG by any of these.
        return None, f"{path.name} cannot be read as an image"


def read_frame(path: Path, max_width: int) -> Frame:
    """Read and re-encode one screenshot; a missing or broken file becomes a Frame that says so."""
    image, problem = open_screenshot(path)
    return Frame(problem=problem) if image is None else _encode(image, max_width)


def _encode(image: Image.Image, max_width: int) -> Frame:
    buffer = io.BytesIO()
    if image.width <= SMALL_WIDTH:
        image.save(buffer, "WEBP", lossless=True, quality=60, method=4)
    else:
        if image.width > max_width:
            height = max(1, round(image.height * max_width / image.width))
            image = image.resize((max_width, height), Image.Resampling.LANCZOS)
        image.save(buffer, "WEBP", quality=72, method=4)
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Frame(f"data:image/webp;base64,{encoded}", image.width, image.height)
