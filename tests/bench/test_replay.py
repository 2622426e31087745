"""The closed loop against an engine that is a few lines here: order, forced lengths, limits, and the sums by hand."""

from __future__ import annotations

import asyncio
import time
from itertools import islice

import pytest

from holotron.bench.replay import Answer, Replay, Request, Served, percentile, plan, replay, summarize


def request(trace: int, turn: int, *, prompt: int = 3, think_s: float = 0.0) -> Request:
    return Request(trace, turn, list(range(prompt)), [], [], 2, think_s)


def traces(count: int, turns: int) -> list[list[Request]]:
    return [[request(trace, turn) for turn in range(turns)] for trace in range(count)]


def test_users_start_apart_and_then_meet_fresh_traces() -> None:
    made = traces(9, 4)
    played = [[(r.trace, r.turn) for r in islice(plan(made, user, 3), 9)] for user in range(3)]
    assert [steps[0] for steps in played] == [(0, 0), (1, 1), (2, 2)]
    assert played[1] == [(1, 1), (1, 2), (1, 3), (4, 0), (4, 1), (4, 2), (4, 3), (7, 0), (7, 1)]
    every = [step for steps in played for step in steps]
    assert len(set(every)) == len(every), "nobody plays what another has played"


async def test_each_user_waits_for_its_reply() -> None:
    busy: dict[int, int] = {}
    seen: list[tuple[int, int]] = []

    async def ask(request: Request) -> Answer:
        busy[request.trace] = busy.get(request.trace, 0) + 1
        assert busy[request.trace] == 1, "a user has one request at a time"
        seen.append((request.trace, request.turn))
        await asyncio.sleep(0.001 * (request.trace + 1))
        busy[request.trace] -= 1
        return Answer(request.output_tokens, time.perf_counter())

    made = traces(2, 5)
    run = await replay(ask, [iter(trace) for trace in made], 4)
    assert len(run.steps) == 8
    for trace in range(2):
        assert [turn for t, turn in seen if t == trace] == [0, 1, 2, 3]
    assert not run.cut_short


async def test_the_drain_is_left_out() -> None:
    async def ask(request: Request) -> Answer:
        await asyncio.sleep(0.005 if request.trace == 0 else 0.05)
        return Answer(2, time.perf_counter())

    run = await replay(ask, [iter(trace) for trace in traces(2, 4)], 4)
    found = summarize(run)
    assert len(run.steps) == 8
    assert 4 <= found["steps"] < 8, "the quick user's four, and what the slow one did meanwhile"
    assert found["seconds"] == pytest.approx(max(s.done for s in run.steps if s.user == 0), abs=0.02)


async def test_a_limit_ends_it_and_cancels() -> None:
    cancelled = 0

    async def ask(request: Request) -> Answer:
        nonlocal cancelled
        try:
            await asyncio.sleep(0.02 if request.turn == 0 else 60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return Answer(2, time.perf_counter())

    run = await replay(ask, [iter(trace) for trace in traces(3, 4)], 4, limit_s=0.3)
    assert run.cut_short and cancelled == 3
    assert len(run.steps) == 3 and run.ended >= 0.3


async def test_think_time_is_recorded_or_given() -> None:
    async def ask(request: Request) -> Answer:
        return Answer(2, time.perf_counter())

    thoughtful = [request(0, turn, think_s=0.03) for turn in range(3)]
    for think, least, most in ((None, 0.09, 1.0), (0.0, 0.0, 0.02)):
        run = await replay(ask, [iter(thoughtful)], 3, think=think)
        assert least <= run.ended < most


async def test_an_engine_that_fails_fails_the_replay() -> None:
    async def ask(request: Request) -> Answer:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        await replay(ask, [iter(traces(1, 2)[0])], 2)


def test_sums_by_hand() -> None:
    def served(user: int, sent: float, first: float, done: float, cached: int, tiles: int) -> Served:
        return Served(user, request(0, 0, prompt=10), Answer(2, 0.0, cached, 9, tiles), sent, first, done)

    steps = [served(0, 0.0, 1.0, 2.0, 0, 9), served(1, 0.0, 1.5, 2.0, 5, 3), served(0, 2.0, 2.5, 4.0, 7, 0)]
    late = served(1, 2.0, 9.0, 9.0, 0, 9)
    found = summarize(Replay(2, [*steps, late], ended=4.0))
    assert found["steps"] == 3
    assert found["actions_per_s"] == 3 / 4
    assert found["output_tokens_per_s"] == 6 / 4
    assert found["total_tokens_per_s"] == 36 / 4
    assert found["ttft_p50_s"] == 1.0 and found["e2e_p50_s"] == 2.0
    assert found["prompt_computed_fraction"] == pytest.approx(18 / 30)
    assert (found["tiles_requested"], found["tiles_encoded"]) == (27, 12)
    assert summarize(Replay(2, [], ended=1.0))["steps"] == 0


def test_percentiles() -> None:
    assert percentile([4.0], 95) == 4.0
    assert percentile([0.0, 1.0, 2.0, 3.0], 50) == 1.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)


def test_placeholders_expand() -> None:
    found = Request(0, 0, [1, 7, 2, 7, 3], ["a", "b"], [2, 3], 1)
    assert found.expanded(7) == [1, 7, 7, 2, 7, 7, 7, 3]
    assert found.prompt_tokens == 8
