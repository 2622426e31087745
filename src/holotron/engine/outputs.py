"""What a request gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Pointed:
    """A coordinate pair that the grounding head chose, 0..1000 of the newest image, and how sure it was."""

    x: int
    y: int
    probability: float


@dataclass(slots=True)
class RequestMetrics:
    """Counts are tokens, times seconds, sizes bytes.

    Times of work that was shared by a batch are the whole batch's. `cached_tokens` of the prompt were not computed; of
    the `tiles_requested` of its images that had to be looked at, `tiles_encoded` were new. `forced_tokens`, part of
    `output_tokens`, were the only ones the grammar allowed and cost no sampling step; `accepted_tokens` of the
    `draft_tokens` that were looked up were what the model chose too. `state_bytes` is the recurrent
    state, the same for any length; `kv_bytes` the keys and values in use at the end.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    image_tokens: int = 0
    tiles_requested: int = 0
    tiles_encoded: int = 0
    queue_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    state_bytes: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """`token_ids` lack the token that ended the text; `text` lacks special tokens and the stop string.

    `cumulative_logprob` is that of the choices made: after the grammar, at temperature 1, forced tokens
    counting zero, and for a pointed coordinate pair the log probability of its cell.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    cumulative_logprob: float
    grounding: list[Pointed] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """`error` says why the engine gave a request up; its finish_reason is then "abort"."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
