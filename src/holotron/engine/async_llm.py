"""One engine for many concurrent callers: asyncio in front, one thread that owns the model behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from holotron.engine.errors import EngineError
from holotron.engine.llm import LLM
from holotron.engine.outputs import RequestOutput
from holotron.engine.prompts import Message, Prompt
from holotron.engine.sampling_params import SamplingParams
from holotron.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Caller:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[RequestOutput]

    def answer(self, result: RequestOutput | Exception) -> None:
        def deliver() -> None:
            if self.future.done():  # cancelled meanwhile
                return
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)

        try:
            self.loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            pass  # the caller's event loop is closed: nobody waits any more


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
        self._callers: dict[str, _Caller] = {}
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
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RequestOutput] = loop.create_future()
        with self._wake:
            if self._closed:
                raise EngineError("the engine is closed")
            self._callers[sequence.request_id] = _Caller(loop, future)
            self._arrived.append(sequence)
            self._wake.notify()
        try:
            output = await future
        except asyncio.CancelledError:
            with self._wake:
                self._callers.pop(sequence.request_id, None)
                self._cancelled.append(sequence.request_id)
                self._wake.notify()
            raise
        if output.error is not None:
            raise EngineError(f"{output.request_id}: {output.error}")
        return output

    def _serve(self) -> None:
        while self._collect():
            try:
                for output in self.llm.step():
                    with self._wake:
                        caller = self._callers.pop(output.request_id, None)
                    if caller is not None:
                        caller.answer(output)
                if not self.llm.has_unfinished:
                    self.llm.check_integrity()
            except Exception as error:  # whatever it was, nobody may be left waiting
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

    def _fail_all(self, reason: str, cause: Exception | None) -> None:
        with self._wake:
            if self._closed:
                self._arrived = []
            later = {sequence.request_id for sequence in self._arrived}  # not in the engine yet
            failed = [caller for name, caller in self._callers.items() if name not in later]
            self._callers = {name: caller for name, caller in self._callers.items() if name in later}
        for caller in failed:
            failure = EngineError(reason)
            failure.__cause__ = cause
            caller.answer(failure)
