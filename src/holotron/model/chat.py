"""Conversations as token ids, by the checkpoint's own chat template or ours, and which of them the assistant wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from holotron.model.chat_marks import Span, find_spans, mark, take_marks
from holotron.model.chat_template import SWITCHES, ChatTemplate, TemplateSource, ThinkingSwitch
from holotron.model.chat_text import Defuser, Message, all_texts, read_messages, split_thoughts, unused_characters
from holotron.model.image_tokens import expansion
from holotron.model.special_ids import SpecialIds, read_special_ids
from holotron.model.tokenizer import load_tokenizer

IGNORE = -100
_TURN_ENDS = ("<SPECIAL_12>", "<|im_end|>")


@dataclass(slots=True, frozen=True)
class EncodedChat:
    """Token ids of a conversation, and the spans of tokens that its assistant generates, each with its end token."""

    ids: list[int]
    spans: list[Span]

    @property
    def mask(self) -> list[bool]:
        """True for each token that the assistant generates."""
        mask = [False] * len(self.ids)
        for span in self.spans:
            mask[span.start : span.end] = [True] * (span.end - span.start)
        return mask

    @property
    def labels(self) -> list[int]:
        """The ids, -100 where the assistant does not generate them. Place decides, never the id."""
        return [token if own else IGNORE for token, own in zip(self.ids, self.mask, strict=True)]

    def expand_images(self, tokens_per_image: Sequence[int], special: SpecialIds) -> EncodedChat:
        """The same with every image placeholder as long as its image: see `image_tokens.expand_images`."""
        pairs = expansion(self.ids, tokens_per_image, special.image, special.image_start, special.image_end)
        first: dict[int, int] = {}
        for place, (_, source) in enumerate(pairs):
            first.setdefault(source, place)
        first[len(self.ids)] = len(pairs)
        spans = [Span(span.message, first[span.start], first[span.end]) for span in self.spans]
        return EncodedChat([token for token, _ in pairs], spans)


@dataclass(slots=True, frozen=True)
class _Request:
    """Messages in one form, and how they are to be rendered."""

    messages: list[Message]
    thinking: bool | None
    add_generation_prompt: bool
    tools: Sequence[dict[str, Any]] | None
    options: dict[str, Any]


class Chat:
    """Renders and encodes conversations for one tokenizer.

    `stop` are texts of further tokens that end a reply. A special token spelled in a message's text never becomes one.
    Raises ConfigError where the tokenizer has no chat template and none of ours fits it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        known = {str(token.content) for token in added}
        ends = [str(text) for text in (*_TURN_ENDS, tokenizer.eos_token, *stop) if text is not None]
        self._stops = tuple(dict.fromkeys(text for text in ends if text in known))
        self._defuser = Defuser({str(token.content) for token in added if token.special} | set(self._stops))

    @classmethod
    def from_folder(cls, folder: Path) -> Chat:
        """The chat of a checkpoint folder, whose configs may name more end tokens. Raises ConfigError."""
        tokenizer = load_tokenizer(folder)
        if not (folder / "config.json").is_file():
            return cls(tokenizer)
        stop = read_special_ids(folder, tokenizer).stop
        return cls(tokenizer, stop=[str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(stop)])

    @property
    def template_source(self) -> TemplateSource:
        """Whose template is used: the checkpoint's own, or ours by this name."""
        return self._template.source

    @property
    def thinking_switch(self) -> ThinkingSwitch | None:
        """How the template is told to think or not; None where it cannot be told."""
        return self._template.thinking_switch

    def template(self, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The Jinja source; some checkpoints have another one for conversations with tools."""
        return self._template.text(tools)

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt for people to read; for the model use `prompt_ids`, where text cannot fake special tokens.

        `messages` are OpenAI chat messages: see `chat_text.read_messages`. `thinking` None leaves the template's
        default, and /think and /no_think anywhere in the text their meaning, a page's too; otherwise `thinking`
        decides, and they are ordinary text outside the system message. Raises ValueError for messages that the
        template refuses, and for `thinking` where it has no switch.
        """
        request = self._request(messages, thinking, add_generation_prompt, tools, template_kwargs)
        text, seam = self._rendered(request)
        return text.replace(seam, "")

    def prompt_ids(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of what `render` shows, an image still as the template writes it. Any thread may call it."""
        text, seam = self._rendered(self._request(messages, thinking, add_generation_prompt, tools, template_kwargs))
        return self._encode(text, seam)

    def encode(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> EncodedChat:
        """Token ids with the spans that the assistant generates: after the text that prompts it, end token included.

        Tokens do not reach across the start of a turn, as none does when the model is prompted and then generates.
        What the template leaves out, such as older reasoning, is in no span. Raises ValueError as `render` does, for
        an assistant's message that says nothing, and for a template whose turns cannot be told apart.
        """
        request = self._request(messages, thinking, add_generation_prompt, tools, template_kwargs)
        for place, message in enumerate(request.messages):
            if message["role"] == "assistant" and not _says_something(message):
                raise ValueError(f"messages[{place}] is an assistant's without text, reasoning or tool calls")
        text, seam = self._rendered(request)
        _, sign = self._signs(request)
        for others in (True, False):
            bare, marks = take_marks(self._rendered(request, "all" if others else "assistant")[0], sign)
            if bare == text:
                break
        else:
            raise ValueError("the chat template changes the assistant's words, so its tokens cannot be told")
        spans = find_spans(text, marks, self._stops, self._template.openings)
        borders = sorted({0, len(text)} | {at for span in spans for at in (span.start, span.end)})
        ids: list[int] = []
        place_of = {0: 0}
        for start, end in zip(borders, borders[1:], strict=False):
            ids += self._encode(text[start:end], seam)
            place_of[end] = len(ids)
        return EncodedChat(ids, [Span(span.message, place_of[span.start], place_of[span.end]) for span in spans])

    def _request(
        self,
        messages: Sequence[Message],
        thinking: bool | None,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> _Request:
        options = dict(template_kwargs or {})
        given = options.pop("tools", None)
        tools = given if tools is None else tools
        wanted = options.get("enable_thinking")
        if thinking is not None or (isinstance(wanted, bool) and self.thinking_switch == "text"):
            options.pop("enable_thinking", None)
            thinking = wanted if thinking is None else thinking
        return _Request(
            read_messages(messages), thinking, add_generation_prompt, list(tools) if tools else None, options
        )

    def _signs(self, request: _Request) -> tuple[str, str]:
        """The seam, at which rendered text is cut, and the sign of marks."""
        texts = all_texts(request.messages, request.tools or [])
        seam, sign = unused_characters([*texts, self.template(request.tools)], 2)
        return seam, sign

    def _rendered(self, request: _Request, marks: Literal["all", "assistant"] | None = None) -> tuple[str, str]:
        """The text with a seam wherever it must be cut, and the seam."""
        seam, sign = self._signs(request)
        template = self.template(request.tools)
        messages = request.messages
        if "</think>" in template:
            messages = split_thoughts(messages)
        # "/think" on a page must not select a mode where the caller has, nor vanish from the page
        told = request.thinking is not None and SWITCHES[False] in template
        messages = self._defuser.defuse(messages, seam, also=tuple(SWITCHES.values()) if told else ())
        if marks is not None:
            messages = mark(messages, sign, others=marks == "all")
        tools = None if request.tools is None else self._defuser.defuse_value(request.tools, seam)
        text = self._template.apply(messages, request.add_generation_prompt, request.thinking, tools, request.options)
        return text, seam

    def _encode(self, text: str, seam: str) -> list[int]:
        # the backend's own encode holds no state, so several threads may prepare requests at once
        encode = self.tokenizer.backend_tokenizer.encode
        return [token for piece in text.split(seam) for token in encode(piece, add_special_tokens=False).ids]


def _says_something(message: Message) -> bool:
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return bool("".join(texts).strip() or message.get("reasoning_content", "").strip() or message.get("tool_calls"))
