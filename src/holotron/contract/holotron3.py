"""The `holotron3` contract: one JSON object {note, thought, tool_call} per step, integers 0..1000.

Every literal that frames the conversation is a constant here, so that a tokenizer can make single tokens of
them.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holotron.contract import coordinates
from holotron.contract.conversation import Conversation, Screenshot, Settings, Turn
from holotron.contract.coordinates import Convention
from holotron.contract.image_part import screenshot_part
from holotron.contract.policy import ContractError
from holotron.contract.reply import contract_error, read_object
from holotron.contract.step import Step, ToolCall, UpdatePlan
from holotron.contract.tool_schema import TOOL_NAMES, compact_json, step_schema

TASK = "Task: "
OBSERVATION_OPEN = "<observation>\n"
OBSERVATION_CLOSE = "\n</observation>"
EVICTED = "[Image omitted by context cleaning]"
ANSWER_NOW = "The limit is reached. Only the answer tool is allowed now."
TOOL_OUTPUT_OPEN = '<tool_output tool="{name}">'
TOOL_OUTPUT_CLOSE = "</tool_output>"
ERROR_OPEN = '<error tool="{name}">'
ERROR_CLOSE = "</error>"
NO_OUTPUT = "Done."
NO_ERROR_TEXT = "Failed without an explanation."
NO_RESULT = "No result was recorded."
RESULT_LIMIT = 2000  # characters
IMAGES_KEPT = 3

DESKTOP_SUFFIX = "_desktop"
DESKTOP_NAMES = frozenset(
    f"{name}{DESKTOP_SUFFIX}"
    for name in (
        "click", "double_click", "move_to", "drag_to", "scroll", "write",
        "hotkey", "hold_and_tap_key", "key_down", "key_up", "wait",
    )
)  # fmt: skip

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_PLACEHOLDERS = frozenset({"date", "max_steps", "max_seconds", "environment", "effort", "schema"})
_FRAME_END = re.compile(r"</(?=observation>|tool_output>|error>)")
_TAGS = frozenset(TOOL_NAMES)


class Holotron3:
    """Implements `Contract`.

    `prompt_file` replaces the prompt text (placeholders `{{date}}`, `{{max_steps}}`, `{{max_seconds}}`,
    `{{environment}}`, `{{effort}}`; `{{schema}}` exactly once). The newest `images_kept` screenshots stay,
    older ones become `evicted_marker`, with `merge_evicted` joined to its neighbours in one text part. With
    `strict`, a plan with two running goals is a ContractError, else a warning. Raises ValueError for unusable
    arguments.
    """

    name = "holotron3"

    def __init__(
        self,
        *,
        prompt_file: str | Path | None = None,
        images_kept: int | None = None,
        evicted_marker: str = EVICTED,
        merge_evicted: bool = True,
        strict: bool = True,
    ) -> None:
        kept = IMAGES_KEPT if images_kept is None else images_kept
        if kept < 1:
            raise ValueError(f"images_kept is {kept}: at least the current screenshot must stay")
        self.images_kept: int = kept
        self.evicted_marker = evicted_marker
        self.merge_evicted = merge_evicted
        self.strict = strict
        self._template = _read_template(prompt_file)
        self.prompt_hash: str = hashlib.sha256(self._template.encode()).hexdigest()
        self.request_defaults: dict[str, Any] = {
            "temperature": 0.8,
            "top_p": 0.95,
            "max_tokens": 4096,
            "reasoning_effort": "medium",
            "chat_template_kwargs": {"enable_thinking": True},
            "schema_name": "NoteStructuredOutput",
            "retry": {
                "attempts": 3,
                "timeout_s": 120.0,
                "pause_s": 5.0,
                "temperature_step": 0.1,
                "temperature_floor": 0.4,
                "finish_reason": "stop",
            },
        }

    def schema(self, answer_only: bool = False) -> dict[str, Any]:
        return step_schema(answer_only)

    def schema_text(self, answer_only: bool = False) -> str:
        """The schema's bytes, as the prompt shows them and a request should send them."""
        return compact_json(self.schema(answer_only))

    def system_prompt(self, settings: Settings) -> str:
        """The prompt with its parameters filled in.

        It shows the full schema even when only `answer` is left, so that the last request shares the prefix
        of all the others.
        """
        values = {
            "date": settings.date,
            "max_steps": str(settings.max_steps),
            "max_seconds": f"{settings.max_seconds:g}",
            "environment": settings.environment,
            "effort": settings.effort,
            "schema": self.schema_text(),
        }
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self._template)

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """system; task; then per turn observation, step and result.

        Raises ValueError for a turn before the last that has no step, or a screenshot whose bytes are not
        what its record says.
        """
        turns = conversation.turns
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.system_prompt(conversation.settings)},
            {"role": "user", "content": TASK + conversation.goal},
        ]
        for index, turn in enumerate(turns):
            last = index == len(turns) - 1
            lines = [turn.observation] if turn.observation else []
            if last and conversation.answer_now:
                lines.append(ANSWER_NOW)
            live = index >= len(turns) - self.images_kept
            messages.append({"role": "user", "content": self._observation(turn.screenshot, lines, live)})
            if turn.step is None:
                if not last:
                    raise ValueError(f"turn {index} has no step, but {len(turns) - 1 - index} follow it")
                continue
            messages.append({"role": "assistant", "content": self.dump(turn.step)})
            if turn.result is not None or not last:
                messages.append({"role": "user", "content": _result(turn, turn.step.tool_call)})
        return messages

    def parse(self, text: str) -> Step:
        reply = read_object(text)
        call = reply.get("tool_call")
        if isinstance(call, dict):
            name = call.get("tool_name")
            if isinstance(name, str) and name in DESKTOP_NAMES:
                call = {**call, "tool_name": name.removesuffix(DESKTOP_SUFFIX)}
                reply["tool_call"] = call
            for axis in ("x", "y"):
                if axis in call:
                    coordinates.check(call[axis], Convention.PERMILLE, field=f"tool_call.{axis}")
        try:
            step = Step.model_validate(reply, strict=True)
        except ValidationError as error:
            raise contract_error(error, _TAGS) from None
        self._check_plan(step.tool_call)
        return step

    def dump(self, step: Step) -> str:
        return compact_json(step.model_dump(mode="json"))

    def point(self, tool_call: ToolCall, screenshot: Screenshot) -> tuple[float, float] | None:
        x, y = getattr(tool_call, "x", None), getattr(tool_call, "y", None)
        if x is None or y is None:
            return None
        return coordinates.to_css(x, y, Convention.PERMILLE, screenshot)

    def _observation(self, screenshot: Screenshot, lines: list[str], live: bool) -> list[dict[str, Any]]:
        close = "".join("\n" + _inside(line) for line in lines) + OBSERVATION_CLOSE
        if live:
            return [_text(OBSERVATION_OPEN), screenshot_part(screenshot), _text(close)]
        if self.merge_evicted:
            return [_text(OBSERVATION_OPEN + self.evicted_marker + close)]
        return [_text(OBSERVATION_OPEN), _text(self.evicted_marker), _text(close)]

    def _check_plan(self, call: ToolCall) -> None:
        if not isinstance(call, UpdatePlan):
            return
        running = [goal.title for goal in call.goals if goal.status == "running"]
        if len(running) > 1:
            problem = f"tool_call.goals: {len(running)} goals are running; keep at most one running"
            if self.strict:
                raise ContractError(problem)
            warnings.warn(problem, stacklevel=3)


