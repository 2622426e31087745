"""How often tasks were done, by task and over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holotron.report.episodes import Recorded
from holotron.report.intervals import wilson
from holotron.report.plots import Bar
from holotron.report.readable import number_text, percent_text


@dataclass(frozen=True, slots=True)
class Row:
    """`n` counts scored episodes only: not infrastructure errors, unfinished or unchecked ones."""

    task: str
    n: int
    successes: int
    positive: int  # scored episodes whose raw reward was above 0
    infrastructure: int
    unfinished: int
    unchecked: int
    mean_steps: float | None

    @property
    def bounds(self) -> tuple[float, float]:
        return wilson(self.successes, self.n)

    @property
    def fraction(self) -> float | None:
        return self.successes / self.n if self.n else None

    @property
    def rate(self) -> str:
        return percent_text(self.fraction)

    @property
    def interval(self) -> str:
        low, high = self.bounds
        return f"{100 * low:.0f}–{100 * high:.0f} %" if self.n else "–"

    @property
    def raw(self) -> str:
        return f"{self.positive} of {self.n}" if self.n else "–"

    @property
    def steps(self) -> str:
        return number_text(self.mean_steps)


@dataclass(frozen=True, slots=True)
class Success:
    rows: tuple[Row, ...]  # by task name
    total: Row

    @property
    def mean(self) -> str:
        """Mean of the tasks' rates: each task weighs the same, however many seeds it had."""
        rates = [row.fraction for row in self.rows if row.fraction is not None]
        return percent_text(sum(rates) / len(rates)) if rates else "–"

    def bars(self) -> list[Bar]:
        """The best task first; ties by name. Tasks without a scored episode have no bar."""
        scored = [(row.fraction, row) for row in self.rows if row.fraction is not None]
        scored.sort(key=lambda pair: (-pair[0], pair[1].task))
        return [Bar(row.task, fraction, *row.bounds) for fraction, row in scored]


def success_of(recorded: Sequence[Recorded]) -> Success:
    tasks = sorted({one.task for one in recorded})
    rows = tuple(_row(task, [one for one in recorded if one.task == task]) for task in tasks)
    return Success(rows, _row("all", recorded))


def _row(task: str, recorded: Sequence[Recorded]) -> Row:
    outcomes = [one.outcome for one in recorded]
    scored = [one.episode for one in recorded if one.outcome in ("success", "failure")]
    return Row(
        task=task,
        n=len(scored),
        successes=outcomes.count("success"),
        positive=sum(episode.result is not None and episode.result.reward > 0 for episode in scored),
        infrastructure=outcomes.count("infrastructure"),
        unfinished=outcomes.count("unfinished"),
        unchecked=outcomes.count("unchecked"),
        mean_steps=sum(len(episode.steps) for episode in scored) / len(scored) if scored else None,
    )
