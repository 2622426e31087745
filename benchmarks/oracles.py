"""Does every oracle solve every seed of its task? Also how fast the browser takes their steps.

python benchmarks/oracles.py [--seeds 100] [--out benchmarks/results/oracles.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from holotron.computer.browser import Browser, BrowserComputer
from holotron.contract.conversation import Conversation
from holotron.tasks.miniwob import EASY20, MiniWobTask, viewport
from holotron.tasks.oracles import OraclePolicy

ROOT = Path(__file__).resolve().parents[1]
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


async def run(seeds: int) -> dict[str, Any]:
    async with await Browser.launch() as browser:
        computer = await browser.new_computer(*viewport())
        rows = []
        for name in EASY20:
            rows.append(await measure(computer, name, seeds))
            print(json.dumps(rows[-1]), flush=True)
        chromium = browser.version
    episodes = sum(row["seeds"] for row in rows)
    steps = sum(row["steps"] for row in rows)
    return {
        "figures": {
            "oracle_easy20_mean": sum(row["solved"] for row in rows) / episodes,
            "oracle_easy20_tasks_all_solved": sum(row["solved"] == row["seeds"] for row in rows),
            "oracle_steps_per_episode": round(steps / episodes, 2),
            "browser_step_ms_median": median(row["step_ms_median"] for row in rows),
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "load_1min": round(os.getloadavg()[0], 1),
        },
        "versions": {
            "python": platform.python_version(),
            "chromium": chromium,
            "playwright": version("playwright"),
            "miniwob": version("miniwob"),
        },
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/oracles.py --seeds {seeds}",
        "commit": commit(),
        "rows": rows,
    }


def commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return asked.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="episodes per task, from seed 0 on")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "oracles.json")
    given = parser.parse_args()
    result = asyncio.run(run(given.seeds))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["figures"], indent=2))
    return 0 if result["figures"]["oracle_easy20_mean"] == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
