"""Decoding, cutting and tokenising beside the event loop, in a few threads with a bounded queue before them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from holotron.serving.server.errors import overloaded

T = TypeVar("T")


class Preprocessing:
    """`depth` is how many pieces of work wait or run."""

    def __init__(self, threads: int, limit: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="holotron-preprocess")
        self._limit = limit
        self._lock = threading.Lock()
        self._depth = 0

    @property
    def depth(self) -> int:
        return self._depth

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done in a thread. Raises what it raises, ApiError 429 where the queue is full."""
        with self._lock:
            if self._depth >= self._limit:
                raise overloaded(f"{self._limit} requests wait to be read; try again soon")
            self._depth += 1
        future = self._pool.submit(_guarded, work)
        future.add_done_callback(self._finished)  # also where it was cancelled before it began
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _finished(self, _: Future[T]) -> None:
        with self._lock:
            self._depth -= 1


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # how code in Rust says that it met something unforeseen
            raise ValueError(f"the request cannot be read: {error}") from None
        raise
