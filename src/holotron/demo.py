"""`holotron demo`: the pilot on twenty tasks, four at a time, then a report."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rich.console import Console

from holotron.agent.summary import RunSummary
from holotron.evaluation.episodes import run_folder, run_miniwob
from holotron.evaluation.policies import choose_policy
from holotron.live import LiveTable, print_summary
from holotron.tasks.miniwob import EASY20

PILOT = Path("weights") / "pilot"


def find_pilot() -> Path:
    """The shipped weights: in the current folder's checkout, or in that of this file."""
    here = Path(__file__).resolve().parents[2] / PILOT
    return PILOT if PILOT.is_dir() or not here.is_dir() else here


def run_demo(
    model: str, workers: int, seeds: int, out: Path | None, resume: bool, console: Console, started: float
) -> tuple[RunSummary, Path]:
    """Returns the summary and the path of the report; `started` (time.monotonic) is when the command began."""
    folder = out or run_folder("demo")
    console.print(
        f"{len(EASY20)} tasks x {seeds} seeds with {model}, {workers} workers; steps go to {folder}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    chosen = choose_policy(model, workers=workers)
    with LiveTable(EASY20, len(EASY20) * seeds, console) as table:
        summary = asyncio.run(
            run_miniwob(
                chosen, EASY20, range(seeds), folder,
                workers=workers, resume=resume, on_event=table, started=started,
            )
        )  # fmt: skip
    print_summary(console, summary)
    from holotron.report.html import write_report  # matplotlib would delay the first action by a second

    report = write_report(folder)
    seconds = time.monotonic() - started
    console.print(f"figures: {folder / 'summary.json'}\nreport: {report}", soft_wrap=True, highlight=False)
    console.print(f"{seconds:.0f} s from start to report; open the report in a browser", highlight=False)
    return summary, report
