"""The seam between an agent and something to do, with a check that it was done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from holotron.computer.computer import Computer, Outcome, Point
from holotron.contract.conversation import Screenshot
from holotron.contract.step import ToolCall


@dataclass(frozen=True, slots=True)
class Transition:
    """`reward` is the environment's raw reward; `success` None while undecided or where there is no check."""

    outcome: Outcome
    reward: float = 0.0
    terminated: bool = False
    success: bool | None = None
    info: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Async and Gymnasium-shaped. Infrastructure failures raise ComputerError."""

    name: str

    @property
    def computer(self) -> Computer: ...

    async def reset(self, seed: int) -> str:
        """Start the episode of this seed; returns the goal as text. Same seed, same pixels."""

    async def screenshot(self) -> Screenshot: ...

    async def step(self, tool_call: ToolCall, point: Point | None) -> Transition: ...

    async def close(self) -> None: ...
