"""Records for the pilot: screenshots with free dense labels, and an oracle's next step where there is one.

One JSON line per screenshot: `png` (base64), size, `chars`, `elements`, `ignore` from the DOM, and for steps
`task`, `seed`, `goal`, `history`, `step`, `box`. Seeds from FIRST_SEED on belong to training; evaluation uses
small seeds, so the two never meet.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holotron.computer.browser import Browser, BrowserComputer
from holotron.computer.computer import ComputerError
from holotron.contract.contract import get_contract
from holotron.contract.conversation import Conversation, Screenshot, Turn
from holotron.contract.policy import ContractError, Policy, PolicyError
from holotron.contract.step import Click, Step
from holotron.tasks.miniwob import MiniWobTask, viewport
from holotron.tasks.oracles import OraclePolicy

FIRST_SEED = 1_000_000
MAX_STEPS = 12
LABELS = Path(__file__).with_name("dom_labels.js").read_text(encoding="utf-8")
PRACTICE = Path(__file__).with_name("pages") / "practice.html"
# Tasks that go on after a wrong click: some are made on purpose, labelled by the oracle afterwards.
FORGIVING = frozenset(
    "click-option click-checkboxes click-shades enter-text enter-password login-user click-collapsible".split()
)


@dataclass(frozen=True, slots=True)
class Job:
    """Episodes of one task (or practice pages) with seeds first..first+count, into one file."""

    name: str
    first: int
    count: int
    noise: float = 0.1


def labelled(shot: Screenshot, labels: dict[str, Any]) -> dict[str, Any]:
    return {
        "png": base64.b64encode(shot.png).decode(),
        "width": shot.width,
        "height": shot.height,
        **{key: labels[key] for key in ("chars", "elements", "ignore")},
    }


def done_seeds(path: Path) -> int:
    """One past the last seed whose record is whole, or -1; a torn last line is cut off."""
    if not path.exists():
        return -1
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    if not whole:
        return -1
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    return int(json.loads(last)["seed"]) + 1


def history_of(turns: list[Turn]) -> list[dict[str, Any]]:
    return [
        {
            "step": turn.step.model_dump(mode="json"),
            "result": turn.result,
            "is_error": turn.is_error,
            "observation": turn.observation,
        }
        for turn in turns
        if turn.step is not None
    ]


async def record_episode(
    task: MiniWobTask, seed: int, noise: float, actor: Policy | None = None
) -> list[dict[str, Any]]:
    """The oracle's episode, sometimes thrown off its way; every state carries the oracle's label.

    With an `actor` it is the actor that acts and the oracle only labels the states it gets into (DAgger, Ross et
    al., 2011).
    """
    contract = get_contract("holotron3")
    rng = random.Random(f"{task.name}-{seed}")
    goal, oracle = await task.reset(seed), OraclePolicy(task)
    turns: list[Turn] = []
    records = []
    for _ in range(MAX_STEPS):
        shot = await task.screenshot()
        labels = await task.computer.evaluate(LABELS)
        turns.append(Turn(shot))
        try:
            decision = await oracle.decide(Conversation(goal, turns))
        except PolicyError:  # a mistake led where the oracle has nothing to say
            break
        records.append(
            {
                "task": task.name,
                "seed": seed,
                "goal": goal,
                **labelled(shot, labels),
                "history": history_of(turns[:-1]),
                "step": decision.step.model_dump(mode="json"),
                "box": decision.extra.get("box"),
            }
        )
        step = decision.step
        if actor is not None:
            try:
                step = (await actor.decide(Conversation(goal, turns))).step
            except ContractError:
                break
        elif task.name in FORGIVING and rng.random() < noise and labels["elements"]:
            step = wrong_step(step, rng.choice(labels["elements"]), shot)
        turns[-1].step = step
        transition = await task.step(step.tool_call, contract.point(step.tool_call, shot))
        turns[-1].result, turns[-1].is_error = transition.outcome.text, not transition.outcome.ok
        if transition.terminated:
            break
    return records


def wrong_step(step: Step, element: dict[str, Any], shot: Screenshot) -> Step:
    x0, y0, x1, y1 = element["box"]
    x, y = round(500 * (x0 + x1) / shot.css_width), round(500 * (y0 + y1) / shot.css_height)
    name = element["text"][:24] or element["role"]
    return Step(thought=step.thought, tool_call=Click(element=name, x=min(x, 1000), y=min(y, 1000)))


async def record_practice(computer: BrowserComputer, seed: int) -> list[dict[str, Any]]:
    await computer.evaluate("seed => build(seed)", seed)
    shot = await computer.screenshot()
    return [{"task": "practice", "seed": seed, **labelled(shot, await computer.evaluate(LABELS))}]


async def collect(
    jobs: list[Job],
    out: Path,
    workers: int = 2,
    progress: Callable[[str, int], None] | None = None,
    actor: Policy | None = None,
) -> int:
    """Run the jobs, going on where files in `out` stop. Returns the number of new records.

    `actor`: see `record_episode`.
    """
    out.mkdir(parents=True, exist_ok=True)
    waiting: asyncio.Queue[Job] = asyncio.Queue()
    for job in jobs:
        waiting.put_nowait(job)
    total = 0

    async def worker(browser: Browser) -> None:
        nonlocal total
        computer = await browser.new_computer(*viewport())
        while not waiting.empty():
            job = waiting.get_nowait()
            path = out / f"{job.name}-{job.first}.jsonl"
            start = max(job.first, done_seeds(path))
            task = None
            if job.name == "practice":
                await computer.page.set_content(PRACTICE.read_text(encoding="utf-8"))
            else:
                task = MiniWobTask(computer, job.name)
            with path.open("a", encoding="utf-8") as file:
                for seed in range(start, job.first + job.count):
                    try:
                        if task is None:
                            records = await record_practice(computer, seed)
                        else:
                            records = await record_episode(task, seed, job.noise, actor)
                    except ComputerError:
                        await computer.close()
                        computer = await browser.new_computer(*viewport())
                        if task is not None:
                            task = MiniWobTask(computer, job.name)
                        continue
                    file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
                    total += len(records)
                    if progress is not None:
                        progress(job.name, len(records))

    async with await Browser.launch() as browser:
        await asyncio.gather(*(worker(browser) for _ in range(workers)))
    return total
