"""The seam between an agent and the eyes and hands it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from holotron.contract.conversation import Screenshot
from holotron.contract.step import ToolCall

Point = tuple[float, float]  # CSS pixels of the viewport, origin top left


class ComputerError(RuntimeError):
    """The computer failed (browser gone, page crashed beyond repair): never the model's fault."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a tool call, as text for the model. `ok` False means it could not be carried out."""

    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class ComputerState:
    url: str
    title: str
    tabs: tuple[str, ...]  # URLs
    focused_tab: int
    css_width: int
    css_height: int
    device_scale_factor: float
    cursor: Point


class Computer(Protocol):
    async def screenshot(self) -> Screenshot: ...

    async def do(self, tool_call: ToolCall, point: Point | None) -> Outcome:
        """Carry out one tool call. `point` is where its x, y fall in CSS pixels, None if it has none.

        A call that cannot be carried out (unknown key, unreachable URL) is an Outcome with ok False;
        a broken browser raises ComputerError.
        """

    async def state(self) -> ComputerState: ...

    async def close(self) -> None: ...
