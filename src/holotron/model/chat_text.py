"""Chat messages before a template sees them: checked, brought to one form, and defused.

What a page shows must not become a role marker, an end of turn or an image. Special tokens spelled in a text are cut
by a *seam*, a private-use character that the conversation does not hold; the rendered text is cut there before it is
encoded, so that the two halves can only be read as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

Message = dict[str, Any]


class _TextChange(Protocol):
    def __call__(self, text: str, role: str) -> str: ...


ROLES = ("system", "user", "assistant", "tool")
# What a model writes itself as single tokens, and a template looks for in its words.
SPOKEN = ("<think>", "</think>", "<TOOLCALL>", "</TOOLCALL>", "<tool_call>", "</tool_call>")
_PRIVATE_USE = range(0xE000, 0xF900)
_PART_KINDS = {
    "text": "text",
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}


def read_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages in the one form templates are given.

    Content is None, text, or parts whose type is text, image or video; reasoning is `reasoning_content`; the
    arguments of a call are an object where they were the JSON text of one. Raises ValueError naming the message.
    """
    if not messages:
        raise ValueError("messages is empty")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Message, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} must be an object with a role")
    role = {"developer": "system"}.get(message["role"], message["role"])
    if role not in ROLES:
        raise ValueError(f"{where} has role {role!r}; known are {', '.join(ROLES)}")
    read = {**message, "role": role}
    content = message.get("content")
    if isinstance(content, list):
        read["content"] = [_read_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{where}.content must be text or a list of parts")
    thoughts = [read.pop(key, None) for key in ("reasoning_content", "reasoning", "thinking")]
    thought = next((text for text in thoughts if text is not None), None)
    if thought is not None:
        if not isinstance(thought, str):
            raise ValueError(f"{where}.reasoning_content must be text")
        read["reasoning_content"] = thought
    if read.get("tool_calls"):
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(read["tool_calls"])]
    else:
        read.pop("tool_calls", None)
    return read


def _read_part(part: Any, where: str) -> dict[str, Any]:
    kind = _PART_KINDS.get(part.get("type", "")) if isinstance(part, dict) else None
    if kind is None or (kind == "text" and not isinstance(part.get("text"), str)):
        raise ValueError(f"{where} must be a part of type text, with its text, or of type image")
    return dict(part) if kind == "text" else {"type": kind}


def _read_call(call: Any, where: str) -> dict[str, Any]:
    called = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(called, dict) or not isinstance(called.get("name"), str) or not called["name"]:
        raise ValueError(f"{where} must name the function it calls")
    arguments = called.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ValueError(f"{where}: the arguments are not JSON: {arguments[:80]!r}") from None
    if not isinstance(arguments, dict | None):
        raise ValueError(f"{where}: the arguments must be a JSON object")
    read = {**called, "arguments": arguments or {}}
    return {**call, "function": read} if "function" in call else read


def map_texts(messages: Sequence[Message], change: _TextChange) -> list[Message]:
    """Messages with `change(text, role)` in place of every text: of contents, reasoning, names and calls."""
    mapped = []
    for message in messages:
        role = message["role"]
        said = partial(change, role=role)
        read = {key: map_strings(message[key], said) for key in message if key not in ("role", "content")}
        if "content" in message:
            read["content"] = map_content(message["content"], said)
        mapped.append({"role": role, **read})
    return mapped


def map_content(content: Any, change: Callable[[str], str]) -> Any:
    """A message's content, text or parts, with `change` done to its texts alone."""
    if isinstance(content, list):
        return [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]
    return change(content) if isinstance(content, str) else content


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def unused_characters(texts: Iterable[str], count: int) -> list[str]:
    """`count` private-use characters that no text holds, the same for the same texts."""
    seen = set().union(*texts)
    found = [chr(code) for code in _PRIVATE_USE if chr(code) not in seen][:count]
    if len(found) < count:
        raise ValueError("the messages use every private-use character; none is left to mark their texts with")
    return found


def all_texts(*values: Any) -> list[str]:
    """Every string inside JSON values."""
    texts: list[str] = []

    def keep(text: str) -> str:
        texts.append(text)
        return text

    map_strings(list(values), keep)
    return texts


class Defuser:
    """Cuts what must stay plain text: at a seam after the first character of each place where one starts."""

    def __init__(self, specials: Iterable[str]) -> None:
        self._specials = sorted({text for text in specials if len(text) > 1}, key=len, reverse=True)
        self._anywhere = _starts(self._specials)
        self._unspoken = _starts([text for text in self._specials if text not in SPOKEN])
        self._heads = {text[:n] for text in self._specials for n in range(1, len(text))}

    def defuse(self, messages: Sequence[Message], seam: str, also: Sequence[str] = ()) -> list[Message]:
        """An assistant's own think and tool tags are left whole: they are its tokens.

        `also` are further texts that the template must not find in any message but the system's.
        """
        more = _starts(also)

        def change(text: str, role: str) -> str:
            starts = self._unspoken if role == "assistant" else self._anywhere
            text = _cut(text, starts, seam)
            return text if role == "system" else _cut(text, more, seam)

        return [self._close(message, seam) for message in map_texts(messages, change)]

    def defuse_value(self, value: Any, seam: str) -> Any:
        """The same for a JSON value such as the tools' descriptions."""
        return map_strings(value, lambda text: _cut(text, self._anywhere, seam))

    def _close(self, message: Message, seam: str) -> Message:
        """Two text parts side by side must not spell together what neither spells alone."""
        content = message.get("content")
        if not isinstance(content, list):
            return message
        followers = [part["type"] for part in content[1:]] + [None]
        parts = [
            {**part, "text": part["text"] + seam}
            if part["type"] == follower == "text" and self._ends_open(part["text"])
            else part
            for part, follower in zip(content, followers, strict=True)
        ]
        return {**message, "content": parts}

    def _ends_open(self, text: str) -> bool:
        longest = max(map(len, self._heads), default=0)
        return any(text[-n:] in self._heads for n in range(1, min(longest, len(text)) + 1))


def _starts(texts: Iterable[str]) -> re.Pattern[str] | None:
    """The first character of each place where one of the texts starts, overlapping ones too."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    choices = [f"{re.escape(first)}(?=(?:{'|'.join(rest)}))" for first, rest in rests.items()]
    return re.compile("|".join(choices)) if choices else None


def _cut(text: str, starts: re.Pattern[str] | None, seam: str) -> str:
    return starts.sub(rf"\g<0>{seam}", text) if starts is not None else text


def split_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Reasoning that an assistant's text starts with, up to </think>, as `reasoning_content`."""
    split = []
    for message in messages:
        text = message.get("content")
        if message["role"] == "assistant" and isinstance(text, str) and "reasoning_content" not in message:
            thought, closed, answer = text.partition("</think>")
            thought = thought.strip().removeprefix("<think>")
            if closed and "<think>" not in thought:
                message = {**message, "content": answer.strip()}
                if thought.strip():
                    message["reasoning_content"] = thought.strip()
        split.append(message)
    return split
