"""A task in a person's own words on any page. Nothing checks it, so its success stays undecided."""

from __future__ import annotations

from holotron.computer.browser import BrowserComputer
from holotron.computer.computer import Outcome, Point
from holotron.contract.conversation import Screenshot
from holotron.contract.step import Answer, ToolCall
from holotron.tasks.task import Transition


class WebTask:
    """Implements Task. `reset` opens the URL and raises ComputerError, naming it, where that fails."""

    def __init__(self, computer: BrowserComputer, goal: str, url: str, name: str = "web") -> None:
        self.name = name
        self.goal = goal
        self.url = url
        self._computer = computer

    @property
    def computer(self) -> BrowserComputer:
        return self._computer

    async def reset(self, seed: int) -> str:
        """The seed has no meaning here: the web is as it is."""
        await self._computer.goto(self.url)
        return self.goal

    async def screenshot(self) -> Screenshot:
        return await self._computer.screenshot()

    async def step(self, tool_call: ToolCall, point: Point | None) -> Transition:
        if isinstance(tool_call, Answer):
            return Transition(Outcome(True, "ok"), terminated=True)
        return Transition(await self._computer.do(tool_call, point))

    async def close(self) -> None:
        await self._computer.close()
