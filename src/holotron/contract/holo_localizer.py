"""The `holo_localizer` contract: one screenshot and one target in, one point in integers 0..1000 out.

A single user turn without system prompt, the image before the text. It decides nothing and keeps no history,
so it is a class of its own beside `Contract`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from holotron.contract import coordinates
from holotron.contract.conversation import Screenshot
from holotron.contract.coordinates import Convention
from holotron.contract.image_part import png_part
from holotron.contract.reply import contract_error, read_object
from holotron.contract.step import Coordinate
from holotron.contract.tool_schema import compact_json, object_schema

INSTRUCTION = (
    "Find one element of the user interface in the screenshot and give the point to click, in the middle of "
    "it. x and y are integers from 0 to 1000 relative to the image, from its top left corner. Reply with one "
    "JSON object that satisfies this schema:\n"
)
TARGET = "\nElement: "


class Location(BaseModel):
    """A point of the sent image, integers 0..1000."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    x: Coordinate
    y: Coordinate


class HoloLocalizer:
    """Asks where an element is and reads the answer. Greedy, without reasoning, under the schema."""

    name = "holo_localizer"
    images_kept = 1

    def __init__(self) -> None:
        self.prompt_hash: str = hashlib.sha256((INSTRUCTION + TARGET).encode()).hexdigest()
        self.request_defaults: dict[str, Any] = {
            "temperature": 0.0,
            "top_p": 1.0,
            "max_tokens": 64,
            "chat_template_kwargs": {"enable_thinking": False},
            "schema_name": "Location",
            "retry": {
                "attempts": 3,
                "timeout_s": 120.0,
                "pause_s": 5.0,
                "temperature_step": 0.0,
                "temperature_floor": 0.0,
                "finish_reason": "stop",
            },
        }

    def schema(self) -> dict[str, Any]:
        return object_schema(Location)

    def messages(self, png: bytes, target: str) -> list[dict[str, Any]]:
        return localizer_messages(png, target)

    def parse(self, text: str) -> tuple[int, int]:
        """x, y as integers 0..1000. ContractError for anything else; out of range is never clamped."""
        reply = read_object(text)
        for axis in ("x", "y"):
            if axis in reply:
                coordinates.check(reply[axis], Convention.PERMILLE, field=axis)
        try:
            location = Location.model_validate(reply, strict=True)
        except ValidationError as error:
            raise contract_error(error) from None
        return location.x, location.y

    def dump(self, x: int, y: int) -> str:
        """The compact JSON that `parse` reads. Raises ContractError for a point off the image."""
        for axis, value in (("x", x), ("y", y)):
            coordinates.check(value, Convention.PERMILLE, field=axis)
        return compact_json({"x": x, "y": y})

    def point(self, location: tuple[int, int], screenshot: Screenshot) -> tuple[float, float]:
        """Where a parsed answer falls in CSS pixels of the viewport."""
        return coordinates.to_css(*location, Convention.PERMILLE, screenshot)


def localizer_messages(png: bytes, target: str) -> list[dict[str, Any]]:
    """One user message: the PNG, then instruction, schema and target. ValueError for other image formats."""
    text = INSTRUCTION + compact_json(object_schema(Location)) + TARGET + target
    return [{"role": "user", "content": [png_part(png), {"type": "text", "text": text}]}]
