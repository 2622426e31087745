"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from holotron.engine import SamplingParams, StructuredOutputs
from holotron.serving.server.errors import ApiError
from holotron.serving.server.schemas import ChatRequest, CompletionRequest, ResponseFormat, Sampled

T = TypeVar("T")

_ANY_OBJECT = {"type": "object"}
_UNBOUNDED = 2**31 - 1  # the engine ends a reply where the context does
_SEEDS = 2**63


def sampling_params(request: ChatRequest | CompletionRequest, most_tokens: int | None) -> SamplingParams:
    """Without what only chat has to say about structure. Raises ApiError, ValueError naming a field."""
    wanted, logprobs = request.max_tokens, request.logprobs
    if isinstance(request, ChatRequest):
        wanted = request.max_completion_tokens or request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    elif wanted is None:
        wanted = 16  # the default of this endpoint
    if wanted is not None and most_tokens is not None and wanted > most_tokens:
        raise ApiError(400, f"max_tokens is {wanted}; this server allows {most_tokens}", param="max_tokens")
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(_or(request.top_k, 0), 0),  # -1 switches it off too
        min_p=_or(request.min_p, 0.0),
        max_tokens=wanted or most_tokens or _UNBOUNDED,
        seed=None if request.seed is None else request.seed % _SEEDS,
        stop=_as_list(request.stop),
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=bool(request.ignore_eos),
        structured_outputs=structured_outputs(request),
        use_grounding_head=_or(request.use_grounding_head, True),
        logprobs=None if logprobs is None else int(logprobs),
    )


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Each of n choices draws for itself, repeatably where there is a seed."""
    return params if params.seed is None or index == 0 else replace(params, seed=(params.seed + index) % _SEEDS)


def structured_outputs(request: Sampled) -> StructuredOutputs | None:
    """What the fields that ask for structure agree on. Raises ApiError where they do not, ValueError."""
    asked: dict[str, StructuredOutputs] = {}
    if request.guided_json is not None:
        asked["guided_json"] = StructuredOutputs(json=_schema(request.guided_json, "guided_json"))
    if request.guided_regex is not None:
        asked["guided_regex"] = StructuredOutputs(regex=request.guided_regex)
    if request.guided_choice is not None:
        asked["guided_choice"] = StructuredOutputs(choice=request.guided_choice)
    if (fields := request.structured_outputs) is not None:
        schema = fields.json_schema if fields.json_schema is not None or not fields.json_object else _ANY_OBJECT
        asked["structured_outputs"] = StructuredOutputs(
            json=None if schema is None else _schema(schema, "structured_outputs.json"),
            regex=fields.regex,
            choice=fields.choice,
        )
    if isinstance(request, ChatRequest) and request.response_format is not None:
        schema = _format_schema(request.response_format)
        if schema is not None:
            asked["response_format"] = StructuredOutputs(json=schema)
    first = next(iter(asked.values()), None)
    if any(other != first for other in asked.values()):
        names = list(asked)
        raise ApiError(400, f"{' and '.join(names)} ask for different structures; give one", param=names[-1])
    return first


def _format_schema(wanted: ResponseFormat) -> dict[str, Any] | None:
    if wanted.type == "text":
        return None
    given = wanted.json_schema.json_schema if wanted.json_schema is not None else None
    return _ANY_OBJECT if given is None else given


def _schema(value: dict[str, Any] | str, field: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ApiError(400, f"{field} must be a JSON schema: an object, or the text of one", param=field)
    return read


def _as_list(stop: str | Sequence[str] | None) -> list[str]:
    return [] if stop is None else [stop] if isinstance(stop, str) else list(stop)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
