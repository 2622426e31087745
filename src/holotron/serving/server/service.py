"""What every endpoint needs: reading a request beside the event loop, starting it in the engine, accounting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from holotron.engine import AsyncLLM, EngineError
from holotron.engine import sequence as engine_sequence
from holotron.engine.async_llm import Generation
from holotron.engine.errors import RequestFailed
from holotron.model.chat import Chat
from holotron.serving.server.bodies import Bodies
from holotron.serving.server.errors import ApiError, bad_body, bad_value, overloaded
from holotron.serving.server.images import Fetcher
from holotron.serving.server.metrics import ServerMetrics
from holotron.serving.server.preprocessing import Preprocessing
from holotron.serving.server.reply import Spelling
from holotron.serving.server.schemas import ChatRequest, CompletionRequest
from holotron.serving.server.settings import ServerSettings

Read = TypeVar("Read", bound=BaseModel)
T = TypeVar("T")
EngineSequence = engine_sequence.Sequence


class Service:
    """One engine behind one server."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine = engine
        self.llm = engine.llm
        self.settings = settings
        self.limits = settings.limits
        self.created = int(time.time())
        self.bodies = Bodies(self.limits)
        self.preprocessing = Preprocessing(self.limits.preprocessing_threads, self.limits.preprocessing)
        self.fetcher = Fetcher(settings.image_hosts, settings.private_images, self.limits)
        self.spelling = Spelling(self.llm.vocabulary)
        self.metrics = ServerMetrics(settings.names[0], self.stats, lambda: self.preprocessing.depth)
        self._under_way = 0

    def stats(self) -> dict[str, float]:
        """What the engine says about itself."""
        return self.llm.stats()

    @cached_property
    def can_switch_thinking(self) -> bool:
        return Chat(self.llm.vocabulary.tokenizer).thinking_switch is not None

    @asynccontextmanager
    async def reading(self, request: Request, kind: type[Read]) -> AsyncIterator[Read]:
        """The request's body, checked; its bytes count against the limits within the block. Raises ApiError."""
        async with self.bodies.receive(request) as data:
            try:
                body = await self.preprocessing.run(lambda: kind.model_validate_json(data))
            except ValidationError as error:
                raise bad_body(error) from None
            self._check_model(getattr(body, "model", None))
            yield body

    async def prepared(self, work: Callable[[], T], param: str | None = None) -> T:
        """What `work` makes of a request in a worker thread. Raises ApiError for a request that is at fault."""
        try:
            return await self.preprocessing.run(work)
        except ValueError as error:
            raise bad_value(error, param) from error

    def check_room(self, replies: int) -> None:
        """Raises ApiError where no more replies may be asked for, by this request or at this time."""
        if replies > self.limits.choices:
            message = f"{replies} replies are asked for at once; this server gives {self.limits.choices}"
            raise ApiError(400, message, param="n")
        if self._under_way + replies > self.limits.requests:
            raise overloaded(f"{self._under_way} requests are under way; try again soon")

    @asynccontextmanager
    async def generations(self, sequences: Sequence[EngineSequence], started: float) -> AsyncIterator[list[Generation]]:
        """Run prepared requests; whatever has not ended with the block is given up. Raises ApiError."""
        self.check_room(len(sequences))
        self._under_way += len(sequences)
        async with AsyncExitStack() as stack:
            stack.callback(self._leave, len(sequences))
            running = []
            for sequence in sequences:
                try:
                    generation = self.engine.submit(sequence)
                except EngineError as error:
                    raise ApiError(503, str(error)) from error
                stack.callback(self.metrics.ended, generation, started)
                running.append(await stack.enter_async_context(generation))
            yield running

    def close(self) -> None:
        self.preprocessing.close()

    def _leave(self, replies: int) -> None:
        self._under_way -= replies

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            known = ", ".join(self.settings.names)
            message = f"the model {name[:100]!r} does not exist; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")


async def all_of(work: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order; the first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def as_refusal(error: EngineError, sequence: EngineSequence) -> ApiError:
    """An engine's failure in the client's terms: a grammar that cannot be satisfied is the request's fault."""
    if isinstance(error, RequestFailed) and sequence.constraint is not None:
        text = f"the structure that was asked for cannot be produced: {error}"
        return ApiError(400, text, param="structured_outputs", code="grammar_failed")
    return ApiError(500, "the engine failed; the server's log has the reason", code="engine_error")


def belonging(sequence: EngineSequence, request: ChatRequest | CompletionRequest) -> EngineSequence:
    """Tell the scheduler whose request it is and how urgent."""
    sequence.user, sequence.priority = request.user or "", request.priority or 0
    return sequence


def usage(generations: Sequence[Generation], reasoning: int = 0, prompts: int = 1) -> dict[str, Any]:
    """Tokens of a request. `prompts` is how many different ones it has; the replies to one share it."""
    each = len(generations) // prompts
    first = [generation.sequence for generation in generations[::each]]
    prompt = sum(len(sequence.prompt) for sequence in first)
    output = sum(len(generation.sequence.output) for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(sequence.metrics.cached_tokens for sequence in first),
            "image_tokens": sum(sequence.metrics.image_tokens for sequence in first),
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
