"""JSON schemas for constrained decoding, made from the pydantic models that validate the reply."""

from __future__ import annotations

import json
from typing import Any, get_args

from pydantic import BaseModel

from holotron.contract.step import Answer, ToolCall

TOOLS: tuple[type[BaseModel], ...] = get_args(get_args(ToolCall)[0])
TOOL_NAMES: tuple[str, ...] = tuple(tool.model_fields["tool_name"].default for tool in TOOLS)

_DROPPED = {"title", "description", "default", "discriminator"}


def compact_json(value: object) -> str:
    """One line, no spaces, characters as they are: the only way contracts write JSON.

    Control characters are escaped, DEL included: JSON would allow it raw, but JSON grammars do not.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("\x7f", "\\u007f")


def object_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's schema, flat: no references, every property required, in the order of its fields."""
    raw = model.model_json_schema()
    flat = _flatten(raw, raw.get("$defs", {}))
    assert isinstance(flat, dict)
    return flat


def step_schema(answer_only: bool = False) -> dict[str, Any]:
    """The schema of a Step: note, thought, then one tool, told apart by its first key `tool_name`."""
    tools = [Answer] if answer_only else list(TOOLS)
    return {
        "type": "object",
        "properties": {
            "note": {"type": ["string", "null"]},
            "thought": {"type": "string"},
            "tool_call": {"anyOf": [object_schema(tool) for tool in tools]},
        },
        "required": ["note", "thought", "tool_call"],
        "additionalProperties": False,
    }


def _flatten(node: Any, defs: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_flatten(item, defs) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _flatten(defs[node["$ref"].rsplit("/", 1)[-1]], defs)
    if "const" in node:
        return {"const": node["const"]}
    if node.get("type") == "object":
        properties = {name: _flatten(value, defs) for name, value in node["properties"].items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    return {key: _flatten(value, defs) for key, value in node.items() if key not in _DROPPED}
