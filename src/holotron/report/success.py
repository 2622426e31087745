"""How often tasks were done, by task and over all, in the words of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holotron.agent.summary import Score, score
from holotron.report.episodes import Recorded
from holotron.report.plots import Bar
from holotron.report.readable import number_text, percent_text


@dataclass(frozen=True, slots=True)
class Row:
    """A task's score; episodes that are unfinished, or that nothing can check, are not in it."""

    task: str
    score: Score
    unfinished: int
    unchecked: int

    @property
    def n(self) -> int:
        return self.score.n

    @property
    def rate(self) -> str:
        return percent_text(self.score.rate) if self.n else "–"

    @property
    def interval(self) -> str:
        return f"{100 * self.score.low:.0f}–{100 * self.score.high:.0f} %" if self.n else "–"

    @property
    def raw(self) -> str:
        return f"{self.score.raw_positive} of {self.n}" if self.n else "–"

    @property
    def steps(self) -> str:
        return number_text(self.score.mean_steps) if self.n else "–"


@dataclass(frozen=True, slots=True)
class Success:
    rows: tuple[Row, ...]  # by task name
    total: Row

    @property
    def scored_tasks(self) -> int:
        return sum(row.n > 0 for row in self.rows)

    @property
    def mean(self) -> str:
        """Mean of the tasks' rates: each task weighs the same, however many seeds it had."""
        rates = [row.score.rate for row in self.rows if row.n]
        return percent_text(sum(rates) / len(rates)) if rates else "–"

    def bars(self) -> list[Bar]:
        """The best task first; ties by name. Tasks without a scored episode have no bar."""
        scored = sorted((row for row in self.rows if row.n), key=lambda row: (-row.score.rate, row.task))
        return [Bar(row.task, row.score.rate, row.score.low, row.score.high) for row in scored]


def success_of(recorded: Sequence[Recorded]) -> Success:
    tasks = sorted({one.task for one in recorded})
    rows = tuple(_row(task, [one for one in recorded if one.task == task]) for task in tasks)
    return Success(rows, _row("all", recorded))


def _row(task: str, recorded: Sequence[Recorded]) -> Row:
    outcomes = [one.outcome for one in recorded]
    results = [one.episode.result for one in recorded if one.outcome not in ("unfinished", "unchecked")]
    return Row(
        task=task,
        score=score([result for result in results if result is not None]),
        unfinished=outcomes.count("unfinished"),
        unchecked=outcomes.count("unchecked"),
    )
