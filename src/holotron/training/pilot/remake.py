"""One command from seeds to checkpoint: collect records, train, export. Every stage goes on where it stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holotron.data.collect import FIRST_SEED, Job, collect
from holotron.tasks.miniwob import EASY20
from holotron.training.pilot.train import Recipe, train

PRACTICE_PAGES = 8  # practice pages for each seed of a task


def collect_records(folder: Path, seeds: int, first: int = FIRST_SEED, workers: int = 2) -> int:
    """Episodes of the twenty easy tasks and practice pages; returns the number of new records."""
    jobs = [Job("practice", first, PRACTICE_PAGES * seeds), *(Job(name, first, seeds) for name in EASY20)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("records", total=None)

        def show(name: str, records: int) -> None:
            progress.update(bar, description=name, advance=records)

        return asyncio.run(collect(jobs, folder, workers, show))


def remake(out: Path, seeds: int, recipe: Recipe, workers: int = 2) -> Path:
    """Returns the folder of the exported checkpoint."""
    data = out / "data"
    collect_records(data, seeds, workers=workers)
    Console().print(f"training on the records in {data}; stop with Ctrl-C, go on with the same command")
    train(recipe, sorted(data.glob("*.jsonl")), out)
    return out / "model"
