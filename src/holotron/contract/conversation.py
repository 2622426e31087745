"""What an agent has seen, said and been told so far, free of any contract's wording."""

from __future__ import annotations

from dataclasses import dataclass, field

from holotron.contract.step import Step


@dataclass(frozen=True, slots=True)
class Screenshot:
    """PNG bytes and the two sizes needed to place a click.

    `width`, `height` are pixels of the encoded bytes; `css_width`, `css_height` the viewport in CSS pixels
    when it was taken. Their ratio is whatever scale factor or resize lies between them.
    """

    png: bytes
    width: int
    height: int
    css_width: float
    css_height: float


@dataclass(slots=True)
class Turn:
    """One observation and, once decided, the step and its result. `result` None means not carried out yet."""

    screenshot: Screenshot
    observation: str = ""  # extra text beside the image, e.g. a repeated-action warning
    step: Step | None = None
    result: str | None = None
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of the prompt. Equal settings, goal and screenshots give equal prompt bytes."""

    date: str = "2026-01-01"
    max_steps: int = 10
    max_seconds: float = 120.0
    environment: str = "browser"
    effort: str = "medium"


@dataclass(slots=True)
class Conversation:
    """The last turn is the one to decide (its `step` is None)."""

    goal: str
    turns: list[Turn] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    answer_now: bool = False  # the limit is reached: only `answer` is allowed
