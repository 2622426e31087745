"""From the tokens of a reply to its text, and from the text to reasoning, content and tool calls, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import AnyStr

from holotron.engine.vocabulary import Vocabulary
from holotron.model.chat_text import SPOKEN
from holotron.serving.server.schemas import FunctionTool
from holotron.serving.server.tools import OPENINGS, Call, read_calls, read_required

THINK, UNTHINK = "<think>", "</think>"


class Spelling:
    """The bytes of tokens; those special tokens that a model says, such as `</think>`, as they are written."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def spoken(self) -> dict[int, bytes]:
        ids = self._vocabulary.tokenizer.backend_tokenizer.token_to_id
        found = {ids(text): text.encode() for text in SPOKEN}
        return {token: text for token, text in found.items() if token in self._vocabulary.specials}

    def __call__(self, token: int) -> bytes:
        return self.spoken.get(token) or self._vocabulary.token_bytes[token]

    def of(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self, tokens)).decode("utf-8", "replace")


class ReplyText:
    """The text of a reply as its tokens come, without a stop string or half a character at its end."""

    def __init__(self, spelling: Spelling, stops: Sequence[str]) -> None:
        self._spelling = spelling
        self._stops = [stop.encode() for stop in stops]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = bytearray()
        self._stopped = False

    def feed(self, token: int) -> str:
        if self._stopped:
            return ""
        self._held += self._spelling(token)
        for stop in self._stops:  # in the engine's order
            found = self._held.find(stop)
            if found >= 0:
                self._stopped = True
                del self._held[found:]
                return self._release(0)
        return self._release(max((_overlap(bytes(self._held), stop) for stop in self._stops), default=0))

    def finish(self) -> str:
        return self._release(0) + self._decoder.decode(b"", final=True)

    def _release(self, keep: int) -> str:
        ready = len(self._held) - keep
        text = self._decoder.decode(bytes(self._held[:ready]))
        del self._held[:ready]
        return text


@dataclass(slots=True)
class Delta:
    """What is new in a reply. `calls` come whole, at its end."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __iadd__(self, other: Delta) -> Delta:
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls
        return self


class Channels:
    """Sorts a reply's text. `thinking`: the prompt ends inside a thought. `required`: the reply is calls alone.

    `tools` None leaves tool-call tags in the content, as text; so do calls that cannot be read.
    """

    def __init__(self, thinking: bool, tools: Sequence[FunctionTool] | None = None, required: bool = False) -> None:
        self._tools = tools
        self._required = required
        self._place = "thought" if thinking else "start"
        self._held = ""
        self._said = False  # any reasoning yet; its leading whitespace is dropped

    @property
    def thinking(self) -> bool:
        return self._place == "thought"

    def feed(self, text: str) -> Delta:
        self._held += text
        delta = Delta()
        if self._place == "start":
            bare = self._held.lstrip()
            if bare.startswith(THINK):
                self._place, self._held = "thought", bare[len(THINK) :]
            elif not THINK.startswith(bare):
                self._enter_content()
        if self._place == "thought":
            before, closed, after = self._held.partition(UNTHINK)
            if closed:
                delta.reasoning = self._thought(before.rstrip())
                self._held = after
                self._place = "gap"
            else:
                delta.reasoning = self._thought(self._take(_tail(self._held, (UNTHINK,))))
        if self._place == "gap" and self._held.strip():
            self._held = self._held.lstrip()
            self._enter_content()
        if self._place == "content":
            delta.content = self._content()
        return delta

    def finish(self) -> Delta:
        held, self._held = self._held, ""
        if self._place == "thought":
            return Delta(reasoning=self._thought(held.rstrip()))
        if self._place == "gap":
            return Delta()
        if self._place != "calls":
            return Delta(content=held)
        if self._required:
            calls = read_required(held)
            return Delta(content=held) if calls is None else Delta(calls=calls)
        read = read_calls(held, self._tools or ())
        return Delta(content=held) if read is None else Delta(calls=read[0], content=read[1])

    def _enter_content(self) -> None:
        self._place = "calls" if self._required else "content"

    def _content(self) -> str:
        if self._tools is None:
            return self._take(0)
        places = [place for place in map(self._held.find, OPENINGS) if place >= 0]
        if not places:
            return self._take(_tail(self._held, OPENINGS))
        self._place = "calls"
        before, self._held = self._held[: min(places)], self._held[min(places) :]
        return before.rstrip()

    def _thought(self, text: str) -> str:
        text = text if self._said else text.lstrip()
        self._said = self._said or bool(text)
        return text

    def _take(self, keep: int) -> str:
        ready = len(self._held) - keep
        text, self._held = self._held[:ready], self._held[ready:]
        return text


def _tail(text: str, tags: Sequence[str]) -> int:
    """Characters at the end that may belong to a tag, or to the whitespace before one."""
    overlap = max(_overlap(text, tag) for tag in tags)
    body = text[: len(text) - overlap]
    return overlap + len(body) - len(body.rstrip())


def _overlap(text: AnyStr, tag: AnyStr) -> int:
    """The longest end of `text` with which `tag` begins but does not end."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text[len(text) - n :] == tag[:n]), 0)


class ReplyReader:
    """Sorts the tokens of one reply as they come, and counts those of its reasoning."""

    def __init__(self, spelling: Spelling, stops: Sequence[str], channels: Channels) -> None:
        self._text = ReplyText(spelling, stops)
        self._channels = channels
        self.reasoning_tokens = 0

    def feed(self, tokens: Iterable[int]) -> Delta:
        delta = Delta()
        for token in tokens:
            delta += self._channels.feed(self._text.feed(token))
            self.reasoning_tokens += self._channels.thinking
        return delta

    def finish(self) -> Delta:
        delta = self._channels.feed(self._text.finish())
        delta += self._channels.finish()
        return delta
