"""Which part of a rendered conversation the assistant wrote, for any chat template.

Marks go into the messages, one conversation is rendered with and without them, and the marks that come out show where
each turn's words landed. A turn starts after the text that prompts the model, and ends with its end token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holotron.model.chat_text import Message, map_content

# kinds of mark: before an assistant's words and after them, around the name of its call, after another role's words
BEGIN, END, CALL, OTHER = "b", "e", "c", "o"


@dataclass(slots=True, frozen=True)
class Span:
    """What the assistant generates in message number `message`: from `start` up to, not including, `end`."""

    message: int
    start: int
    end: int


@dataclass(slots=True, frozen=True)
class Mark:
    place: int  # in the text without marks
    message: int
    kind: str


@dataclass(slots=True, frozen=True)
class Openings:
    """What a template writes before a reply: `live` when it prompts the model, `past` before a turn already done."""

    live: tuple[str, ...]
    past: tuple[str, ...]


def mark(messages: Sequence[Message], sign: str, others: bool) -> list[Message]:
    """Messages whose assistant texts and call names stand between marks, inside their outer whitespace.

    A mark is sign, number of the message, kind, sign. With `others`, the other roles' texts end with one too.
    """
    return [_marked(message, f"{sign}{number}", sign, others) for number, message in enumerate(messages)]


def _marked(message: Message, head: str, sign: str, others: bool) -> Message:
    begin, end, call, other = (f"{head}{kind}{sign}" for kind in (BEGIN, END, CALL, OTHER))
    if message["role"] != "assistant":
        if not others or "content" not in message:
            return message
        return {**message, "content": map_content(message["content"], lambda text: _enclose(text, "", other))}
    marked = {**message}
    for key in ("content", "reasoning_content"):
        if key in message:
            marked[key] = map_content(message[key], lambda text: _enclose(text, begin, end))
    if "tool_calls" in message:
        marked["tool_calls"] = [_marked_call(item, call) for item in message["tool_calls"]]
    return marked


def _marked_call(call: dict[str, Any], text: str) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _marked_call(call["function"], text)}
    return {**call, "name": text + call["name"] + text}


def _enclose(text: str, before: str, after: str) -> str:
    inner = text.strip()
    if not inner:
        return text
    at = text.index(inner)
    return text[:at] + before + inner + after + text[at + len(inner) :]


def take_marks(rendered: str, sign: str) -> tuple[str, list[Mark]]:
    """The text without its marks, and the marks in order."""
    pieces: list[str] = []
    marks: list[Mark] = []
    end = length = 0
    for found in re.finditer(f"{sign}([0-9]+)([{BEGIN}{END}{CALL}{OTHER}]){sign}", rendered):
        pieces.append(rendered[end : found.start()])
        length += len(pieces[-1])
        marks.append(Mark(length, int(found[1]), found[2]))
        end = found.end()
    return "".join([*pieces, rendered[end:]]), marks


def find_spans(text: str, marks: Sequence[Mark], stops: Sequence[str], openings: Openings) -> list[Span]:
    """Character spans of the assistant's turns; a message that the template writes as two turns has two.

    Raises ValueError where a turn has no end token, or starts in a way the template was not seen to use.
    """
    spans: list[Span] = []
    border = 0  # the end of the last message's words, or of its turn
    for at, found in enumerate(marks):
        if found.kind == OTHER:
            border = max(border, found.place)
            continue
        if found.place < border:
            continue  # in the turn of an earlier mark
        start = _start(text, border, found, openings)
        ends = [place + len(stop) for stop in stops if (place := text.find(stop, found.place)) >= 0]
        if not ends or any(m.message != found.message and m.place < min(ends) for m in marks[at:]):
            raise ValueError(
                f"the chat template writes none of the end tokens {', '.join(stops)} after messages[{found.message}]"
            )
        border = min(ends)
        spans.append(Span(found.message, start, border))
    return spans


def _start(text: str, border: int, found: Mark, openings: Openings) -> int:
    for known in (openings.live, openings.past):
        ends = [at + len(opening) for opening in known if (at := text.rfind(opening, border, found.place)) >= 0]
        if ends:
            return max(ends)
    if found.kind == BEGIN:
        return found.place  # all before it is the template's
    raise ValueError(f"the chat template opens messages[{found.message}] in a way that was not expected")
