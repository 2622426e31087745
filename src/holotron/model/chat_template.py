"""One chat template, the checkpoint's own or ours, and what can be found out about it by trying."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from holotron.model.chat_marks import Openings, mark, take_marks
from holotron.model.chat_text import Message, map_content
from holotron.model.config import ConfigError

TemplateSource = Literal["checkpoint", "nemotron_v2", "chatml"]
ThinkingSwitch = Literal["enable_thinking", "text"]

SWITCHES = {True: "/think", False: "/no_think"}
_FOLDER = Path(__file__).with_name("templates")
# role tokens of each generation, its end token last
_NEEDED: dict[TemplateSource, tuple[str, ...]] = {
    "nemotron_v2": ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
}
_SIGN = "\uf8ff"
_PROBE: Message = {"role": "user", "content": "words"}
_REPLY: Message = {"role": "assistant", "content": "reply"}


class ChatTemplate:
    """`source` is "checkpoint" where the tokenizer brings a template, else the name of ours that fits its tokens.

    Raises ConfigError where neither is there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.source: TemplateSource = _choose(tokenizer)
        self._own = None if self.source == "checkpoint" else (_FOLDER / f"{self.source}.jinja").read_text("utf-8")
        # without a switch, released text models think and the vision-language model of v2 does not
        sees = self.source == "nemotron_v2" and _has(tokenizer, "<image>")
        self._defaults: dict[str, Any] = {} if self._own is None else {"default_thinking": not sees}
        self._reads_parts: dict[str, bool] = {}

    def text(self, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The Jinja source; some checkpoints have another one for conversations with tools."""
        if self._own is not None:
            return self._own
        return str(self.tokenizer.get_chat_template(tools=list(tools) if tools else None))

    def apply(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The text of messages in the form of `read_messages`.

        Raises ValueError where the template refuses them, or has no switch for `thinking`.
        """
        template = self.text(tools)
        chosen = {**self._defaults, **(options or {})}
        if thinking is not None:
            if self.thinking_switch is None:
                raise ValueError("this chat template has no thinking switch; leave `thinking` None")
            messages, more = _switched(messages, thinking, self.thinking_switch)
            chosen |= more
        messages = self._fold_thoughts(messages, template, tools, chosen)
        return self._apply(messages, template, add_generation_prompt, tools, chosen)

    @cached_property
    def thinking_switch(self) -> ThinkingSwitch | None:
        """How this template is told to think or not. None where nothing tells it."""
        switches: tuple[ThinkingSwitch, ...] = ("enable_thinking", "text")
        for switch in switches:
            found = [self._opening_for(thinking, switch) for thinking in (True, False)]
            if None not in found and found[0] != found[1]:
                return switch
        return None

    @cached_property
    def openings(self) -> Openings:
        """What it writes before replies, seen on a conversation of few words."""
        live = {self._opening_for(None, None)}
        if self.thinking_switch is not None:
            live |= {self._opening_for(thinking, self.thinking_switch) for thinking in (True, False)}
        past = {self._before_reply([_PROBE, _REPLY, _PROBE]), self._before_reply([_PROBE, _REPLY])}
        return Openings(*(tuple(sorted(text for text in found if text)) for found in (live, past)))

    def _opening_for(self, thinking: bool | None, switch: ThinkingSwitch | None) -> str | None:
        messages, options = [_PROBE], dict(self._defaults)
        if thinking is not None and switch is not None:
            messages, more = _switched(messages, thinking, switch)
            options |= more
        try:
            bare, prompted = (self._apply(messages, self.text(), prompt, None, options) for prompt in (False, True))
        except ValueError:
            return None
        return prompted.removeprefix(bare) if prompted.startswith(bare) else None

    def _before_reply(self, messages: list[Message], options: dict[str, Any] | None = None) -> str | None:
        """What stands between the first message and the reply to it."""
        chosen = self._defaults if options is None else options
        try:
            before = self._apply(messages[:1], self.text(), False, None, chosen)
            text, marks = take_marks(
                self._apply(mark(messages, _SIGN, others=False), self.text(), False, None, chosen), _SIGN
            )
        except ValueError:
            return None
        if not marks or not text.startswith(before):
            return None
        return text[len(before) : marks[0].place]

    def _fold_thoughts(
        self, messages: Sequence[Message], template: str, tools: Any, options: dict[str, Any]
    ) -> list[Message]:
        """Reasoning as part of the content, for templates that look for it there alone."""
        last = len(messages) - 1
        thoughtful = [i for i, message in enumerate(messages) if message.get("reasoning_content")]
        if not thoughtful or "reasoning_content" in template or "</think>" not in template:
            return list(messages)
        opened = ""
        if last in thoughtful:
            probe = {key: value for key, value in messages[last].items() if key not in ("reasoning_content", "content")}
            shown = [*messages[:last], {**probe, "content": "reply"}]
            text, marks = take_marks(self._apply(mark(shown, _SIGN, False), template, False, tools, options), _SIGN)
            places = [found.place for found in marks if found.message == last]
            opened = text[: places[0]].rstrip() if places else ""
            if opened.endswith("</think>"):
                raise ValueError("the last message has reasoning, but the template is set to no thinking and drops it")
        folded = list(messages)
        for i in thoughtful:
            message = dict(messages[i])
            head = "" if i == last and opened.endswith("<think>") else "<think>\n"
            thought = f"{head}{message.pop('reasoning_content')}\n</think>\n\n"
            content = message.get("content") or ""
            joined = [{"type": "text", "text": thought}, *content] if isinstance(content, list) else thought + content
            folded[i] = {**message, "content": joined}
        return folded

    def _apply(
        self,
        messages: Sequence[Message],
        template: str,
        add_generation_prompt: bool,
        tools: Any,
        options: dict[str, Any],
    ) -> str:
        if not self._takes_parts(template):
            messages = [_flatten(message) for message in messages]
        try:
            return self._call(messages, template, add_generation_prompt, tools, options)
        except Exception as error:  # jinja raises many kinds, and templates their own
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def _takes_parts(self, template: str) -> bool:
        """Whether it reads content given as parts; some templates print them as Python would, or refuse them."""
        if template not in self._reads_parts:
            probe = [{"role": "user", "content": [{"type": "text", "text": "words"}]}]
            try:
                shown = self._call(probe, template, False, None, self._defaults)
            except Exception:
                shown = ""
            self._reads_parts[template] = "words" in shown and "'words'" not in shown
        return self._reads_parts[template]

    def _call(
        self,
        messages: Sequence[Message],
        template: str,
        add_generation_prompt: bool,
        tools: Any,
        options: dict[str, Any],
    ) -> str:
        rendered = self.tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
        return str(rendered)


def _has(tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    return tokenizer.backend_tokenizer.token_to_id(text) is not None


def _choose(tokenizer: PreTrainedTokenizerFast) -> TemplateSource:
    if tokenizer.chat_template:
        return "checkpoint"
    fits = [source for source, tokens in _NEEDED.items() if all(_has(tokenizer, text) for text in tokens)]
    if len(fits) > 1:
        fits = [source for source in fits if _NEEDED[source][-1] == tokenizer.eos_token]
    if len(fits) == 1:
        return fits[0]
    wanted = " or ".join(", ".join(tokens) for tokens in _NEEDED.values())
    raise ConfigError(
        "the checkpoint has no chat template (chat_template.jinja, or the key in tokenizer_config.json), and its "
        f"tokens and eos_token {tokenizer.eos_token!r} do not tell which of ours fits ({wanted}); give it a template"
    )


def _switched(
    messages: Sequence[Message], thinking: bool, switch: ThinkingSwitch
) -> tuple[list[Message], dict[str, Any]]:
    """The messages and template options that ask for thinking, or for none."""
    if switch == "enable_thinking":
        return list(messages), {"enable_thinking": thinking}
    word = SWITCHES[thinking]
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": word}, *messages], {}
    content = map_content(messages[0].get("content") or "", _without_switches)
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n{word}"}]
    else:
        content = f"{content}\n{word}" if content.strip() else word
    return [{**messages[0], "content": content}, *messages[1:]], {}


def _without_switches(text: str) -> str:
    for word in SWITCHES.values():
        text = text.replace(word, "")
    return text


def _flatten(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content]
    return {**message, "content": "".join(texts)}
