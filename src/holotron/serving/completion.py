"""Reading an OpenAI chat completion from a server that may not be one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from holotron.contract.policy import Usage

SHOWN = 300  # characters of a foreign answer that an error quotes


class TransientError(Exception):
    """Infrastructure trouble that the next attempt may not meet."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The parts of a chat completion that matter here."""

    content: str
    reasoning: str
    finish_reason: str
    tool_calls: bool
    usage: Usage


def read_json(body: bytes) -> dict[str, Any]:
    """Raises TransientError for anything but a JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        shown = " ".join(body[:SHOWN].decode("utf-8", "replace").split())
        raise TransientError(f"the answer is no JSON object but begins {shown!r}: is this a chat completions server?")
    return value


def read_reply(answer: dict[str, Any]) -> Reply:
    """Raises TransientError for anything that is no chat completion."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        finish, tools = choice.get("finish_reason"), message.get("tool_calls")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise TransientError(f"the answer is no chat completion; its keys are {sorted(answer)[:10]}") from None
    if not isinstance(content, str):
        raise TransientError(f"the content of the reply is a {type(content).__name__}, not text")
    return Reply(_whole(content), _whole(str(reasoning)), str(finish), bool(tools), _usage(answer.get("usage")))


def _usage(reported: object) -> Usage:
    if not isinstance(reported, dict):
        return Usage()
    details = reported.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    return Usage(
        prompt_tokens=_count(reported.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens")),
        output_tokens=_count(reported.get("completion_tokens")),
        image_tokens=_count(details.get("image_tokens")),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _whole(text: str) -> str:
    """JSON escapes can make up half a surrogate pair, which no file and no next request could carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
