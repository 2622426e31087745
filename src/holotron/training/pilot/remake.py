"""One command from seeds to checkpoint: a recipe of stages, each collecting records and training on all so far.

Every stage goes on where it was stopped, so the command may be interrupted and repeated as one likes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holotron.data.collect import FIRST_SEED, Job, collect
from holotron.tasks.miniwob import EASY20
from holotron.training.pilot.losses import Weights
from holotron.training.pilot.train import Recipe, TrainingError, train

RECIPE = Path(__file__).with_name("recipe.yaml")


class Pages(BaseModel):
    """Which seeds to collect: `seeds` of each of the 20 tasks, `more` overriding single ones, `practice` pages."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    first: Annotated[int, Field(ge=FIRST_SEED)] = FIRST_SEED
    seeds: Annotated[int, Field(ge=0)] = 0
    more: dict[str, int] = Field(default_factory=dict)
    practice: Annotated[int, Field(ge=0)] = 0

    def jobs(self) -> list[Job]:
        counts = {name: self.more.get(name, self.seeds) for name in EASY20} | {"practice": self.practice}
        return [Job(name, self.first, count) for name, count in counts.items() if count]


class Stage(BaseModel):
    """`train` holds fields of Recipe; `weights` in it fields of Weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    collect: Pages | None = None
    train: dict[str, Any]

    def recipe(self) -> Recipe:
        values = dict(self.train)
        return Recipe(**(values | {"weights": Weights(**values.get("weights", {}))}))


def read_stages(path: Path) -> list[Stage]:
    """Raises TrainingError naming the field that is wrong."""
    try:
        stages = [Stage.model_validate(stage) for stage in yaml.safe_load(path.read_text("utf-8"))["stages"]]
        for stage in stages:
            stage.recipe()
    except ValidationError as error:
        first = error.errors()[0]
        raise TrainingError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} is no recipe: {error}") from error
    return stages


def collect_records(folder: Path, jobs: list[Job], workers: int = 2) -> int:
    """Returns the number of new records."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("records", total=None)

        def show(name: str, records: int) -> None:
            progress.update(bar, description=f"records: {name}", advance=records)

        return asyncio.run(collect(jobs, folder, workers, show))


def remake(out: Path, recipe: Path = RECIPE, workers: int = 2) -> Path:
    """Returns the folder of the exported checkpoint. Raises TrainingError."""
    console = Console()
    data, before = out / "data", None
    for stage in read_stages(recipe):
        if stage.collect is not None:
            collect_records(data, stage.collect.jobs(), workers)
        records = used_records(data, stage, recipe)
        console.print(f"stage {stage.name}: {len(records)} files of records; Ctrl-C stops, the same command goes on")
        plan = stage.recipe()
        state = train(plan, records, out / stage.name, init=before)
        if state["step"] < min(plan.steps, plan.stop or plan.steps):
            raise KeyboardInterrupt  # training has saved and stopped as it was told to
        before = out / stage.name
    if before is None:
        raise TrainingError(f"{recipe} has no stages")
    return before / "model"


def used_records(data: Path, stage: Stage, recipe: Path) -> list[Path]:
    """The files of this and all earlier stages, in a fixed order, whatever else lies in the folder."""
    found: list[Path] = []
    for earlier in read_stages(recipe):
        if earlier.collect is not None:
            found += [data / f"{job.name}-{job.first}.jsonl" for job in earlier.collect.jobs()]
        if earlier.name == stage.name:
            break
    return sorted(found)
