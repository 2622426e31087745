"""One request while it is in the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from holotron.engine.grammar import Constraint
from holotron.engine.outputs import CompletionOutput, FinishReason, Pointed, RequestMetrics, RequestOutput
from holotron.engine.pointer import Pointer
from holotron.engine.prefix_tree import Key
from holotron.engine.sampling_params import SamplingParams
from holotron.engine.speculate import Lookup
from holotron.engine.vocabulary import Vocabulary
from holotron.model.images import ProcessedImage
from holotron.model.modeling import EncodedImages


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt and output; `seen` of them are in the cache, the rest are pending.

    A sequence runs while it has a `slot`. It may lose slot and pages to others, and then starts again at `seen` 0.
    """

    request_id: str
    prompt: list[int]
    images: list[ProcessedImage]
    params: SamplingParams
    vocabulary: Vocabulary
    constraint: Constraint | None
    generator: torch.Generator
    max_tokens: int
    key: Key = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of the prompt, see prefix_tree
    digest: int = 0  # of the key: equal for equal prompts
    spans: list[tuple[int, int]] = field(default_factory=list)  # of each image's tokens in the prompt
    tiles: list[list[bytes]] = field(default_factory=list)  # content hash of each tile of each image
    priority: int = 0  # smaller goes first
    user: str = ""  # requests of one user take turns with those of another
    tokens: list[int] = field(default_factory=list)
    seen: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)  # positions ahead at which to keep a snapshot
    lookup: Lookup | None = None  # drafts what may come next; None where nothing is drafted
    draft: list[int] = field(default_factory=list)  # to be verified in the step that is planned
    encoded: dict[int, EncodedImages] = field(default_factory=dict)
    above: list[Tensor] = field(default_factory=list)  # final hidden states at tokens of the newest image
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
        self.tokens = list(self.prompt)
        self.digest = hash(self.key.tobytes())
        self.metrics.prompt_tokens = len(self.prompt)
        self.metrics.image_tokens = sum(image.num_tokens for image in self.images)

    @property
    def pending(self) -> int:
        """Tokens that the model has not seen yet; at least one while the sequence is not finished."""
        return len(self.tokens) - self.seen

    @property
    def answering(self) -> bool:
        """Its prompt is through."""
        return self.seen >= len(self.prompt)

    @property
    def wants_pointer(self) -> bool:
        return bool(self.images) and self.params.use_grounding_head

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
        self.tokens.append(token)
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
