"""MiniWoB++ tasks, driven in a browser without any other framework.

The model sees the task's area only, 160x160 CSS pixels: the page is scrolled by the 50 pixels of its yellow
query bar, and the goal is given as text. With `show_query` it sees the whole page of 160x210 pixels.
Success is raw reward 1 (BrowserGym counts any raw reward above 0; `Transition.reward` keeps the number).
"""

from __future__ import annotations

import difflib
from pathlib import Path

from holotron.computer.browser import BrowserComputer
from holotron.computer.computer import ComputerError, Outcome, Point
from holotron.contract.conversation import Screenshot
from holotron.contract.step import Answer, ToolCall
from holotron.tasks.pages_server import ROOT, miniwob_address
from holotron.tasks.task import Transition

TASKS: tuple[str, ...] = tuple(sorted(page.stem for page in (ROOT / "miniwob").glob("*.html")))

EASY20: tuple[str, ...] = (
    "click-test",
    "click-test-2",
    "click-test-transfer",
    "click-button",
    "click-button-sequence",
    "click-link",
    "click-tab",
    "click-dialog",
    "click-dialog-2",
    "click-option",
    "click-checkboxes",
    "click-color",
    "click-shades",
    "click-widget",
    "focus-text",
    "focus-text-2",
    "enter-text",
    "enter-password",
    "login-user",
    "click-collapsible",
)

# Pages known to carry nothing over from one episode to the next. Others do (typed text in a textarea, how far
# a box was scrolled, a running timer), so they are loaded anew for each.
REUSED: frozenset[str] = frozenset(EASY20)

WIDTH = 160
QUERY_HEIGHT = 50
AREA_HEIGHT = 160
EPISODE_START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z, the clock of every episode's first moment

_SETUP = Path(__file__).with_name("miniwob_page.js").read_text(encoding="utf-8")


def viewport(show_query: bool = False) -> tuple[int, int]:
    """Width and height in CSS pixels that a computer for these tasks must have."""
    return WIDTH, AREA_HEIGHT + (QUERY_HEIGHT if show_query else 0)


class UnknownTask(ValueError):
    """No task of that name; the message names the nearest ones."""


class MiniWobTask:
    """Implements Task. The pages of REUSED are loaded once and kept for later resets of the same task.

    `goal` is the text of the running episode. Raises UnknownTask, and ValueError for a computer whose
    viewport is not `viewport(show_query)`.
    """

    def __init__(self, computer: BrowserComputer, name: str, show_query: bool = False) -> None:
        self.check_name(name)
        if (computer.width, computer.height) != viewport(show_query):
            raise ValueError(
                f"{name} needs a viewport of {viewport(show_query)}, not {(computer.width, computer.height)}"
            )
        self.name = name
        self.goal = ""
        self.show_query = show_query
        self._computer = computer
        self._url = f"{miniwob_address()}/miniwob/{name}.html"
        self._over: Transition | None = None

    @staticmethod
    def check_name(name: str) -> None:
        """Raises UnknownTask, naming the nearest ones, if there is no such task."""
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UnknownTask(f"no MiniWoB++ task is called {name!r}{hint}")

    @property
    def computer(self) -> BrowserComputer:
        return self._computer

    async def reset(self, seed: int) -> str:
        await self._computer.reset()
        if self._computer.page.url.partition("#")[0] != self._url or self.name not in REUSED:
            await self._computer.goto(self._url)
        top = 0 if self.show_query else QUERY_HEIGHT
        await self._computer.evaluate(_SETUP, top)
        await self._computer.park_cursor()
        started = await self._computer.evaluate(
            "([seed, start]) => holotron.reset(seed, start)", [seed, EPISODE_START_MS]
        )
        await self._computer.settle()  # a dialog's icons are fetched when it first appears
        if not started["ready"]:
            raise ComputerError(f"{self.name} was not ready 10 s after its reset with seed {seed}")
        self._over = None
        self.goal = started["goal"]
        return self.goal

    async def screenshot(self) -> Screenshot:
        return await self._computer.screenshot()

    async def step(self, tool_call: ToolCall, point: Point | None) -> Transition:
        """An `answer` ends the episode and fails, as no task of these asks for one."""
        if self._over is not None:
            return self._over
        if isinstance(tool_call, Answer):
            return self._end(Outcome(True, "ok"), 0.0)
        outcome = await self._computer.do(tool_call, point)
        if self._computer.page.url.partition("#")[0] != self._url:
            return Transition(outcome, info={"left_page": self._computer.page.url})
        result = await self._computer.evaluate(
            "() => window.holotron ? holotron.result() : { done: false, reward: 0, lost: true }"
        )
        if result.get("lost"):  # reloaded, so the episode is gone and cannot be won any more
            return self._end(outcome, 0.0)
        return self._end(outcome, float(result["reward"])) if result["done"] else Transition(outcome)

    def _end(self, outcome: Outcome, reward: float) -> Transition:
        self._over = Transition(outcome, reward, terminated=True, success=reward == 1.0)
        return self._over

    async def close(self) -> None:
        await self._computer.close()
