"""Native tool calls: a schema that makes a model call one of its tools, and the calls read out of a reply.

Models of the family write calls as `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`, those of the next
generation as `<tool_call><function=...><parameter=...>`. Where a call is required, the reply is constrained to the
JSON list alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from holotron.engine import StructuredOutputs
from holotron.serving.server.errors import ApiError
from holotron.serving.server.schemas import ChatRequest, FunctionTool, NamedTool

OPENINGS = ("<TOOLCALL>", "<tool_call>")
_MOST_CALLS = 8  # of one reply that must consist of calls
_BLOCK = re.compile(r"<TOOLCALL>(.*?)(?:</TOOLCALL>|\Z)|<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

Call = dict[str, Any]  # as it goes into `tool_calls`


def described(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as the chat template is to show them; none where none may be called."""
    if not request.tools or request.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in request.tools]


def required_call(request: ChatRequest) -> StructuredOutputs | None:
    """What the reply must match where `tool_choice` demands a call. Raises ApiError."""
    choice, tools = request.tool_choice, [tool.function for tool in request.tools or ()]
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    most = 1 if isinstance(choice, NamedTool) or request.parallel_tool_calls is False else _MOST_CALLS
    calls = [_call_schema(tool, i) for i, tool in enumerate(tools)]
    return StructuredOutputs(
        json={
            "type": "array",
            "minItems": 1,
            "maxItems": most,
            "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
            "$defs": {f"tool{i}": _moved(tool.parameters or {"type": "object"}, i) for i, tool in enumerate(tools)},
        }
    )


def _call_schema(tool: FunctionTool, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/tool{index}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, index: int) -> Any:
    """A schema whose references still hold when it is a definition within a larger one."""
    if isinstance(schema, list):
        return [_moved(item, index) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, index) for key, value in schema.items() if key != "$schema"}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = f"#/$defs/tool{index}{target[1:]}"
    return moved


def read_required(text: str) -> list[Call] | None:
    """The calls of a reply that was constrained to them; None where it was cut short."""
    return _from_list(text)


def read_calls(text: str, tools: Sequence[FunctionTool]) -> tuple[list[Call], str] | None:
    """The calls in a text that begins with one, and what else it says. None unless every call is readable."""
    calls: list[Call] = []
    for block in _BLOCK.finditer(text):
        found = _from_list(block[1]) if block[1] is not None else _from_function(block[2], tools)
        if not found:
            return None
        calls += found
    return (calls, _BLOCK.sub("", text).strip()) if calls else None


def _from_list(text: str) -> list[Call] | None:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for item in items if isinstance(items, list) else [items]:
        arguments = item.get("arguments", item.get("parameters")) if isinstance(item, dict) else None
        if not isinstance(arguments, dict) or not isinstance(item.get("name"), str):
            return None
        calls.append(_call(item["name"], arguments))
    return calls


def _from_function(text: str, tools: Sequence[FunctionTool]) -> list[Call] | None:
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return _from_list(text)  # some checkpoints write JSON between these tags
    schema = next((tool.parameters for tool in tools if tool.name == found[1]), None) or {}
    properties = schema.get("properties")
    types = properties if isinstance(properties, dict) else {}
    arguments = {name: _read_value(value, types.get(name)) for name, value in _PARAMETER.findall(found[2])}
    return [_call(found[1], arguments)]


def _read_value(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _call(name: str, arguments: dict[str, Any]) -> Call:
    written = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    function = {"name": _whole(name), "arguments": _whole(written)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _whole(text: str) -> str:
    """JSON escapes can make up half a surrogate pair, which no answer could carry."""
    return text.encode("utf-8", "replace").decode()
