"""How fast a run went and what a session held in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from holotron.agent.records import RunInfo, StepRecord
from holotron.agent.summary import RunSummary, Session, session
from holotron.agent.trajectory import Episode
from holotron.report.readable import bytes_text, number_text, seconds_text

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Times are seconds, sizes bytes. Means over sessions (episodes); None where a run cannot know."""

    speed: Session
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    image_tokens: int
    state_first: float | None
    state_last: float | None
    kv_first: float | None
    kv_last: float | None
    step_s: tuple[float, ...]
    state_by_step: tuple[tuple[int, float], ...]
    kv_by_step: tuple[tuple[int, float], ...]

    def facts(self) -> list[tuple[str, str]]:
        """Names and values for a person. What the policy did not report is left out."""
        speed = self.speed
        rows = [
            ("Actions per second", number_text(speed.actions_per_s, 2)),
            ("Actions", number_text(speed.actions)),
            ("Time", seconds_text(speed.seconds)),
            ("First action after", seconds_text(speed.first_action_s)),
            ("Workers", number_text(speed.workers)),
        ]
        if self.prompt_tokens or self.output_tokens:
            rows += [
                ("Tokens per second", number_text(speed.tokens_per_s)),
                ("Output tokens per second", number_text(speed.output_tokens_per_s)),
                ("Prompt tokens", number_text(self.prompt_tokens)),
                ("of these cached", number_text(self.cached_tokens)),
                ("of these image tokens", number_text(self.image_tokens)),
                ("Output tokens", number_text(self.output_tokens)),
            ]
        if self.state_first:
            rows += [
                ("State per session, step 1", bytes_text(self.state_first)),
                ("State per session, last step", bytes_text(self.state_last)),
            ]
        if self.kv_first:
            rows += [
                ("KV per session, step 1", bytes_text(self.kv_first)),
                ("KV per session, last step", bytes_text(self.kv_last)),
            ]
        return rows


def throughput_of(info: RunInfo, episodes: Sequence[Episode], summary: RunSummary | None) -> Throughput | None:
    """None if no step was recorded. Speed: the summary's, else worked out of the steps."""
    steps = [step for episode in episodes for step in episode.steps]
    if not steps:
        return None
    state = [[step.state_bytes for step in e.steps] for e in episodes if any(s.state_bytes for s in e.steps)]
    kv = [[step.kv_bytes for step in e.steps] for e in episodes if any(s.kv_bytes for s in e.steps)]
    return Throughput(
        speed=summary.speed if summary and summary.speed.actions else _speed(info, episodes),
        prompt_tokens=sum(step.prompt_tokens for step in steps),
        cached_tokens=sum(step.cached_tokens for step in steps),
        output_tokens=sum(step.output_tokens for step in steps),
        image_tokens=sum(step.image_tokens for step in steps),
        state_first=_mean(row[0] for row in state),
        state_last=_mean(row[-1] for row in state),
        kv_first=_mean(row[0] for row in kv),
        kv_last=_mean(row[-1] for row in kv),
        step_s=tuple(_duration(step) for step in steps),
        state_by_step=_mean_by_step(state),
        kv_by_step=_mean_by_step(kv),
    )


def _speed(info: RunInfo, episodes: Sequence[Episode]) -> Session:
    """Over the time in which an episode was running, so that a gap before a resumption does not count."""
    steps = [step for episode in episodes for step in episode.steps]
    seconds = _covered(span for episode in episodes for span in _spans(episode))
    return session(steps, seconds, _first_action(info, steps), info.workers)


def _duration(step: StepRecord) -> float:
    return step.screenshot_s + step.decide_s + step.act_s


def _spans(episode: Episode) -> list[Interval]:
    spans = [(step.at - _duration(step), step.at) for step in episode.steps if step.at]
    if episode.result and episode.result.ended_at:
        spans.append((episode.result.ended_at - episode.result.seconds, episode.result.ended_at))
    return spans


def _covered(spans: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _first_action(info: RunInfo, steps: Sequence[StepRecord]) -> float | None:
    times = [step.at for step in steps if step.at and step.step is not None]
    try:
        started = datetime.fromisoformat(info.started_at).timestamp()
    except ValueError:
        return None
    return max(0.0, min(times) - started) if times else None


def _mean(values: Iterable[float]) -> float | None:
    held = list(values)
    return sum(held) / len(held) if held else None


def _mean_by_step(rows: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    """Mean over the sessions that reached a step, steps counted from 1."""
    longest = max((len(row) for row in rows), default=0)
    columns = ([row[index] for row in rows if index < len(row)] for index in range(longest))
    return tuple((number, sum(held) / len(held)) for number, held in enumerate(columns, start=1))
