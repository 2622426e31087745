"""The seam between a conversation and one checkpoint's way of reading and answering it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from holotron.contract.conversation import Conversation, Screenshot, Settings
from holotron.contract.holotron3 import Holotron3
from holotron.contract.step import Step, ToolCall

CONTRACTS = ("holotron3",)
LOCALIZERS = ("holo_localizer",)


class Contract(Protocol):
    """What the model is shown and how its reply is read. A property of a checkpoint, chosen by name.

    `request_defaults` holds sampling (`temperature`, `top_p`, `max_tokens`), `reasoning_effort`,
    `chat_template_kwargs` and `retry` (numbers only; whoever sends requests applies them).
    """

    @property
    def name(self) -> str: ...

    @property
    def images_kept(self) -> int:
        """How many of the newest screenshots stay in the messages."""
        ...

    @property
    def prompt_hash(self) -> str:
        """sha256 (hex) of the prompt template's bytes, recorded in every trace."""
        ...

    @property
    def request_defaults(self) -> Mapping[str, Any]: ...

    def system_prompt(self, settings: Settings) -> str: ...

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """OpenAI chat messages; images are base64 PNG data URLs. Equal conversations give equal bytes."""
        ...

    def schema(self, answer_only: bool = False) -> dict[str, Any]:
        """The JSON schema that the reply must satisfy."""
        ...

    def parse(self, text: str) -> Step:
        """Read a reply. Raises ContractError naming the field and what to do; executes nothing."""
        ...

    def dump(self, step: Step) -> str:
        """The compact JSON of a step, defaults filled: what `parse` reads and history shows."""
        ...

    def point(self, tool_call: ToolCall, screenshot: Screenshot) -> tuple[float, float] | None:
        """Where the call's x, y fall in CSS pixels of the viewport; None if it has none."""
        ...


def get_contract(name: str, *, prompt_file: str | Path | None = None, images_kept: int | None = None) -> Contract:
    """The contract called `name`; `prompt_file` replaces its prompt text, `images_kept` its image budget.

    Raises ValueError for a name that is unknown or that locates instead of deciding, and for a prompt file
    that cannot be used.
    """
    if name == "holotron3":
        return Holotron3(prompt_file=prompt_file, images_kept=images_kept)
    if name in LOCALIZERS:
        raise ValueError(
            f"{name!r} finds one element and takes no steps: use holotron.contract.holo_localizer.HoloLocalizer"
        )
    raise ValueError(f"unknown contract {name!r}: choose one of {', '.join(CONTRACTS)}")
