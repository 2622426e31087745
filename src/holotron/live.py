"""What a person watches while a run goes on: a table by task, and a line of totals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holotron.agent.fleet import Event
from holotron.agent.records import INFRA
from holotron.agent.summary import RunSummary

ROWS = 25  # tasks shown at once, so that the table fits a screen


class LiveTable:
    """An `on_event` for run_fleet that draws; use it as a context manager. Plain lines where there is no screen."""

    def __init__(self, tasks: Sequence[str], episodes: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self.tasks = list(tasks)
        self.episodes = episodes
        self.done: Counter[str] = Counter()
        self.good: Counter[str] = Counter()
        self.last: dict[str, str] = {}
        self.infra = self.steps = self.tokens = 0
        self.began = time.monotonic()
        self._live = Live(console=self.console, refresh_per_second=4, get_renderable=self._draw)

    def __enter__(self) -> LiveTable:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        if event.kind == "step" and event.record is not None and event.job is not None:
            self.steps += 1
            self.tokens += event.record.prompt_tokens + event.record.output_tokens
            step = event.record.step
            self.last[event.job.task] = step.thought if step else "unusable reply"
        elif event.kind in ("episode_end", "skip") and event.result is not None and event.job is not None:
            task = event.job.task
            if event.result.status == INFRA:
                self.infra += 1
            else:
                self.done[task] += 1
                self.good[task] += bool(event.result.success)
            if not self.console.is_terminal and event.kind == "episode_end":
                self.console.print(f"{task} seed {event.job.seed}: {event.result.status}, {event.result.steps} steps")
        elif event.kind in ("retry", "stopped"):
            self.console.print(event.text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False)
        table.add_column("task")
        table.add_column("success", justify="right")
        table.add_column("last thought", style="dim", no_wrap=True)
        for task in self.tasks[:ROWS]:
            done, good = self.done[task], self.good[task]
            colour = "" if not done else "green" if good * 2 > done else "yellow" if good else "red"
            table.add_row(task, Text(f"{good}/{done}", style=colour), self.last.get(task, ""))
        if len(self.tasks) > ROWS:
            table.add_row(f"and {len(self.tasks) - ROWS} more", "", "")
        seconds = max(time.monotonic() - self.began, 1e-9)
        ended = sum(self.done.values()) + self.infra
        total = (
            f"{ended}/{self.episodes} episodes, {sum(self.good.values())} solved, "
            f"{self.steps / seconds:.1f} actions/s, {self.tokens / seconds:.0f} tokens/s, {seconds:.0f} s"
        )
        return Group(table, Text(total, style="bold"))


def print_summary(console: Console, summary: RunSummary) -> None:
    table = Table(title="Success by task", title_justify="left")
    for name in ("task", "n", "success", "95 % interval", "steps", "infra"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for name, score in sorted(summary.tasks.items(), key=lambda item: -item[1].rate):
        interval = f"{100 * score.low:.0f}-{100 * score.high:.0f} %" if score.n else "-"
        rate = f"{100 * score.rate:.0f} %" if score.n else "-"
        table.add_row(name, str(score.n), rate, interval, f"{score.mean_steps:.1f}", str(score.infra_errors))
    console.print(table)
    speed = summary.speed
    first = "-" if speed.first_action_s is None else f"{speed.first_action_s:.1f} s"
    console.print(
        f"mean success {100 * summary.mean_rate:.1f} %   {speed.actions_per_s:.1f} actions/s   "
        f"{speed.tokens_per_s:.0f} tokens/s   first action {first}   {speed.seconds:.0f} s in all",
        highlight=False,
    )
    if summary.state_bytes_step_1:
        console.print(
            f"recurrent state per session: {summary.state_bytes_step_1:,} bytes at step 1, "
            f"{summary.state_bytes_max_step:,} at step {summary.max_step}",
            highlight=False,
        )
