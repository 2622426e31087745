"""The Step a policy takes: an optional note, a thought and exactly one tool call.

Coordinates inside a tool call are in the contract's own convention (for `holotron3` integers 0..1000 of the
image that was sent). Turning them into CSS pixels is the job of `coordinates`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt

Coordinate = Annotated[StrictInt, Field(ge=0, le=1000)]
Button = Literal["left", "right", "middle"]
Direction = Literal["up", "down", "left", "right"]
Key = Annotated[str, Field(min_length=1, max_length=32)]
# Whole milliseconds (and no -0.0), so that JSON writes them without an exponent and grammars accept them.
Seconds = Annotated[float, Field(ge=0, le=10), AfterValidator(lambda seconds: round(seconds, 3) + 0.0)]


class Tool(BaseModel):
    """What all tool calls share: no extra keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Goal(Tool):
    title: Annotated[str, Field(min_length=1)]
    status: Literal["todo", "running", "done", "failed"]


class UpdatePlan(Tool):
    tool_name: Literal["update_plan"] = "update_plan"
    goals: Annotated[list[Goal], Field(min_length=1, max_length=20)]


class Click(Tool):
    tool_name: Literal["click"] = "click"
    element: str
    x: Coordinate
    y: Coordinate
    button: Button = "left"


class DoubleClick(Tool):
    tool_name: Literal["double_click"] = "double_click"
    element: str
    x: Coordinate
    y: Coordinate


class MoveTo(Tool):
    tool_name: Literal["move_to"] = "move_to"
    element: str
    x: Coordinate
    y: Coordinate


class DragTo(Tool):
    """Drags from the current cursor position to the point."""

    tool_name: Literal["drag_to"] = "drag_to"
    element: str
    x: Coordinate
    y: Coordinate


class Scroll(Tool):
    tool_name: Literal["scroll"] = "scroll"
    element: str
    x: Coordinate
    y: Coordinate
    direction: Direction
    scroll_size: Annotated[StrictInt, Field(ge=1, le=100)] = 10


class Write(Tool):
    """Types into whatever has the focus; no click."""

    tool_name: Literal["write"] = "write"
    content: str
    press_enter: bool = False
    overwrite: bool = False


class Hotkey(Tool):
    tool_name: Literal["hotkey"] = "hotkey"
    keys: Annotated[list[Key], Field(min_length=1, max_length=5)]
    repeat_count: Annotated[StrictInt, Field(ge=1, le=20)] = 1


class HoldAndTapKey(Tool):
    tool_name: Literal["hold_and_tap_key"] = "hold_and_tap_key"
    hold_keys: Annotated[list[Key], Field(min_length=1, max_length=3)]
    tap_keys: Annotated[list[Key], Field(min_length=1, max_length=5)]


class KeyDown(Tool):
    tool_name: Literal["key_down"] = "key_down"
    key: Key


class KeyUp(Tool):
    tool_name: Literal["key_up"] = "key_up"
    key: Key


class Wait(Tool):
    tool_name: Literal["wait"] = "wait"
    seconds: Seconds = 1.0


class Navigate(Tool):
    tool_name: Literal["navigate"] = "navigate"
    url: Annotated[str, Field(min_length=1)]


class GoBack(Tool):
    tool_name: Literal["go_back"] = "go_back"


class TabNew(Tool):
    tool_name: Literal["tab_new"] = "tab_new"
    url: str = "about:blank"


class TabFocus(Tool):
    tool_name: Literal["tab_focus"] = "tab_focus"
    index: Annotated[StrictInt, Field(ge=0)]


class Answer(Tool):
    """Ends the episode with a Markdown answer."""

    tool_name: Literal["answer"] = "answer"
    content: str


ToolCall = Annotated[
    UpdatePlan | Click | DoubleClick | MoveTo | DragTo | Scroll | Write | Hotkey | HoldAndTapKey
    | KeyDown | KeyUp | Wait | Navigate | GoBack | TabNew | TabFocus | Answer,
    Field(discriminator="tool_name"),
]  # fmt: skip


class Step(BaseModel):
    """One decision of a policy. `note` is its only durable memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    note: str | None = None
    thought: str
    tool_call: ToolCall
