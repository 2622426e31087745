"""Runs the model over a batch of sequences and chooses their next tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from holotron.engine.grammar import GrammarError
from holotron.engine.outputs import Pointed
from holotron.engine.pointer import Pointer
from holotron.engine.sampler import choose, top_logprobs
from holotron.engine.sequence import Sequence
from holotron.model.cache import HybridCache
from holotron.model.modeling import EncodedImages, HolotronForConditionalGeneration

_SPARE = 128  # tokens of room for keys and values beyond the prompt, so that few replies have to grow it


class Runner:
    """`skip_forced` False makes every token cost a forward pass and a choice; the text stays the same."""

    def __init__(self, model: HolotronForConditionalGeneration, *, skip_forced: bool = True) -> None:
        self.model = model
        self.language = model.config.language
        self.skip_forced = skip_forced
        self._image_token: int | None = model.config.img_context_token_id

    @torch.inference_mode()
    def prefill(self, sequences: list[Sequence]) -> HybridCache:
        """One padded batch of prompts; afterwards each sequence has its first token, or is finished."""
        if self.skip_forced:
            for sequence in sequences:  # a reply's forced beginning rides along with its prompt
                _guarded(sequence, sequence.append_forced)
        start = time.perf_counter()
        encoded = self._encode([s for s in sequences if s.images])
        encode_s = time.perf_counter() - start if encoded else 0.0
        longest = max(len(s.pending) for s in sequences)
        cache = HybridCache.empty(self.language, len(sequences), longest + _SPARE)
        hidden, lengths = self._forward(sequences, cache, encoded)
        prefill_s = time.perf_counter() - start - encode_s
        for row, sequence in enumerate(sequences):
            metrics = sequence.metrics
            metrics.queue_s = start - sequence.arrived
            metrics.encode_s, metrics.prefill_s = encode_s if sequence.images else 0.0, prefill_s
            metrics.state_bytes = cache.state_bytes()
            if sequence.images and sequence.params.use_grounding_head and Pointer.available(self.model):
                sequence.pointer = self._pointer(sequence, encoded[sequence][-1], hidden[row])
        self._advance(sequences, hidden, lengths)
        return cache

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence], cache: HybridCache) -> None:
        """One step of all running sequences, rows of `cache` in their order; it is advanced in place."""
        hidden, lengths = self._forward(sequences, cache, {})
        self._advance(sequences, hidden, lengths)

    def _encode(self, sequences: list[Sequence]) -> dict[Sequence, list[EncodedImages]]:
        """Images of one shape go through the tower together."""
        by_shape: dict[torch.Size, list[tuple[Sequence, int]]] = {}
        for sequence in sequences:
            for i, image in enumerate(sequence.images):
                by_shape.setdefault(image.pixel_values.shape[1:], []).append((sequence, i))
        found: dict[tuple[Sequence, int], EncodedImages] = {}
        for places in by_shape.values():
            tiles = [s.images[i].pixel_values for s, i in places]
            whole = self.model.encode_images(torch.cat(tiles).to(self.model.dtype))
            counts = [len(t) for t in tiles]
            parts = zip(torch.split(whole.tokens, counts), torch.split(whole.features, counts), strict=True)
            for place, (tokens, features) in zip(places, parts, strict=True):
                found[place] = EncodedImages(tokens, features, whole.columns)
        return {s: [found[s, i] for i in range(len(s.images))] for s in sequences}

    def _forward(
        self, sequences: list[Sequence], cache: HybridCache, encoded: dict[Sequence, list[EncodedImages]]
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states (B, T, D) of the pending tokens, and how many each row has."""
        lengths = torch.tensor([len(s.pending) for s in sequences])
        padding = 1 if self._image_token == 0 else 0  # any id but the image's
        ids = torch.full((len(sequences), int(lengths.max())), padding)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence.pending)] = torch.tensor(sequence.pending)
            sequence.pending = []
        tokens = [e.tokens.flatten(0, 1) for s in sequences for e in encoded.get(s, [])]
        embeddings = self.model.embed(ids, torch.cat(tokens) if tokens else None)
        return self.model.language_model(embeddings, lengths, cache), lengths

    def _pointer(self, sequence: Sequence, encoded: EncodedImages, hidden: Tensor) -> Pointer:
        image = sequence.images[-1]
        places = [i for i, token in enumerate(sequence.prompt) if token == self._image_token]
        return Pointer.build(self.model, encoded, hidden[places[-image.num_tokens :]], image)

    def _advance(self, sequences: list[Sequence], hidden: Tensor, lengths: Tensor) -> None:
        last = hidden[torch.arange(len(sequences)), lengths - 1]
        logits = self.model.language_model.lm_head(last).float()
        if sequences[0].vocabulary.has_unknown:
            logits = logits.masked_fill(sequences[0].vocabulary.unknown, -torch.inf)
        for row, sequence in enumerate(sequences):
            if sequence.finish_reason is None:
                _guarded(sequence, self._choose, sequence, last[row], logits[row])

    def _choose(self, sequence: Sequence, hidden: Tensor, logits: Tensor) -> None:
        """Append the next token and, unless skipping is off, all those that must follow."""
        if not self.skip_forced and (only := sequence.forced()) is not None:
            return sequence.append(only, 0.0, None)  # without a draw, so that skipping changes no later one
        allowed = None
        if sequence.constraint is not None:
            allowed = torch.from_numpy(sequence.constraint.allowed())
            logits = logits.masked_fill(~allowed, -torch.inf)
        params = sequence.params
        token = choose(logits, params, sequence.generator)
        logprobs = logits.log_softmax(-1)
        logprob = float(logprobs[token])
        if sequence.pointer is not None and sequence.pointer.starts_at(token):
            pointed = sequence.pointer.choose(hidden, allowed, params, sequence.generator)
            if pointed is not None:
                token, sequence.paired_y = pointed.x_token, pointed.y_token
                logprob = float(torch.tensor(pointed.probability).log())
                sequence.grounding.append(Pointed(pointed.x, pointed.y, pointed.probability))
        top = None if params.logprobs is None else top_logprobs(logprobs, token, params.logprobs)
        sequence.append(token, logprob, top)
        if self.skip_forced:
            sequence.append_forced()


def _guarded(sequence: Sequence, action: Callable[..., None], *arguments: object) -> None:
    """A request whose grammar fails is given up alone; the batch goes on."""
    try:
        action(*arguments)
    except GrammarError as error:
        sequence.give_up(str(error))
