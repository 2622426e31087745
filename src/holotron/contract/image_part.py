"""Screenshots as parts of a chat message."""

from __future__ import annotations

import base64
from typing import Any

from holotron.contract.conversation import Screenshot
from holotron.contract.coordinates import encoded_size


def screenshot_part(screenshot: Screenshot) -> dict[str, Any]:
    """The screenshot as an OpenAI image part. ValueError if its record and its bytes disagree on the size."""
    width, height = encoded_size(screenshot.png)
    if (width, height) != (screenshot.width, screenshot.height):
        raise ValueError(
            f"a screenshot is recorded as {screenshot.width} x {screenshot.height} but its PNG is {width} x "
            f"{height}: clicks would miss; record the size of the encoded bytes"
        )
    return png_part(screenshot.png)


def png_part(png: bytes) -> dict[str, Any]:
    """PNG bytes as an OpenAI image part with a data URL. ValueError for anything but a PNG."""
    encoded_size(png)
    url = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    return {"type": "image_url", "image_url": {"url": url}}
