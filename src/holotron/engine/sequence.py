"""One request while it is in the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from holotron.engine.grammar import Constraint
from holotron.engine.outputs import CompletionOutput, FinishReason, Pointed, RequestMetrics, RequestOutput
from holotron.engine.pointer import Pointer
from holotron.engine.sampling_params import SamplingParams
from holotron.engine.vocabulary import Vocabulary
from holotron.model.images import ProcessedImage


@dataclass(slots=True, eq=False)
class Sequence:
    """`pending` are the tokens the model has not seen yet: the prompt at first, then what was last chosen."""

    request_id: str
    prompt: list[int]
    images: list[ProcessedImage]
    params: SamplingParams
    vocabulary: Vocabulary
    constraint: Constraint | None
    generator: torch.Generator
    max_tokens: int
    pending: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)  # of the output
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprob: float = 0.0
    logprobs: list[dict[int, float]] = field(default_factory=list)
    pointer: Pointer | None = None
    paired_y: int | None = None  # the token that belongs to the x just pointed at
    grounding: list[Pointed] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0

    def __post_init__(self) -> None:
        self.pending = list(self.prompt)
        self.metrics.prompt_tokens = len(self.prompt)
        self.metrics.image_tokens = sum(image.num_tokens for image in self.images)

    @property
    def tokens_seen(self) -> int:
        """By the model, that is tokens in its cache."""
        return len(self.prompt) + len(self.output) - len(self.pending)

    def append(self, token: int, logprob: float, top: dict[int, float] | None) -> None:
        """Take in the next token, and finish where it ends the text. Raises GrammarError."""
        if not self.output:
            self.first_token = time.perf_counter()
        ends = token in self.vocabulary.stops and not self.params.ignore_eos
        if ends or token in self.params.stop_token_ids:
            self.logprob += logprob
            self.finish_reason = "stop"
            return
        if self.constraint is not None:
            self.constraint.accept(token)
        self.output.append(token)
        self.pending.append(token)
        self.data += self.vocabulary.token_bytes[token]
        self.logprob += logprob
        if self.params.logprobs is not None:
            self.logprobs.append(top or {token: logprob})
        if self._cut_at_stop(len(self.vocabulary.token_bytes[token])) or (
            self.constraint is not None and self.constraint.complete
        ):
            self.finish_reason = "stop"
        elif len(self.output) >= self.max_tokens:
            self.finish_reason = "length"

    def forced(self) -> int | None:
        """The token that must come next, if there is only one. Raises GrammarError."""
        if self.paired_y is not None:
            token, self.paired_y = self.paired_y, None
            if self.constraint is None or self.constraint.allowed()[token]:
                return token
        return None if self.constraint is None else self.constraint.forced()

    def append_forced(self) -> None:
        """Take in every token that must come next. Raises GrammarError."""
        while self.finish_reason is None and (token := self.forced()) is not None:
            self.append(token, 0.0, None)
            self.metrics.forced_tokens += 1

    def give_up(self, reason: str) -> None:
        self.finish_reason, self.error = "abort", reason

    def _cut_at_stop(self, new: int) -> bool:
        for stop in self.params.stop:
            text = stop.encode()
            found = self.data.find(text, max(0, len(self.data) - new - len(text) + 1))
            if found >= 0:
                del self.data[found:]
                return True
        return False

    def result(self) -> RequestOutput:
        now, metrics = time.perf_counter(), self.metrics
        metrics.output_tokens = len(self.output)
        if self.first_token:
            metrics.first_token_s = self.first_token - self.arrived
            metrics.decode_s = now - self.first_token
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            outputs=[
                CompletionOutput(
                    text=self.data.decode("utf-8", "replace"),
                    token_ids=self.output,
                    finish_reason=self.finish_reason or "abort",
                    cumulative_logprob=self.logprob,
                    grounding=self.grounding,
                    logprobs=self.logprobs if self.params.logprobs is not None else None,
                )
            ],
            metrics=metrics,
            error=self.error,
        )
