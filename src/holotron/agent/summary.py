"""What a run comes to: success by task with intervals, speed, and memory per session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, median

from pydantic import Field, ValidationError

from holotron.agent.records import INFRA, EpisodeResult, Record, StepRecord
from holotron.agent.trajectory import Episode, TrajectoryError, write_atomically

Z_95 = 1.959963984540054


class Score(Record):
    """Successes of the `n` episodes that say something about the model; `infra_errors` and `unchecked` are not
    among them, the latter being episodes that ended by an answer nothing here can check.

    `low`, `high`: Wilson 95 % interval of `rate`. `raw_positive` counts raw rewards above zero.
    """

    n: int
    successes: int
    rate: float
    low: float
    high: float
    raw_positive: int
    infra_errors: int
    unchecked: int = 0
    mean_steps: float
    statuses: dict[str, int] = Field(default_factory=dict)


class Session(Record):
    """Speed of one session of a run, over its own steps and wall time (seconds, all workers together).

    `first_action_s` is the time from the start of the session to the end of its first action.
    """

    seconds: float
    actions: int
    actions_per_s: float
    tokens_per_s: float  # prompt and output
    output_tokens_per_s: float
    first_action_s: float | None = None
    workers: int = 1


class RunSummary(Record):
    """`mean_rate` is the mean over tasks of their success rates. State bytes are the largest over sessions.

    `speed` is that of the last session: a resumed run is timed from its resumption.
    """

    total: Score
    mean_rate: float
    tasks: dict[str, Score]
    speed: Session
    state_bytes_step_1: int
    state_bytes_max_step: int
    kv_bytes_step_1: int
    kv_bytes_max_step: int
    max_step: int  # counted from 1
    decide_s_median: float
    unfinished: int = 0
    interrupted: bool = False


def wilson(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (E. B. Wilson, JASA 22, 1927). (0, 1) where n is 0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    # At the two ends the bound is exactly 0 or 1; rounding must not say otherwise.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def score(results: Sequence[EpisodeResult]) -> Score:
    sound = [result for result in results if result.status != INFRA]
    counted = [result for result in sound if result.status != "done"]
    successes = sum(bool(result.success) for result in counted)
    low, high = wilson(successes, len(counted))
    return Score(
        n=len(counted),
        successes=successes,
        rate=successes / len(counted) if counted else 0.0,
        low=low,
        high=high,
        raw_positive=sum(result.reward > 0 for result in counted),
        infra_errors=len(results) - len(sound),
        unchecked=len(sound) - len(counted),
        mean_steps=fmean(result.steps for result in sound) if sound else 0.0,
        statuses=dict(Counter(result.status for result in results)),
    )


def session(records: Sequence[StepRecord], seconds: float, first_action_s: float | None, workers: int) -> Session:
    actions = sum(record.step is not None for record in records)
    output = sum(record.output_tokens for record in records)
    tokens = output + sum(record.prompt_tokens for record in records)
    rate = 1 / seconds if seconds > 0 else 0.0
    return Session(
        seconds=seconds, actions=actions, actions_per_s=actions * rate, tokens_per_s=tokens * rate,
        output_tokens_per_s=output * rate, first_action_s=first_action_s, workers=workers,
    )  # fmt: skip


def summarize(episodes: Iterable[Episode], speed: Session, interrupted: bool = False) -> RunSummary:
    """Sum up the episodes of a run; unfinished ones are only counted as such."""
    episodes = list(episodes)
    by_task: dict[str, list[EpisodeResult]] = {}
    for episode in episodes:
        if episode.result is not None:
            by_task.setdefault(episode.result.task, []).append(episode.result)
    tasks = {task: score(results) for task, results in by_task.items()}
    scored = [task.rate for task in tasks.values() if task.n]
    records = [record for episode in episodes for record in episode.steps]
    last = max((record.index for record in records), default=0)
    return RunSummary(
        total=score([result for results in by_task.values() for result in results]),
        mean_rate=fmean(scored) if scored else 0.0,
        tasks=tasks,
        speed=speed,
        state_bytes_step_1=_largest(records, "state_bytes", 0),
        state_bytes_max_step=_largest(records, "state_bytes", last),
        kv_bytes_step_1=_largest(records, "kv_bytes", 0),
        kv_bytes_max_step=_largest(records, "kv_bytes", last),
        max_step=last + 1 if records else 0,
        decide_s_median=median(record.decide_s for record in records) if records else 0.0,
        unfinished=sum(not episode.finished for episode in episodes),
        interrupted=interrupted,
    )


def _largest(records: Iterable[StepRecord], name: str, index: int) -> int:
    return max((getattr(record, name) for record in records if record.index == index), default=0)


def write_summary(run_dir: Path, summary: RunSummary) -> None:
    """Raises TrajectoryError."""
    try:
        write_atomically(run_dir / "summary.json", summary.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise TrajectoryError(
            f"could not write {run_dir / 'summary.json'}: {error.strerror or error}. All episodes are kept; "
            "make room and resume the run to have it written."
        ) from error


def read_summary(run_dir: Path) -> RunSummary | None:
    """The summary of a run; None if there is none yet. Raises TrajectoryError if it is damaged."""
    path = run_dir / "summary.json"
    try:
        return RunSummary.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise TrajectoryError(f"{path} cannot be read: {error}") from error
