"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from holotron.engine import EngineError, SamplingParams
from holotron.engine.async_llm import Generation
from holotron.serving.server.errors import ApiError
from holotron.serving.server.images import check_images, count_images
from holotron.serving.server.logprobs import chat_logprobs
from holotron.serving.server.reply import Channels, Delta, ReplyReader
from holotron.serving.server.sampling import for_choice, sampling_params
from holotron.serving.server.schemas import ChatRequest
from holotron.serving.server.service import EngineSequence, Service, all_of, as_refusal, belonging, usage
from holotron.serving.server.streaming import DONE, EventStream, as_json, event, merged, unless_disconnected
from holotron.serving.server.thinking import opens_thought, think_first
from holotron.serving.server.tools import described, required_call

# arguments of the template's renderer, which a request must not change
_RESERVED = frozenset(
    {"tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)  # fmt: skip


@dataclass(slots=True)
class _Reply:
    """One choice under way."""

    index: int
    generation: Generation
    reader: ReplyReader
    has_calls: bool = False

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.has_calls else str(self.generation.sequence.finish_reason)


@dataclass(slots=True)
class _Frame:
    """What every answer to one request repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, model: str) -> _Frame:
        return cls(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model)

    def around(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


async def answer_chat(service: Service, request: Request) -> Response:
    """Raises ApiError, ClientGone."""
    started = time.perf_counter()
    async with service.reading(request, ChatRequest) as body:
        service.check_room(body.n or 1)
        count_images(body.messages, service.limits)
        await service.fetcher.inline(body.messages)
        sequences = await service.prepared(lambda: _prepare(service, body), "messages")
    frame = _Frame.new(body.model or service.settings.names[0])
    async with AsyncExitStack() as stack:
        generations = await stack.enter_async_context(service.generations(sequences, started))
        replies = [_Reply(i, g, _reader(service, body, g)) for i, g in enumerate(generations)]
        if not body.stream:
            whole = all_of([_choice(service, body, reply) for reply in replies])
            choices = await unless_disconnected(request.receive, whole)
            thoughts = sum(reply.reader.reasoning_tokens for reply in replies)
            answer = frame.around("chat.completion", choices, usage=usage(generations, thoughts))
            return Response(as_json(answer), media_type="application/json")
        events = _events(service, body, frame, replies)
        return EventStream(events, service.limits.write_seconds, stack.pop_all().aclose)


def template_options(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """A request's chat_template_kwargs. Raises ApiError for those that are not the template's own."""
    options = dict(kwargs or {})
    reserved = sorted(_RESERVED & options.keys())
    if reserved:
        raise ApiError(
            400, f"chat_template_kwargs: {', '.join(reserved)} cannot be given here", param="chat_template_kwargs"
        )
    return options


def _prepare(service: Service, body: ChatRequest) -> list[EngineSequence]:
    """One engine request for each choice. For a worker thread. Raises ApiError, ValueError."""
    check_images(body.messages, service.limits)
    params = sampling_params(body, service.limits.tokens)
    call = required_call(body)
    if call is not None:
        if params.structured_outputs is not None:
            raise ApiError(400, "a required tool call leaves no room for another structure", param="tool_choice")
        params = replace(params, structured_outputs=call)
    options = template_options(body.chat_template_kwargs)
    if body.reasoning_effort == "none" and service.can_switch_thinking:
        options.setdefault("enable_thinking", False)
    tools = described(body)
    messages = [_plain(message.model_dump(exclude_none=True)) for message in body.messages]
    return [
        _prepare_choice(service, body, messages, for_choice(params, i), options | ({"tools": tools} if tools else {}))
        for i in range(body.n or 1)
    ]


def _prepare_choice(
    service: Service, body: ChatRequest, messages: list[dict[str, Any]], params: SamplingParams, options: dict[str, Any]
) -> EngineSequence:
    sequence = belonging(service.llm.prepare_chat(messages, params, options), body)
    if opens_thought(sequence.prompt, service.spelling):
        think_first(sequence, service.spelling, body.thinking_token_budget)
    return sequence


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Templates want content, empty if need be, and not the place of a call among streamed ones."""
    for call in message.get("tool_calls", ()):
        call.pop("index", None)
    return {"content": "", **message}


def _reader(service: Service, body: ChatRequest, generation: Generation) -> ReplyReader:
    sequence = generation.sequence
    required = body.tool_choice not in (None, "none", "auto")
    # a reply that must match a structure cannot be a call as well
    may_call = bool(body.tools) and body.tool_choice != "none" and sequence.params.structured_outputs is None
    tools = [tool.function for tool in body.tools or ()] if may_call else None
    channels = Channels(opens_thought(sequence.prompt, service.spelling), tools, required)
    return ReplyReader(service.spelling, sequence.params.stop, channels)


async def _choice(service: Service, body: ChatRequest, reply: _Reply) -> dict[str, Any]:
    sequence = reply.generation.sequence
    try:
        await reply.generation.result()
    except EngineError as error:
        raise as_refusal(error, sequence) from error
    said = reply.reader.feed(sequence.output)
    said += reply.reader.finish()
    reply.has_calls = bool(said.calls)
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if not said.content and (said.calls or (said.reasoning and sequence.finish_reason == "length")):
        message["content"] = None
    message |= {"reasoning": said.reasoning or None, "reasoning_content": said.reasoning or None}
    if said.calls:
        message["tool_calls"] = said.calls
    logprobs = chat_logprobs(service.spelling, sequence, 0) if body.logprobs else None
    return {"index": reply.index, "message": message, "logprobs": logprobs, "finish_reason": reply.finish_reason}


async def _events(
    service: Service, body: ChatRequest, frame: _Frame, replies: list[_Reply]
) -> AsyncGenerator[bytes, None]:
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    more: dict[str, Any] = {"usage": None} if wants_usage else {}

    def chunk(choice: dict[str, Any]) -> bytes:
        return event(frame.around("chat.completion.chunk", [choice], **more))

    try:
        async for choice in merged([_deltas(service, body, reply) for reply in replies]):
            yield chunk(choice)
    except ApiError as refusal:
        yield event(refusal.content)
        yield DONE
        return
    if wants_usage:
        thoughts = sum(reply.reader.reasoning_tokens for reply in replies)
        total = usage([reply.generation for reply in replies], thoughts)
        yield event(frame.around("chat.completion.chunk", [], usage=total))
    yield DONE


async def _deltas(service: Service, body: ChatRequest, reply: _Reply) -> AsyncIterator[dict[str, Any]]:
    """The choices of one reply's chunks. Raises ApiError."""
    sequence, sent = reply.generation.sequence, 0
    yield _chunk_choice(reply, {"role": "assistant", "content": ""})
    try:
        async for tokens in reply.generation.tokens():
            delta = reply.reader.feed(tokens)
            logprobs = chat_logprobs(service.spelling, sequence, sent, sent + len(tokens)) if body.logprobs else None
            sent += len(tokens)
            if delta or logprobs:
                yield _chunk_choice(reply, _fields(delta), logprobs)
    except EngineError as error:
        raise as_refusal(error, sequence) from error
    rest = reply.reader.finish()
    if rest:
        reply.has_calls = bool(rest.calls)
        yield _chunk_choice(reply, _fields(rest))
    yield _chunk_choice(reply, {}, finish_reason=reply.finish_reason)


def _fields(delta: Delta) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if delta.reasoning:
        found |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    if delta.content:
        found["content"] = delta.content
    if delta.calls:
        found["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta.calls)]
    return found


def _chunk_choice(
    reply: _Reply, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": reply.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
