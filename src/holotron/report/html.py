"""One static HTML page for a run: opens offline, asks for nothing over the network, runs only our script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from holotron.agent.records import RunInfo
from holotron.agent.summary import RunSummary, read_summary
from holotron.agent.trajectory import TrajectoryError, write_atomically
from holotron.report.episodes import (
    VERDICTS,
    EpisodeView,
    Recorded,
    episode_views,
    failures_first,
    read_recorded,
    short_name,
)
from holotron.report.plots import latency_histogram, memory_by_step, success_bars
from holotron.report.success import Success, success_of
from holotron.report.throughput import Throughput, throughput_of

MOST_BARS = 60  # more tasks than this are read in the table


@dataclass(frozen=True, slots=True)
class Plots:
    """SVG markup of our own making; empty where there is nothing to draw."""

    success: Markup
    latency: Markup
    memory: Markup


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    notices: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    success: Success
    throughput: tuple[tuple[str, str], ...]
    plots: Plots
    outcomes: tuple[tuple[str, str, int], ...]  # key, words, count
    episodes: tuple[EpisodeView, ...]
    details: str


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run, finished or not, to `out` (RUN/report.html by default) and return its path.

    Raises TrajectoryError if `run_dir` is no run folder, OSError if `out` cannot be written.
    """
    out = out or run_dir / "report.html"
    page = _page(_report(run_dir))
    out.parent.mkdir(parents=True, exist_ok=True)
    # Text of a model may hold half a surrogate pair, which UTF-8 cannot carry.
    write_atomically(out, page.encode("utf-8", "replace"))
    return out


def _report(run_dir: Path) -> Report:
    info, recorded, problems = read_recorded(run_dir)
    success = success_of(recorded)
    throughput = throughput_of(info, [one.episode for one in recorded], _summary(run_dir))
    counts = {name: sum(one.outcome == name for one in recorded) for name in VERDICTS}
    return Report(
        title=f"{short_name(info.model)} on {_tasks_text(info, recorded)}",
        notices=(*_unfinished(info, recorded), *problems),
        facts=tuple(_facts(info)),
        success=success,
        throughput=tuple(throughput.facts()) if throughput else (),
        plots=_plots(success, throughput),
        outcomes=tuple((name, VERDICTS[name], count) for name, count in counts.items() if count),
        episodes=tuple(episode_views(failures_first(recorded))),
        details=json.dumps(info.model_dump(mode="json"), indent=1, ensure_ascii=False),
    )


def _summary(run_dir: Path) -> RunSummary | None:
    try:
        return read_summary(run_dir)
    except TrajectoryError:
        return None  # everything in it can be worked out from the steps


def _page(report: Report) -> str:
    environment = Environment(
        loader=PackageLoader("holotron.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        auto_reload=False,
    )
    css, script = (environment.get_template(name).render() for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # A second lock behind the escaping: no script but ours runs, nothing is fetched from anywhere.
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    template = environment.get_template("report.html.jinja")
    return template.render(report=report, css=Markup(css), script=Markup(script), policy=policy)


def _plots(success: Success, throughput: Throughput | None) -> Plots:
    bars = success.bars()
    bar_plot = success_bars(bars) if 1 < len(bars) <= MOST_BARS else ""
    if throughput is None:
        return Plots(Markup(bar_plot), Markup(), Markup())
    state, kv = throughput.state_by_step, throughput.kv_by_step
    return Plots(
        Markup(bar_plot),
        Markup(latency_histogram(throughput.step_s)),
        Markup(memory_by_step(state, kv) if state or kv else ""),
    )


def _when(started_at: str) -> str:
    try:
        return f"{datetime.fromisoformat(started_at).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return started_at


def _tasks_text(info: RunInfo, recorded: Sequence[Recorded]) -> str:
    tasks = sorted({task for task, _ in info.jobs} | {one.task for one in recorded})
    return tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"


def _unfinished(info: RunInfo, recorded: Sequence[Recorded]) -> list[str]:
    finished = sum(one.episode.finished for one in recorded)
    planned = max(len(info.jobs), len(recorded))
    if finished == planned:
        return []
    return [f"This run is not finished: {finished} of {planned} planned episodes ended."]


def _facts(info: RunInfo) -> Iterable[tuple[str, str]]:
    seeds = sorted({seed for _, seed in info.jobs})
    rows = [
        ("Model", info.model),
        ("Policy", info.policy),
        ("Contract", f"{info.contract}, prompt {info.prompt_hash[:12]}"),
        ("Browser", info.browser),
        ("Machine", info.machine),
        ("Started", _when(info.started_at)),
        ("Workers", str(info.workers)),
        ("Tasks", str(len({task for task, _ in info.jobs}) or "")),
        ("Seeds", ranges_text(seeds)),
        ("Limits", _mapping_text(info.limits)),
        ("Settings", _mapping_text(info.settings)),
        ("Versions", _mapping_text(info.versions)),
    ]
    return ((name, value) for name, value in rows if value)


def _mapping_text(values: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in values.items() if value != "")


def _plain(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending whole numbers with runs drawn together: 0–2, 7, 9–10."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
