"""Closed-loop load: every user sends a step, waits for the whole reply, thinks, and sends the next with the recorded
reply in its history.

The standard library only, so that a peer in an environment of its own drives its engine with the very same code.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One step of one trace. `token_ids` hold one placeholder for each of `images` (PNG files), which become
    `image_tokens` tokens each. The reply has exactly `output_tokens` tokens, whatever the model says."""

    trace: int
    turn: int
    token_ids: list[int]
    images: list[str]
    image_tokens: list[int]
    output_tokens: int
    think_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) + sum(self.image_tokens) - len(self.images)

    def expanded(self, placeholder: int) -> list[int]:
        """The ids with every placeholder repeated as often as its image has tokens."""
        counts = iter(self.image_tokens)
        return [i for token in self.token_ids for i in ([token] * next(counts) if token == placeholder else [token])]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine says of a finished request. `first` is time.perf_counter() at the first token; of the prompt's
    tokens `cached_tokens` were not computed, of the image tiles asked for `tiles_encoded` were."""

    output_tokens: int
    first: float
    cached_tokens: int = 0
    tiles_requested: int = 0
    tiles_encoded: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """One finished step; times are seconds since the replay began."""

    user: int
    request: Request
    answer: Answer
    sent: float
    first: float
    done: float


@dataclass(slots=True)
class Replay:
    """`steps` of the users in the order they ended; `ended` is when the first user had no more to do, or the limit."""

    users: int
    steps: list[Served] = field(default_factory=list)
    ended: float = 0.0
    cut_short: bool = False


Ask = Callable[[Request], Awaitable[Answer]]


def write_requests(path: Path, traces: Sequence[Sequence[Request]]) -> None:
    """One JSON line a request."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for request in (request for trace in traces for request in trace):
            file.write(json.dumps(asdict(request)) + "\n")


def read_requests(path: Path) -> list[list[Request]]:
    """What `write_requests` wrote: by trace, then turn."""
    traces: dict[int, list[Request]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            request = Request(**json.loads(line))
            traces.setdefault(request.trace, []).append(request)
    return [traces[number] for number in sorted(traces)]


def plan(traces: Sequence[Sequence[Request]], user: int, users: int) -> Iterator[Request]:
    """What a user asks for, without end: its own trace from the middle on, the users spread evenly over the turns, then
    whole traces that nobody has played before, as long as there are enough: every user needs one a round."""
    trace = user % len(traces)
    start = user * len(traces[trace]) // users
    while True:
        yield from traces[trace][start:]
        trace, start = (trace + users) % len(traces), 0


async def replay(
    ask: Ask,
    plans: Sequence[Iterator[Request]],
    steps: int,
    *,
    limit_s: float = float("inf"),
    think: float | None = 0.0,
    on_step: Callable[[], None] | None = None,
) -> Replay:
    """Every plan is a user who does `steps` steps. `think` seconds lie between a reply and the next step; None means
    what was recorded. When the limit is met what is in flight is cancelled. Raises what `ask` raises."""
    result = Replay(len(plans))
    began = time.perf_counter()
    finished: list[float] = []

    async def work(user: int, requests: Iterator[Request]) -> None:
        for request in islice(requests, steps):
            sent = time.perf_counter()
            answer = await ask(request)
            done = time.perf_counter()
            result.steps.append(Served(user, request, answer, sent - began, answer.first - began, done - began))
            if on_step is not None:
                on_step()
            pause = request.think_s if think is None else think
            if pause:
                await asyncio.sleep(pause)
        finished.append(time.perf_counter() - began)

    try:
        async with asyncio.timeout(None if limit_s == float("inf") else limit_s), asyncio.TaskGroup() as group:
            for user, requests in enumerate(plans):
                group.create_task(work(user, requests))
    except TimeoutError:
        result.cut_short = True
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    result.ended = min(finished, default=time.perf_counter() - began)
    return result


def summarize(run: Replay) -> dict[str, Any]:
    """Figures of the time in which all users were at work: steps that ended later (the drain) do not count.

    actions_per_s counts finished steps; times are seconds. TTFT and E2E run from sending a step, pictures and all.
    """
    steps = [s for s in run.steps if s.done <= run.ended]
    if not steps:
        return {"users": run.users, "steps": 0, "seconds": run.ended, "cut_short": run.cut_short}
    prompt = sum(s.request.prompt_tokens for s in steps)
    output = sum(s.answer.output_tokens for s in steps)
    cached = sum(s.answer.cached_tokens for s in steps)
    requested = sum(s.answer.tiles_requested for s in steps)
    first, whole = [s.first - s.sent for s in steps], [s.done - s.sent for s in steps]
    return {
        "users": run.users,
        "steps": len(steps),
        "seconds": run.ended,
        "cut_short": run.cut_short,
        "actions_per_s": len(steps) / run.ended,
        "output_tokens_per_s": output / run.ended,
        "total_tokens_per_s": (prompt + output) / run.ended,
        "ttft_p50_s": percentile(first, 50),
        "ttft_p95_s": percentile(first, 95),
        "e2e_p50_s": percentile(whole, 50),
        "e2e_p95_s": percentile(whole, 95),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": cached,
        "prompt_computed_fraction": 1 - cached / prompt,
        "images": sum(len(s.request.images) for s in steps),
        "tiles_requested": requested,
        "tiles_encoded": sum(s.answer.tiles_encoded for s in steps),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """By linear interpolation between the two nearest."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def shared_prefix(before: Sequence[int], after: Sequence[int]) -> int:
    """How many tokens two prompts have in common from the start."""
    for place, (a, b) in enumerate(zip(before, after, strict=False)):
        if a != b:
            return place
    return min(len(before), len(after))
