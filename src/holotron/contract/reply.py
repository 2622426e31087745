"""Reading a model's reply: reasoning and code fences off, one JSON object, errors that name the field."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from holotron.contract.policy import ContractError

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

# A JSON string is stepped over whole, so that a tag typed as content stays; both alternatives run to the
# end of the text when unclosed, which keeps the scan linear on hostile input.
_STRING_OR_REASONING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|<think>.*?(?:</think>|\Z)', re.DOTALL)
_FENCE_BEFORE = re.compile(r"(?:\s*```[A-Za-z0-9_+-]*)+\s*")
_FENCE_LINE = "```"
_MOST_ERRORS_SHOWN = 3


def strip_reasoning(text: str) -> tuple[str, int]:
    """Drop inline `<think>...</think>` outside JSON strings; return the stripped rest and how many.

    A closing tag without its opening counts too: many chat templates open the reasoning in the prompt.
    Unclosed reasoning runs to the end of the text.
    """
    dropped = 0

    def keep(match: re.Match[str]) -> str:
        nonlocal dropped
        if match[0].startswith(THINK_OPEN):
            dropped += 1
            return ""
        return match[0]

    head, close, tail = text.partition(THINK_CLOSE)
    if close and THINK_OPEN not in head and not head.lstrip().startswith(("{", _FENCE_LINE)):
        text, dropped = tail, 1
    text = _STRING_OR_REASONING.sub(keep, text).strip()
    while not text.startswith(("{", _FENCE_LINE)) and THINK_CLOSE in text:
        text = text.partition(THINK_CLOSE)[2].strip()
    return text, dropped


def read_object(text: str) -> dict[str, Any]:
    """The one JSON object of a reply. Raises ContractError for none, several, broken, or text around it."""
    body, reasoning = strip_reasoning(text)
    body = _without_fences(body)
    if not body:
        cause = "only reasoning, no answer (raise max_tokens or cap thinking)" if reasoning else "empty"
        raise ContractError(f"reply: {cause}; answer with one JSON object")
    if not body.startswith("{"):
        raise ContractError(f"reply: begins with {_show(body)}; answer with one JSON object and nothing else")
    try:
        value, end = _DECODER.raw_decode(body)
    except json.JSONDecodeError as error:
        raise ContractError(f"reply: not valid JSON, {error}; answer with one complete JSON object") from None
    except RecursionError:
        raise ContractError("reply: JSON nested too deeply; a step is at most four levels deep") from None
    except ContractError:  # a ValueError too: already in the contract's words
        raise
    except ValueError as error:  # e.g. an integer of thousands of digits
        raise ContractError(f"reply: unreadable JSON, {error}; use plain values") from None
    rest = body[end:].strip()
    if rest.startswith("{"):
        raise ContractError("reply: more than one JSON object; answer with exactly one")
    if rest:
        raise ContractError(f"reply: text after the JSON object, {_show(rest)}; answer with the object only")
    assert isinstance(value, dict)  # the text began with "{"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # such text could be neither stored nor sent
        lone = _show(error.object[error.start])
        raise ContractError(f"reply: {lone} is half a character; write characters whole") from None
    return value


def contract_error(error: ValidationError, tags: frozenset[str] = frozenset()) -> ContractError:
    """A pydantic error in the contract's words. `tags` are union tags to leave out of field paths."""
    found = error.errors(include_url=False, include_context=True)
    lines = []
    for item in found[:_MOST_ERRORS_SHOWN]:
        parts = [_name(part) for i, part in enumerate(item["loc"]) if not (i == 1 and part in tags)]
        if item["type"].startswith("union_tag"):
            parts.append("tool_name")
        lines.append(f"{'.'.join(parts) or 'reply'}: {_advice(item)}")
    if len(found) > _MOST_ERRORS_SHOWN:
        lines.append(f"and {len(found) - _MOST_ERRORS_SHOWN} more")
    return ContractError("; ".join(lines))


def _advice(item: ErrorDetails) -> str:
    kind, message = item["type"], item["msg"]
    if kind in ("missing", "union_tag_not_found"):
        return "missing; add this field"
    if kind == "union_tag_invalid":
        context = item["ctx"]
        return f"unknown tool {_show(context['tag'])}; choose one of {context['expected_tags']}"
    if kind == "extra_forbidden":
        return "unknown field; remove it"
    if kind in ("model_type", "model_attributes_type"):
        message = "should be a JSON object"
    return f"{message[:1].lower()}{message[1:]}, got {_show(item.get('input'))}"


def _name(part: int | str) -> str:
    text = str(part)
    return text if len(text) <= 40 and text.isprintable() else _show(text)


def _without_fences(text: str) -> str:
    opened = _FENCE_BEFORE.match(text)
    if opened:
        text = text[opened.end() :]
    text = text.rstrip()
    while text.endswith(_FENCE_LINE):
        text = text[: -len(_FENCE_LINE)].rstrip()
    return text.strip()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ContractError(f"{_show(twice)}: given twice in one object; give each field once")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ContractError(f"reply: {name} is not JSON; use a finite number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def _show(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge integer"
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "..."
