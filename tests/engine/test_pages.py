from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holotron.engine.errors import EngineError
from holotron.engine.pages import OutOfPages, PagePool


class OwnersOfPages(RuleBasedStateMachine):
    """Owners are lists of pages; the pool must count exactly what they hold."""

    @initialize(pages=st.integers(0, 12))
    def begin(self, pages: int) -> None:
        self.pool = PagePool(pages, 16)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        held = {page for owner in self.owners for page in owner}
        if count > self.pool.pages - len(held):
            with pytest.raises(OutOfPages, match=f"{count} pages were asked for, {self.pool.free} of"):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count and not held & set(taken)
        self.owners.append(taken)

    @rule(choice=st.randoms(use_true_random=False), part=st.integers(0, 5))
    def share(self, choice: random.Random, part: int) -> None:
        if self.owners:
            pages = choice.choice(self.owners)[:part]
            self.pool.share(pages)
            self.owners.append(list(pages))

    @rule(choice=st.randoms(use_true_random=False))
    def release(self, choice: random.Random) -> None:
        if self.owners:
            self.pool.release(self.owners.pop(choice.randrange(len(self.owners))))

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.owners)
            held = [page for owner in self.owners for page in owner]
            assert self.pool.free == self.pool.pages - len(set(held))
            assert all(self.pool.references(page) == held.count(page) for page in range(self.pool.pages))


TestOwnersOfPages = OwnersOfPages.TestCase
TestOwnersOfPages.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_pages_for_tokens_round_up() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_a_page_is_free_only_when_all_have_released_it() -> None:
    pool = PagePool(2, 16)
    page = pool.allocate(1)
    pool.share(page)
    pool.release(page)
    assert (pool.free, pool.references(page[0])) == (1, 1)
    pool.release(page)
    assert pool.free == 2
    with pytest.raises(EngineError, match=f"page {page[0]} is free already"):
        pool.release(page)
    with pytest.raises(EngineError, match=f"page {page[0]} is free and cannot be shared"):
        pool.share(page)
    for stranger in (-1, 2):
        with pytest.raises(EngineError, match=f"page {stranger} does not exist"):
            pool.release([stranger])


def test_the_check_names_the_pages() -> None:
    pool = PagePool(20, 16)
    first, second = pool.allocate(1), pool.allocate(12)
    with pytest.raises(EngineError, match=f"page {first[0]}: 1 counted, 0 held$"):  # a leak
        pool.check([second])
    with pytest.raises(EngineError, match=f"page {first[0]}: 1 counted, 2 held$"):  # used without a reference
        pool.check([second, first, first])
    with pytest.raises(EngineError, match="0 held, and 4 more"):
        pool.check([first])
    pool.check([first, second])
    pool._free.append(first[0])
    with pytest.raises(EngineError, match="free list"):
        pool.check([first, second])


def test_impossible_pools_are_refused() -> None:
    for pages, page_tokens in ((-1, 16), (4, 0)):
        with pytest.raises(ValueError):
            PagePool(pages, page_tokens)
