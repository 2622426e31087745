"""Records traces from scripted runs on MiniWoB++: one user works through one task after another in one history."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from holotron.bench.traces import TraceFolder, TraceTurn, TraceWriter, think_time
from holotron.computer.browser import Browser
from holotron.computer.computer import ComputerError
from holotron.contract.contract import get_contract
from holotron.contract.conversation import Conversation
from holotron.contract.policy import PolicyError
from holotron.tasks.miniwob import EASY20, MiniWobTask, viewport
from holotron.tasks.oracles import OraclePolicy

FIRST_SEED = 5_000_000  # apart from the seeds of training and of evaluation
NEXT = "New task: "
_ATTEMPTS = 3


async def record_miniwob(
    folder: Path,
    *,
    traces: int = 100,
    turns: int = 20,
    seed: int = 0,
    workers: int = 4,
    on_trace: Callable[[str], None] | None = None,
) -> TraceFolder:
    """`traces` users of `turns` steps each. The same arguments give the same replies and pixels in one browser version.

    The goal of a user's first episode heads its history; that of a later one stands beside its first screenshot.
    Raises ComputerError if the browser fails more than twice in a row at one trace.
    """
    writer = TraceWriter(folder, "miniwob", seed, viewport())
    numbers = iter(range(traces))

    async with await Browser.launch() as browser:

        async def work() -> None:
            for number in numbers:
                name = f"miniwob-{number:04d}"
                for attempt in range(_ATTEMPTS):
                    try:
                        writer.add(name, *await _user(browser, writer, number, turns, seed))
                        break
                    except ComputerError:
                        if attempt == _ATTEMPTS - 1:
                            raise
                if on_trace is not None:
                    on_trace(name)

        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
    return writer.close()


async def _user(
    browser: Browser, writer: TraceWriter, number: int, turns: int, seed: int
) -> tuple[str, list[TraceTurn]]:
    """The goal and the turns of user `number`, who does tasks drawn from its own seed."""
    rng = random.Random(f"{seed}-{number}")
    first, made = "", list[TraceTurn]()
    computer = await browser.new_computer(*viewport())
    try:
        while len(made) < turns:
            task = MiniWobTask(computer, rng.choice(EASY20))
            goal = await task.reset(FIRST_SEED + rng.randrange(1_000_000))
            notice = NEXT + goal if first else ""
            first = first or goal
            made += await _episode(task, writer, goal, notice, turns - len(made), rng)
    finally:
        await computer.close()
    return first, made


async def _episode(
    task: MiniWobTask, writer: TraceWriter, goal: str, notice: str, room: int, rng: random.Random
) -> list[TraceTurn]:
    """The oracle's steps until the episode ends, or `room` of them."""
    contract = get_contract("holotron3")
    oracle = OraclePolicy(task)
    made: list[TraceTurn] = []
    while len(made) < room:
        shot = await task.screenshot()
        try:
            decision = await oracle.decide(Conversation(goal))
        except PolicyError:  # a page that has no way on: the next task
            break
        call = decision.step.tool_call
        transition = await task.step(call, contract.point(call, shot))
        outcome = transition.outcome
        made.append(
            writer.turn(
                shot.png,
                decision.step,
                observation=notice if not made else "",
                result=outcome.text,
                is_error=not outcome.ok,
                think_s=think_time(rng),
            )  # fmt: skip
        )
        if transition.terminated:
            break
    return made
