"""One engine for many concurrent callers: asyncio in front, one thread that owns the model behind."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Any, Self

from holotron.engine.errors import EngineError, RequestFailed
from holotron.engine.llm import LLM
from holotron.engine.outputs import RequestOutput
from holotron.engine.prompts import Message, Prompt
from holotron.engine.sampling_params import SamplingParams
from holotron.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class Generation:
    """One request under way. Leaving its context ends it, wherever it is: its place is free within one step.

    `arrivals` are (seconds of `time.perf_counter`, output tokens so far), one entry for each step that added some.
    Nobody has to keep up with it: the engine never waits for a reader.
    """

    def __init__(self, sequence: Sequence, cancel: Callable[[Sequence], None]) -> None:
        self.sequence = sequence
        self.arrivals: list[tuple[float, int]] = []
        self.loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._changed = asyncio.Event()
        self._outcome: asyncio.Future[RequestOutput | EngineError] = self.loop.create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Give the request up; does nothing to one that has ended."""
        self._outcome.cancel()
        self._cancel(self.sequence)

    async def result(self) -> RequestOutput:
        """What came of it. Raises EngineError, RequestFailed where the fault lies in this request alone."""
        outcome = await self._outcome
        if isinstance(outcome, EngineError):
            raise outcome
        if outcome.error is not None:
            raise RequestFailed(f"{outcome.request_id}: {outcome.error}")
        return outcome

    async def tokens(self) -> AsyncIterator[list[int]]:
        """The output's tokens as they come, each once, several at a time where several came. Raises as `result`."""
        seen = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            ended = self._outcome.done()
            # only what a completed step has left behind: within a step the output may hold guesses
            reached = self.arrivals[-1][1] if self.arrivals else 0
            if reached > seen:
                fresh, seen = self.sequence.output[seen:reached], reached
                yield fresh
            if ended:
                await self.result()
                return

    def advance(self, now: float) -> bool:
        """For the engine's thread, after a step: whether there are new tokens."""
        count = len(self.sequence.output)
        if count <= (self.arrivals[-1][1] if self.arrivals else 0):
            return False
        self.arrivals.append((now, count))
        return True

    def wake(self, outcome: RequestOutput | EngineError | None) -> None:
        """For the caller's event loop."""
        if outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)
        self._changed.set()


_News = list[tuple[Generation, RequestOutput | EngineError | None]]


class AsyncLLM:
    """Batches whatever its callers ask for at the same time. Cancelling a call frees its place at once.

    From an idle engine the first request waits `gather_s` seconds for company, so that agents that act in
    step share a prefill. A failed step fails all pending calls with EngineError; later calls start afresh.
    """

    def __init__(self, llm: LLM, *, gather_s: float = 0.002) -> None:
        self.llm = llm
        self._gather_s = gather_s
        self._wake = threading.Condition()
        self._arrived: list[Sequence] = []
        self._cancelled: list[str] = []
        self._under_way: dict[str, Generation] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="holotron-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Raises ValueError for a request that cannot be served, EngineError."""
        return await self._call(lambda: self.llm.prepare(prompt, params))

    async def chat(
        self,
        messages: Many[Message],
        params: SamplingParams | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> RequestOutput:
        """As `generate`, for OpenAI chat messages."""
        return await self._call(lambda: self.llm.prepare_chat(messages, params, chat_template_kwargs))

    def submit(self, sequence: Sequence) -> Generation:
        """Start a request that `LLM.prepare` or `prepare_chat` made. Raises EngineError when closed."""
        generation = Generation(sequence, self._drop)
        with self._wake:
            if self._closed:
                raise EngineError("the engine is closed")
            self._under_way[sequence.request_id] = generation
            self._arrived.append(sequence)
            self._wake.notify()
        return generation

    async def close(self) -> None:
        """Stops the thread; calls still pending raise EngineError."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def _call(self, prepare: Callable[[], Sequence]) -> RequestOutput:
        if self._closed:
            raise EngineError("the engine is closed")
        # decoding images and tokenising happen beside the model's thread
        sequence = await asyncio.to_thread(prepare)
        async with self.submit(sequence) as generation:
            return await generation.result()

    def _drop(self, sequence: Sequence) -> None:
        with self._wake:
            if self._under_way.pop(sequence.request_id, None) is not None:
                self._cancelled.append(sequence.request_id)
                self._wake.notify()

    def _serve(self) -> None:
        while self._collect():
            try:
                outputs = self.llm.step()
                self._publish(outputs)
                if not self.llm.has_unfinished:
                    self.llm.check_integrity()
            except Exception as error:  # whatever it was, nobody may be left waiting
                logger.exception("the engine failed; its requests are dropped and it starts afresh")
                self.llm.reset()
                self._fail_all(f"the engine failed and dropped its requests: {error!r}", error)
        self.llm.reset()
        self._fail_all("the engine was closed", None)

    def _collect(self) -> bool:
        """Wait for work and take in what arrived. False when closed."""
        idle = not self.llm.has_unfinished
        with self._wake:
            self._wake.wait_for(lambda: self._closed or not idle or bool(self._arrived or self._cancelled))
        if idle and self._arrived:
            time.sleep(self._gather_s)
        with self._wake:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            closed = self._closed
        for sequence in arrived:
            self.llm.add_request(sequence)
        for request_id in cancelled:
            self.llm.abort(request_id)
        return not closed

    def _publish(self, outputs: list[RequestOutput]) -> None:
        now = time.perf_counter()
        news: _News = []
        with self._wake:
            ended = {output.request_id: output for output in outputs}
            for name, generation in list(self._under_way.items()):
                fresh = generation.advance(now)
                if name in ended:
                    del self._under_way[name]
                    news.append((generation, ended[name]))
                elif fresh:
                    news.append((generation, None))
        _deliver(news)

    def _fail_all(self, reason: str, cause: Exception | None) -> None:
        with self._wake:
            if self._closed:
                self._arrived = []
            later = {sequence.request_id for sequence in self._arrived}  # not in the engine yet
            failed = [generation for name, generation in self._under_way.items() if name not in later]
            self._under_way = {name: g for name, g in self._under_way.items() if name in later}
        news: _News = []
        for generation in failed:
            failure = EngineError(reason)
            failure.__cause__ = cause
            news.append((generation, failure))
        _deliver(news)


def _deliver(news: _News) -> None:
    """Once per event loop and step, since waking one costs a system call."""
    by_loop: dict[asyncio.AbstractEventLoop, _News] = {}
    for item in news:
        by_loop.setdefault(item[0].loop, []).append(item)
    for loop, items in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, items)
        except RuntimeError:
            pass  # the callers' event loop is closed: nobody waits any more


def _wake_all(items: _News) -> None:
    for generation, outcome in items:
        generation.wake(outcome)
