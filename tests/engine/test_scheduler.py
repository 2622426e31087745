"""The scheduler alone, on random loads: everything ends, nothing is held twice, limits are kept."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holotron.engine import SamplingParams
from holotron.engine.pages import OutOfPages, PagePool
from holotron.engine.scheduler import Scheduler
from holotron.engine.sequence import Sequence
from holotron.engine.vocabulary import Vocabulary
from tests.engine.tiny import tiny_tokenizer

PAGE = 8
VOCABULARY = Vocabulary(tiny_tokenizer(), len(tiny_tokenizer()))


@dataclass(frozen=True)
class Load:
    prompt: int
    output: int
    arrives: int
    user: str
    priority: int
    border: int


LOADS = st.lists(
    st.builds(
        Load,
        prompt=st.integers(1, 60),
        output=st.integers(1, 30),
        arrives=st.integers(0, 20),
        user=st.sampled_from("abc"),
        priority=st.integers(0, 1),
        border=st.integers(0, 60),
    ),
    min_size=1,
    max_size=12,
)


def sequence(number: int, load: Load) -> Sequence:
    made = Sequence(
        request_id=f"r{number}",
        prompt=[number % 200] * load.prompt,
        images=[],
        params=SamplingParams(max_tokens=load.output, ignore_eos=True),
        vocabulary=VOCABULARY,
        constraint=None,
        generator=torch.Generator(),
        max_tokens=load.output,
        user=load.user,
        priority=load.priority,
    )
    made.digest = number
    return made


@settings(max_examples=150, deadline=None)
@given(loads=LOADS, slots=st.integers(1, 4), spare=st.integers(0, 12), step_tokens=st.integers(1, 50))
def test_random_loads(loads: list[Load], slots: int, spare: int, step_tokens: int) -> None:
    longest = max(load.prompt + load.output for load in loads)
    pages = PagePool(-(-(longest + 1) // PAGE) + spare, PAGE)
    scheduler = Scheduler(pages, slots, step_tokens)
    sequences = [sequence(i, load) for i, load in enumerate(loads)]
    borders = {s.request_id: load.border for s, load in zip(sequences, loads, strict=True)}
    done: list[Sequence] = []

    def start(admitted: Sequence) -> None:
        admitted.borders = [borders[admitted.request_id]]

    for step in range(5000):
        for s, load in zip(sequences, loads, strict=True):
            if load.arrives == step:
                scheduler.add(s)
        scheduler.admit(start, lambda: False)
        planned = scheduler.plan(lambda: False)
        check(scheduler, planned, step_tokens)
        for s, count in planned:
            s.seen += count
            if not s.pending:
                s.append(7, 0.0, None)
                if s.finish_reason is not None:
                    scheduler.leave(s)
                    done.append(s)
        pages.check([s.pages for s in scheduler.running])
        if len(done) == len(sequences):
            break
    assert sorted(s.request_id for s in done) == sorted(s.request_id for s in sequences)
    assert all(len(s.output) == load.output for s, load in zip(sequences, loads, strict=True))
    assert pages.free == pages.pages and sorted(scheduler.free_slots) == list(range(slots))


def check(scheduler: Scheduler, planned: list[tuple[Sequence, int]], step_tokens: int) -> None:
    running = scheduler.running
    assert len({s.slot for s in running}) == len(running) and None not in {s.slot for s in running}
    assert not {s.request_id for s in running} & {s.request_id for s in scheduler.waiting}
    counts = [count for _, count in planned]
    assert counts == sorted(counts, key=lambda count: count > 1) and all(counts)
    answering = sum(count for s, count in planned if s.answering)
    assert sum(counts) <= max(step_tokens, answering, 1)
    for s, count in planned:
        assert s in running and len(s.pages) * PAGE >= s.seen + count
        assert count <= s.pending
        if not s.answering:
            assert not any(s.seen < border < s.seen + count for border in s.borders)
    assert planned or not running


def test_a_prompt_beyond_the_pool() -> None:
    scheduler = Scheduler(PagePool(2, PAGE), 1, 64)
    scheduler.add(sequence(0, Load(40, 1, 0, "a", 0, 0)))
    with pytest.raises(OutOfPages, match="more keys and values than the whole pool"):
        scheduler.admit(lambda s: None, lambda: False)


def test_users_take_turns() -> None:
    """Tokens count, not requests: who sent long prompts waits longer."""
    scheduler = Scheduler(PagePool(100, PAGE), 1, 1000)
    loads = [*(Load(50, 1, 0, "long", 0, 0) for _ in range(4)), *(Load(5, 1, 0, "short", 0, 0) for _ in range(4))]
    waiting = [sequence(i, load) for i, load in enumerate(loads)]
    for s in waiting:
        scheduler.add(s)
    order = []
    while scheduler.waiting:
        (admitted,) = scheduler.admit(lambda s: None, lambda: False)
        for s, count in scheduler.plan(lambda: False):
            s.seen += count
        order.append(admitted.user)
        scheduler.leave(admitted)
    assert order == ["long", *["short"] * 4, *["long"] * 3]


def test_snapshots_make_room() -> None:
    pages = PagePool(6, PAGE)
    held = [pages.allocate(3), pages.allocate(3)]

    def drop() -> bool:
        if not held:
            return False
        pages.release(held.pop())
        return True

    scheduler = Scheduler(pages, 1, 64)
    scheduler.add(sequence(0, Load(20, 2, 0, "a", 0, 0)))
    assert len(scheduler.admit(lambda s: None, drop)) == 1
    assert len(held) == 1
