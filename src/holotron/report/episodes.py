"""Episodes and steps as a page shows them: words instead of records, images inlined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holotron.agent.records import INFRA, RunInfo, StepRecord
from holotron.agent.trajectory import (
    Episode,
    TrajectoryError,
    episode_folder,
    episode_folders,
    read_episode,
    read_info,
)
from holotron.report.frames import SMALL_WIDTH, Frame, read_frame, width_limit
from holotron.report.marker import Marker, Point, marker_of
from holotron.report.readable import bytes_text, number_text, seconds_text, tool_call_text

# In the order in which a reader wants them.
VERDICTS = {
    "failure": "failure",
    "infrastructure": "infra error",
    "unfinished": "unfinished",
    "unchecked": "not checked",
    "success": "success",
}
ENDINGS = {
    "failure": "the task’s check says it was not done",
    "done": "answered; nothing here can check the answer",
    "step_limit": "step limit reached",
    "time_limit": "time limit reached",
    "stuck": "repeated one action on unchanged pixels, after every warning",
    "contract_error": "the model’s output stayed unusable",
    "infra_error": "infrastructure failed, which says nothing about the model",
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """An episode of a run with the name that its folder stands for."""

    task: str
    seed: int
    episode: Episode

    @property
    def outcome(self) -> str:
        """A key of VERDICTS. Only success and failure are scored."""
        result = self.episode.result
        if result is None:
            return "unfinished"
        if result.status == INFRA:
            return "infrastructure"
        if result.success or result.status == "success":
            return "success"
        return "unchecked" if result.status == "done" and result.success is None else "failure"

    @property
    def goal(self) -> str:
        result, steps = self.episode.result, self.episode.steps
        return (result.goal if result else "") or (steps[0].goal if steps else "")


@dataclass(frozen=True, slots=True)
class StepView:
    number: int
    frame: Frame
    alt: str
    css_width: float
    css_height: float
    marker: Marker | None
    observation: str
    note: str
    thought: str
    action: str
    outcome: str
    error: str
    raw: str
    seconds: str
    usage: str


@dataclass(frozen=True, slots=True)
class EpisodeView:
    anchor: str
    task: str
    seed: int
    goal: str
    outcome: str
    verdict: str
    reason: str
    answer: str
    seconds: str
    steps: tuple[StepView, ...]


def read_recorded(run_dir: Path) -> tuple[RunInfo, list[Recorded], list[str]]:
    """The run, its episodes by task and seed, and a sentence for each episode that could not be read.

    One damaged episode must not hide the others. Raises TrajectoryError if `run_dir` is no run folder.
    """
    info = read_info(run_dir)
    planned = {episode_folder(run_dir, task, seed): (task, seed) for task, seed in info.jobs}
    found, problems = [], []
    for folder in episode_folders(run_dir):
        try:
            episode = read_episode(folder)
        except TrajectoryError as error:
            problems.append(f"Episode {folder.name} is left out: {error}")
            continue
        found.append(Recorded(*_name(episode, planned), episode))
    return info, sorted(found, key=lambda one: (one.task, one.seed)), problems


def _name(episode: Episode, planned: dict[Path, tuple[str, int]]) -> tuple[str, int]:
    if episode.result is not None:
        return episode.result.task, episode.result.seed
    if episode.folder in planned:
        return planned[episode.folder]
    task, _, seed = episode.folder.name.rpartition("-")
    return (task, int(seed)) if task and seed.isdecimal() else (episode.folder.name, 0)


def short_name(model: str) -> str:
    """The last part of a path or address, which says enough in a title."""
    return model.rstrip("/").rpartition("/")[2] or model


def failures_first(recorded: Iterable[Recorded]) -> list[Recorded]:
    order = list(VERDICTS)
    return sorted(recorded, key=lambda one: (order.index(one.outcome), one.task, one.seed))


def episode_views(recorded: Sequence[Recorded]) -> list[EpisodeView]:
    steps = [step for one in recorded for step in one.episode.steps]
    limit = width_limit(sum(step.width > SMALL_WIDTH for step in steps))
    return [_episode_view(one, number, limit) for number, one in enumerate(recorded)]


def _episode_view(one: Recorded, number: int, limit: int) -> EpisodeView:
    result = one.episode.result
    views, cursor = [], None
    for step in one.episode.steps:
        views.append(_step_view(one, step, cursor, limit))
        cursor = step.point or cursor
    return EpisodeView(
        anchor=f"episode-{number}",
        task=one.task,
        seed=one.seed,
        goal=one.goal,
        outcome=one.outcome,
        verdict=VERDICTS[one.outcome],
        reason=_reason(one),
        answer=(result.answer or "") if result else "",
        seconds=seconds_text(result.seconds) if result else "",
        steps=tuple(views),
    )


def _reason(one: Recorded) -> str:
    result = one.episode.result
    if result is None:
        torn = "; its last line was cut off and is not shown" if one.episode.torn else ""
        return f"the run stopped before this episode did{torn}"
    parts = [ENDINGS.get(result.status, "")]
    if result.error:
        parts.append(result.error)
    if result.reward or one.outcome == "failure":
        parts.append(f"raw reward {number_text(result.reward, 2)}")
    if result.infra_failures:
        parts.append(f"{result.infra_failures} earlier attempt(s) lost to infrastructure")
    return "; ".join(part for part in parts if part)


def _step_view(one: Recorded, step: StepRecord, cursor: Point | None, limit: int) -> StepView:
    call = step.step.tool_call.model_dump() if step.step else {}
    marker = marker_of(call, step.point, cursor, step.css_width)
    name = f"step {step.index + 1} of {one.task}, seed {one.seed}"
    where = f", marked at ({step.point[0]:.0f}, {step.point[1]:.0f})" if step.point else ""
    return StepView(
        number=step.index + 1,
        frame=read_frame(one.episode.folder / Path(step.screenshot).name, limit),
        alt=f"Screen before {name}{where}",
        css_width=step.css_width,
        css_height=step.css_height,
        marker=marker,
        observation=step.observation,
        note=(step.step.note or "") if step.step else "",
        thought=step.step.thought if step.step else "",
        action=tool_call_text(call) if call else "",
        outcome="" if step.error else step.outcome,
        error=step.outcome if step.error else "",
        raw=(step.raw_text or "") if step.step is None or step.attempts > 1 else "",
        seconds=seconds_text(step.screenshot_s + step.decide_s + step.act_s),
        usage=_usage(step),
    )


def _usage(step: StepRecord) -> str:
    parts = [f"decide {seconds_text(step.decide_s)}, act {seconds_text(step.act_s)}"]
    if step.prompt_tokens:
        cached = f", {number_text(step.cached_tokens)} cached" if step.cached_tokens else ""
        parts.append(
            f"{number_text(step.prompt_tokens)} prompt ({number_text(step.image_tokens)} image{cached})"
            f" + {number_text(step.output_tokens)} output tokens"
        )
    if step.state_bytes or step.kv_bytes:
        parts.append(f"state {bytes_text(step.state_bytes)}, KV {bytes_text(step.kv_bytes)}")
    if step.attempts > 1:
        parts.append(f"{step.attempts} attempts")
    return " · ".join(parts)
