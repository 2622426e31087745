"""Does every oracle solve every seed of its task? Also how fast the browser takes their steps.

python benchmarks/oracles.py [--seeds 100] [--out benchmarks/results/oracles.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from store import store

from holotron.computer.browser import Browser, BrowserComputer
from holotron.contract.conversation import Conversation
from holotron.tasks.miniwob import EASY20, MiniWobTask, viewport
from holotron.tasks.oracles import OraclePolicy

MOST_STEPS = 20


async def measure(computer: BrowserComputer, name: str, seeds: int) -> dict[str, Any]:
    task = MiniWobTask(computer, name)
    oracle = OraclePolicy(task)
    failed: list[int] = []
    scrolls = 0
    acting: list[float] = []
    began = time.perf_counter()
    for seed in range(seeds):
        goal = await task.reset(seed)
        for _ in range(MOST_STEPS):
            call = (await oracle.decide(Conversation(goal=goal))).step.tool_call
            x, y = getattr(call, "x", None), getattr(call, "y", None)
            point = None if x is None or y is None else (x * computer.width / 1000, y * computer.height / 1000)
            started = time.perf_counter()
            transition = await task.step(call, point)
            acting.append(time.perf_counter() - started)
            scrolls += call.tool_name == "scroll"
            if transition.terminated:
                break
        if not transition.success:
            failed.append(seed)
    return {
        "task": name,
        "seeds": seeds,
        "solved": seeds - len(failed),
        "failed_seeds": failed,
        "steps": len(acting),
        "scrolls": scrolls,
        "step_ms_median": round(1000 * median(acting), 1),
        "episode_ms": round(1000 * (time.perf_counter() - began) / seeds, 1),
    }


async def run(seeds: int) -> tuple[list[dict[str, Any]], str]:
    """A row for each task, and the browser's version."""
    async with await Browser.launch() as browser:
        computer = await browser.new_computer(*viewport())
        rows = []
        for name in EASY20:
            rows.append(await measure(computer, name, seeds))
            print(json.dumps(rows[-1]), flush=True)
        return rows, browser.version


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="episodes per task, from seed 0 on")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    rows, chromium = asyncio.run(run(given.seeds))
    episodes = sum(row["seeds"] for row in rows)
    figures = {
        "oracle_easy20_mean": sum(row["solved"] for row in rows) / episodes,
        "oracle_easy20_tasks_all_solved": sum(row["solved"] == row["seeds"] for row in rows),
        "oracle_steps_per_episode": sum(row["steps"] for row in rows) / episodes,
        "browser_step_ms_median": median(row["step_ms_median"] for row in rows),
    }
    store(
        "oracles", figures, rows, f"python benchmarks/oracles.py --seeds {given.seeds}", browser=chromium, out=given.out
    )
    return 0 if figures["oracle_easy20_mean"] == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
