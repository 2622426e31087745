"""POST /v1/completions: text or tokens in, their continuation out."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from holotron.engine import EngineError
from holotron.engine.async_llm import Generation
from holotron.engine.prompts import Prompt
from holotron.serving.server.errors import ApiError
from holotron.serving.server.logprobs import text_logprobs
from holotron.serving.server.reply import ReplyText
from holotron.serving.server.sampling import for_choice, sampling_params
from holotron.serving.server.schemas import CompletionRequest
from holotron.serving.server.service import EngineSequence, Service, all_of, as_refusal, belonging, usage
from holotron.serving.server.streaming import DONE, EventStream, as_json, event, merged, unless_disconnected


async def answer_completion(service: Service, request: Request) -> Response:
    """Raises ApiError, ClientGone."""
    started = time.perf_counter()
    async with service.reading(request, CompletionRequest) as body:
        prompts = _prompts(body)
        service.check_room(len(prompts) * (body.n or 1))
        sequences = await service.prepared(lambda: _prepare(service, body, prompts), "prompt")
    frame = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or service.settings.names[0],
    }
    async with AsyncExitStack() as stack:
        generations = await stack.enter_async_context(service.generations(sequences, started))
        if not body.stream:
            whole = all_of([_choice(service, body, i, g) for i, g in enumerate(generations)])
            choices = await unless_disconnected(request.receive, whole)
            answer = {**frame, "choices": choices, "usage": usage(generations, prompts=len(prompts))}
            return Response(as_json(answer), media_type="application/json")
        events = _events(service, body, frame, generations, len(prompts))
        return EventStream(events, service.limits.write_seconds, stack.pop_all().aclose)


def _prompts(body: CompletionRequest) -> list[Prompt]:
    if isinstance(body.prompt, str) or isinstance(body.prompt[0], int):
        return [body.prompt]  # a list of ids is one prompt
    return list(body.prompt)


def _prepare(service: Service, body: CompletionRequest, prompts: list[Prompt]) -> list[EngineSequence]:
    params = sampling_params(body, service.limits.tokens)
    return [
        belonging(service.llm.prepare(prompt, for_choice(params, i)), body)
        for prompt in prompts
        for i in range(body.n or 1)
    ]


async def _choice(service: Service, body: CompletionRequest, index: int, generation: Generation) -> dict[str, Any]:
    sequence = generation.sequence
    try:
        await generation.result()
    except EngineError as error:
        raise as_refusal(error, sequence) from error
    text = ReplyText(service.spelling, sequence.params.stop)
    said = "".join(map(text.feed, sequence.output)) + text.finish()
    logprobs = None if body.logprobs is None else text_logprobs(service.spelling, sequence, 0, None, 0)
    return {"index": index, "text": said, "logprobs": logprobs, "finish_reason": sequence.finish_reason}


async def _events(
    service: Service, body: CompletionRequest, frame: dict[str, Any], generations: list[Generation], prompts: int
) -> AsyncGenerator[bytes, None]:
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    more: dict[str, Any] = {"usage": None} if wants_usage else {}
    try:
        async for choice in merged([_pieces(service, body, i, g) for i, g in enumerate(generations)]):
            yield event({**frame, "choices": [choice], **more})
    except ApiError as refusal:
        yield event(refusal.content)
        yield DONE
        return
    if wants_usage:
        yield event({**frame, "choices": [], "usage": usage(generations, prompts=prompts)})
    yield DONE


async def _pieces(
    service: Service, body: CompletionRequest, index: int, generation: Generation
) -> AsyncIterator[dict[str, Any]]:
    sequence, sent, offset = generation.sequence, 0, 0
    text = ReplyText(service.spelling, sequence.params.stop)
    try:
        async for tokens in generation.tokens():
            said = "".join(map(text.feed, tokens))
            logprobs = None
            if body.logprobs is not None:
                logprobs = text_logprobs(service.spelling, sequence, sent, sent + len(tokens), offset)
                offset += sum(map(len, logprobs["tokens"]))
            sent += len(tokens)
            if said or logprobs:
                yield {"index": index, "text": said, "logprobs": logprobs, "finish_reason": None}
    except EngineError as error:
        raise as_refusal(error, sequence) from error
    yield {"index": index, "text": text.finish(), "logprobs": None, "finish_reason": sequence.finish_reason}
