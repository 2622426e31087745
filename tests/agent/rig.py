"""What the tests of the agent share: real tasks in a real browser, and policies that do as they are told."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from PIL import Image

from holotron.agent.records import StepRecord
from holotron.computer.browser import Browser, BrowserComputer
from holotron.computer.computer import Outcome, Point
from holotron.contract.contract import get_contract
from holotron.contract.conversation import Conversation, Screenshot
from holotron.contract.policy import Decision, Usage
from holotron.contract.step import Answer, Click, Step, ToolCall
from holotron.tasks.miniwob import MiniWobTask, viewport
from holotron.tasks.oracles import OraclePolicy
from holotron.tasks.task import Task, Transition

ROOT = Path(__file__).parents[2]  # of the repository, from where a process finds these tests
CONTRACT = get_contract("holotron3")
CORNER = Step(thought="I click where nothing is.", tool_call=Click(element="corner", x=990, y=990))
ANSWER = Step(thought="I answer.", tool_call=Answer(content="42"))
ORACLE_USAGE = Usage(prompt_tokens=100, output_tokens=10, state_bytes=4096, kv_bytes=50)


def open_in(browser: Browser) -> Callable[[str], Awaitable[Task]]:
    async def open_task(name: str) -> Task:
        return MiniWobTask(await browser.new_computer(*viewport()), name)

    return open_task


class Scripted:
    """Says the entries of `script` in turn, then the last one again; an exception is raised.

    Keeps the observations and messages it was shown, the latter made by the real contract.
    """

    name = "scripted"

    def __init__(self, *script: Step | Exception) -> None:
        self.script = list(script)
        self.observations: list[str] = []
        self.answer_now: list[bool] = []
        self.messages: list[list[dict[str, Any]]] = []

    async def decide(self, conversation: Conversation) -> Decision:
        self.observations.append(conversation.turns[-1].observation)
        self.answer_now.append(conversation.answer_now)
        self.messages.append(CONTRACT.messages(conversation))
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(said, Exception):
            raise said
        return Decision(said, raw_text=CONTRACT.dump(said))

    async def close(self) -> None:
        return


class SlowOracle:
    """The oracle, taking its time before each decision and reporting what it would cost."""

    name = "slow oracle"

    def __init__(self, task: MiniWobTask, seconds: float = 0.0) -> None:
        self.oracle, self.seconds = OraclePolicy(task), seconds

    async def decide(self, conversation: Conversation) -> Decision:
        await asyncio.sleep(self.seconds)
        decision = await self.oracle.decide(conversation)
        return Decision(decision.step, ORACLE_USAGE, raw_text="", extra=decision.extra)

    async def close(self) -> None:
        return


class QuestionTask:
    """A page with a question, ended by an answer that nothing checks."""

    name = "question"

    def __init__(self, computer: BrowserComputer) -> None:
        self.computer = computer

    async def reset(self, seed: int) -> str:
        await self.computer.reset()
        await self.computer.evaluate("seed => { document.body.textContent = `Page ${seed}` }", seed)
        return f"What is on page {seed}?"

    async def screenshot(self) -> Screenshot:
        return await self.computer.screenshot()

    async def step(self, tool_call: ToolCall, point: Point | None) -> Transition:
        if isinstance(tool_call, Answer):
            return Transition(Outcome(True, "ok"), terminated=True)
        return Transition(await self.computer.do(tool_call, point))

    async def close(self) -> None:
        await self.computer.close()


async def browser_pid(browser: Browser) -> int:
    """The process id of this browser's own Chromium, as it says itself."""
    assert browser._process is not None
    session = await browser._process.new_browser_cdp_session()
    processes = (await session.send("SystemInfo.getProcessInfo"))["processInfo"]
    await session.detach()
    return int(next(process["id"] for process in processes if process["type"] == "browser"))


def picture(shade: int = 255) -> Screenshot:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, shade, shade)).save(buffer, "PNG")
    return Screenshot(buffer.getvalue(), 16, 16, 16.0, 16.0)


def record(index: int, file: str = "step-000.png", **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "index": index, "goal": "Click Ok.", "screenshot": file, "width": 16, "height": 16, "css_width": 16.0,
        "css_height": 16.0, "sha256": "0" * 64, "contract": "holotron3", "step": CORNER,
        "point": (15.0, 15.0),
        "outcome": "ok", "prompt_tokens": 100, "output_tokens": 10, "state_bytes": 4096, "decide_s": 0.25,
    }  # fmt: skip
    return StepRecord(**(fields | changes))


def lines_of(folder: Path) -> int:
    """Complete lines of a steps.jsonl that may just be written."""
    path = folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
