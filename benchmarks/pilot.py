"""Measures the shipped pilot and stores benchmarks/results/pilot.json.

    python benchmarks/pilot.py [--model weights/pilot] [--seeds 100] [--tokens-seeds 100] [--untrained-seeds 100]

Four policies on the same 20 tasks and seeds: the pilot with its grounding head, the pilot spelling coordinates as
plain tokens, uniformly random clicks, and the same network before training. Then the demo, and twenty decisions of
one session for the bytes of its recurrent state. Interrupted, it goes on with the runs it has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from store import ROOT, store

from holotron.agent.summary import RunSummary, read_summary
from holotron.computer.browser import Browser
from holotron.contract.conversation import Conversation, Turn
from holotron.evaluation.episodes import run_miniwob
from holotron.evaluation.policies import choose_policy
from holotron.live import LiveTable
from holotron.model.modeling import HolotronForConditionalGeneration, count_parameters
from holotron.tasks.miniwob import EASY20, MiniWobTask, viewport
from holotron.training.pilot.train import Recipe, build_learner, export


def measure(name: str, model: str, seeds: int, folder: Path, workers: int, tokens_only: bool = False) -> RunSummary:
    done = read_summary(folder) if (folder / "run.json").exists() else None
    if done is not None and not done.interrupted and done.total.n + done.total.infra_errors >= 20 * seeds:
        return done
    print(f"{name}: 20 tasks x {seeds} seeds", flush=True)
    chosen = choose_policy(model, workers=workers, tokens_only=tokens_only)
    resume = (folder / "run.json").exists()
    with LiveTable(EASY20, 20 * seeds) as table:
        return asyncio.run(
            run_miniwob(chosen, EASY20, range(seeds), folder, workers=workers, resume=resume, on_event=table)
        )


async def session_bytes(model: str, steps: int = 20) -> list[tuple[int, int]]:
    """(state, KV) bytes after each of `steps` decisions of one session, its history growing all the while."""
    chosen = choose_policy(model, workers=1)
    sizes = []
    async with await Browser.launch() as browser:
        task = MiniWobTask(await browser.new_computer(*viewport()), "click-checkboxes")
        conversation = Conversation(await task.reset(0))
        for _ in range(steps):
            conversation.turns.append(Turn(await task.screenshot()))
            decision = await chosen.policy.decide(conversation)  # type: ignore[union-attr]
            conversation.turns[-1].step, conversation.turns[-1].result = decision.step, "ok"
            sizes.append((decision.usage.state_bytes, decision.usage.kv_bytes))
    if chosen.close is not None:
        await chosen.close()
    return sizes


def run_demo(model: str, folder: Path) -> dict[str, Any]:
    """The demo in a process of its own, as a person starts it; wall time includes the start."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "holotron.cli", "demo", "--model", model, "--out", str(folder), "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    summary: dict[str, Any] = json.loads(printed)
    return summary | {"wall_s": time.monotonic() - began}


def table(summary: RunSummary, policy: str) -> list[dict[str, Any]]:
    return [
        {
            "policy": policy, "task": name, "n": s.n, "successes": s.successes, "rate": s.rate, "low": s.low,
            "high": s.high, "raw_positive": s.raw_positive, "mean_steps": s.mean_steps, "infra_errors": s.infra_errors,
        }
        for name, s in sorted(summary.tasks.items())
    ]  # fmt: skip


async def browser_version() -> str:
    async with await Browser.launch() as browser:
        return browser.version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="weights/pilot")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--tokens-seeds", type=int, default=100)
    parser.add_argument("--untrained-seeds", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "benchmark-pilot")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder: Path = options.folder
    untrained = folder / "untrained-model"
    if not untrained.exists():
        export(build_learner(Recipe()), untrained)
        settings = json.loads((untrained / "agent.json").read_text())
        # It never ends a reply: 64 tokens, four times a trained one's reply, say as much as 192 and sooner.
        (untrained / "agent.json").write_text(json.dumps(settings | {"max_tokens": 64}))
    runs = {
        "pilot": measure("pilot", options.model, options.seeds, folder / "pilot", 4),
        "pilot, tokens only": measure("tokens only", options.model, options.tokens_seeds, folder / "tokens", 4, True),
        "random": measure("random", "random", options.seeds, folder / "random", 4),
        "untrained": measure("untrained", str(untrained), options.untrained_seeds, folder / "untrained", 16),
    }
    demo = run_demo(options.model, folder / "demo")
    sizes = asyncio.run(session_bytes(options.model))
    pilot = runs["pilot"]
    figures = {
        "miniwob_easy20_mean": pilot.mean_rate,
        "miniwob_easy20_tasks_ge_60": sum(s.rate >= 0.6 for s in pilot.tasks.values()),
        "miniwob_easy20_tokens_only_mean": runs["pilot, tokens only"].mean_rate,
        "random_easy20_mean": runs["random"].mean_rate,
        "untrained_easy20_mean": runs["untrained"].mean_rate,
        "parameters": count_parameters(HolotronForConditionalGeneration.from_pretrained(options.model)),
        "demo_first_action_s": demo["speed"]["first_action_s"],
        "demo_seconds": demo["wall_s"],
        "demo_mean": demo["mean_rate"],
        "actions_per_s": demo["speed"]["actions_per_s"],
        "tokens_per_s": demo["speed"]["tokens_per_s"],
        "state_bytes_step_1": sizes[0][0],
        "state_bytes_step_20": sizes[-1][0],
        "kv_bytes_step_1": sizes[0][1],
        "kv_bytes_step_20": sizes[-1][1],
        "seeds": options.seeds,
        "tokens_only_seeds": options.tokens_seeds,
        "untrained_seeds": options.untrained_seeds,
    }
    command = (
        f"python benchmarks/pilot.py --seeds {options.seeds} --tokens-seeds {options.tokens_seeds} "
        f"--untrained-seeds {options.untrained_seeds}"
    )
    rows = [row for name, summary in runs.items() for row in table(summary, name)]
    store("pilot", figures, rows, command, browser=asyncio.run(browser_version()), out=options.out)


if __name__ == "__main__":
    main()