def plan_text(call: UpdatePlan) -> str:
    """A plan as lines "1. title [status]"."""
    return "\n".join(f"{n}. {goal.title} [{goal.status}]" for n, goal in enumerate(call.goals, 1))


def _result(turn: Turn, call: ToolCall) -> str:
    if turn.is_error:
        opening, closing, fallback = ERROR_OPEN, ERROR_CLOSE, NO_ERROR_TEXT
    else:
        opening, closing = TOOL_OUTPUT_OPEN, TOOL_OUTPUT_CLOSE
        fallback = plan_text(call) if isinstance(call, UpdatePlan) else NO_OUTPUT
    body = NO_RESULT if turn.result is None else turn.result.strip() or fallback
    return opening.format(name=call.tool_name) + _inside(body)[:RESULT_LIMIT] + closing


def _inside(text: str) -> str:
    """Text from a page may quote our frames; it must not be able to close one."""
    return _FRAME_END.sub(r"<\/", text)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _read_template(prompt_file: str | Path | None) -> str:
    if prompt_file is None:
        where = "the built-in prompt"
        template = (resources.files("holotron.contract") / "prompts" / "holotron3.md").read_text("utf-8")
    else:
        where = f"prompt file {prompt_file}"
        try:
            template = Path(prompt_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} cannot be read as UTF-8 text: {error}") from error
    unknown = sorted(set(_PLACEHOLDER.findall(template)) - _PLACEHOLDERS)
    if unknown:
        known = ", ".join(sorted(_PLACEHOLDERS))
        raise ValueError(f"{where} has unknown placeholders {', '.join(unknown)}; known are {known}")
    if _PLACEHOLDER.findall(template).count("schema") != 1:
        raise ValueError(f"{where} must contain {{{{schema}}}} exactly once: prompt and request show the same schema")
    return template
