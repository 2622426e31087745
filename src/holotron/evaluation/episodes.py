"""Runs of tasks with a policy in one browser: the MiniWoB++ benchmark, and a person's own task on a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from holotron.agent.fleet import Job, OnEvent, run_fleet
from holotron.agent.loop import Limits
from holotron.agent.summary import RunSummary
from holotron.computer.browser import Browser
from holotron.contract.conversation import Settings
from holotron.evaluation.policies import Chosen
from holotron.tasks.miniwob import EASY20, TASKS, MiniWobTask, UnknownTask, viewport
from holotron.tasks.task import Task
from holotron.tasks.web import WebTask

SETS = {"easy20": EASY20, "all": TASKS}


def read_tasks(text: str) -> list[str]:
    """Names, or sets of names (easy20, all), separated by commas. Raises UnknownTask naming near ones."""
    found: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if not name:
            continue
        names = SETS.get(name, (name,))
        for one in names:
            MiniWobTask.check_name(one)
            if one not in found:
                found.append(one)
    if not found:
        raise UnknownTask("no task was named; try easy20, all, or names such as click-test")
    return found


def run_folder(kind: str) -> Path:
    return Path("runs") / f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


async def run_miniwob(
    chosen: Chosen,
    tasks: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    workers: int = 4,
    resume: bool = False,
    on_event: OnEvent | None = None,
    max_steps: int = 10,
    started: float | None = None,
) -> RunSummary:
    """Every task with every seed, `workers` at a time in one browser. What is done is in `out`, resumable."""
    began = time.monotonic() if started is None else started
    try:
        if chosen.check is not None:
            await chosen.check()
        async with await Browser.launch() as browser:

            async def make(name: str) -> Task:
                return MiniWobTask(await browser.new_computer(*viewport()), name)

            jobs = [Job(task, seed) for task in tasks for seed in seeds]
            return await run_fleet(
                jobs, make, chosen.policy, chosen.contract, workers, out,
                resume=resume, on_event=on_event, limits=Limits(max_steps=max_steps),
                model=chosen.name, browser=browser.version, started=began,
            )  # fmt: skip
    finally:
        if chosen.close is not None:
            await chosen.close()


async def run_web(
    chosen: Chosen,
    goal: str,
    url: str,
    out: Path,
    *,
    size: tuple[int, int],
    limits: Limits,
    settings: Settings,
    headless: bool = True,
    allowed_hosts: Sequence[str] | None = None,
    resume: bool = False,
    on_event: OnEvent | None = None,
) -> RunSummary:
    """One task in a person's own words, starting at `url`. Raises ValueError for the oracle, which knows no such."""
    if chosen.name == "oracle":
        raise ValueError("the oracle only solves its MiniWoB++ tasks; name a checkpoint folder or an endpoint")
    try:
        if chosen.check is not None:
            await chosen.check()
        async with await Browser.launch(headless=headless) as browser:

            async def make(name: str) -> Task:
                computer = await browser.new_computer(*size, allowed_hosts=allowed_hosts)
                return WebTask(computer, goal, url)

            return await run_fleet(
                [Job("web", 0)], make, chosen.policy, chosen.contract, 1, out,
                resume=resume, on_event=on_event, limits=limits, settings=settings,
                model=chosen.name, browser=browser.version,
            )  # fmt: skip
    finally:
        if chosen.close is not None:
            await chosen.close()
