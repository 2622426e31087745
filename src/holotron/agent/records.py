"""What a run leaves on disk, as validated records: a run, its episodes, their steps."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from holotron.contract.step import Step

FORMAT = 1

Status = Literal[
    "success",  # the check says it was done
    "failure",  # ended, and the check says it was not
    "done",  # ended by an answer that nothing here can check
    "step_limit",
    "time_limit",
    "stuck",  # the same action on the same pixels, after every warning
    "contract_error",  # the model's output stayed unusable
    "infra_error",  # browser or endpoint: says nothing about the model
]
INFRA: Status = "infra_error"


class Record(BaseModel):
    """Immutable; keys written by a newer version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StepRecord(Record):
    """One decision and what came of it. Times are seconds, sizes bytes, `point` CSS pixels.

    `step` is None where the model's output was unusable; `raw_text` then holds what it said and `outcome` why
    it was refused. `at` is Unix time when the step ended. `width`, `height` are those of the bytes sent.
    """

    index: int
    goal: str
    observation: str = ""
    screenshot: str
    width: int
    height: int
    css_width: float
    css_height: float
    sha256: str
    contract: str
    step: Step | None = None
    point: tuple[float, float] | None = None
    outcome: str = ""
    error: bool = False
    reward: float = 0.0
    terminated: bool = False
    success: bool | None = None
    attempts: int = 1
    raw_text: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    image_tokens: int = 0
    state_bytes: int = 0
    kv_bytes: int = 0
    screenshot_s: float = 0.0
    decide_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    act_s: float = 0.0
    at: float = 0.0
    extra: dict[str, Any] = Field(default_factory=dict)


class EpisodeResult(Record):
    """How an episode ended, and the sums over its steps. `reward` is the environment's last raw reward.

    `seconds` runs from the start of the last attempt to its end; `infra_failures` counts the attempts lost.
    """

    task: str
    seed: int
    goal: str = ""
    status: Status
    success: bool | None = None
    reward: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    answer: str | None = None
    error: str | None = None
    infra_failures: int = 0
    contract_failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    image_tokens: int = 0
    screenshot_s: float = 0.0
    decide_s: float = 0.0
    act_s: float = 0.0
    ended_at: float = 0.0


class RunInfo(Record):
    """What a run was made with; equal `identity()` is what lets a run be resumed."""

    format: int = FORMAT
    model: str
    policy: str
    contract: str
    prompt_hash: str
    started_at: str  # ISO 8601, UTC
    browser: str = ""
    machine: str = ""
    workers: int = 1
    settings: dict[str, Any] = Field(default_factory=dict)
    limits: dict[str, Any] = Field(default_factory=dict)
    jobs: list[tuple[str, int]] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)

    @field_validator("model", "policy")
    @classmethod
    def _no_credentials(cls, text: str) -> str:
        return without_credentials(text)

    def identity(self) -> dict[str, Any]:
        """What must not change between the sessions of one run, flat."""
        names = ("model", "policy", "contract", "prompt_hash")
        limits = ("max_steps", "max_seconds", "answer_at_limit", "contract_failures")
        same = {name: getattr(self, name) for name in names}
        return same | {name: self.limits[name] for name in limits if name in self.limits}


def without_credentials(text: str) -> str:
    """A URL without user, password, query and fragment, any of which may hold a key; other text as it is."""
    if "://" not in text:
        return text
    parts = urlsplit(text)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def machine_name() -> str:
    """Kind of machine without anything that tells one from another: system, processor, cores."""
    cores = os.cpu_count() or 1
    return f"{platform.system()} {platform.machine()}, {cores} cores"


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change what a run does; those not installed are left out."""
    found = {}
    for name in ("holotron", "torch", "transformers", "playwright", "miniwob", "llguidance", "pillow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
