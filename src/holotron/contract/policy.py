"""The seam between an agent and whatever decides for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from holotron.contract.conversation import Conversation
from holotron.contract.step import Step


class ContractError(ValueError):
    """The model broke its contract (bad JSON, wrong field, coordinate out of range): a model failure.

    A policy may add what the model said last, in how many attempts, and what they cost.
    """

    def __init__(self, message: str, *, raw_text: str = "", attempts: int = 1, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.raw_text = raw_text
        self.attempts = attempts
        self.usage = usage


class PolicyError(RuntimeError):
    """The policy could not be asked (endpoint down, weights unreadable): an infrastructure failure."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts are tokens, times seconds, sizes bytes. Zero where a policy cannot know."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    image_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    state_bytes: int = 0  # constant per sequence: SSM + conv state
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    step: Step
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0  # wall time of decide()
    attempts: int = 1
    raw_text: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class Policy(Protocol):
    """Decides the last turn of a conversation.

    Raises ContractError when the model's output is unusable after the retries the contract allows,
    PolicyError when the model could not be reached.
    """

    name: str

    async def decide(self, conversation: Conversation) -> Decision: ...

    async def close(self) -> None: ...
