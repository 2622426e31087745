"""Runs the model over a step's pieces of sequences and chooses their next tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from holotron.engine.grammar import GrammarError
from holotron.engine.outputs import Pointed
from holotron.engine.pointer import Pointer
from holotron.engine.sampler import choose, top_logprobs
from holotron.engine.sequence import Sequence
from holotron.engine.vision_cache import VisionCache
from holotron.model.flat import Run, SavedState, StatePool, forward_flat
from holotron.model.modeling import EncodedImages, HolotronForConditionalGeneration


class Runner:
    """`skip_forced` False makes every token cost a forward pass and a choice; the text stays the same."""

    def __init__(
        self,
        model: HolotronForConditionalGeneration,
        pool: StatePool,
        vision: VisionCache,
        *,
        skip_forced: bool = True,
    ) -> None:
        self.model, self.pool, self.vision = model, pool, vision
        self.skip_forced = skip_forced

    @torch.inference_mode()
    def step(self, planned: list[tuple[Sequence, int]]) -> None:
        """Compute `count` pending tokens of each sequence, runs of one first, and choose for those that are through."""
        start = time.perf_counter()
        self._encode([sequence for sequence, _ in planned])
        encoded = time.perf_counter()
        embeddings = torch.cat([self._embed(sequence, count) for sequence, count in planned])
        saved = {s.request_id: self.pool.save(s.slot) for s, _ in planned if s.draft and s.slot is not None}
        runs = []
        for sequence, count in planned:
            assert sequence.slot is not None
            runs.append(Run(sequence.slot, sequence.seen, count, sequence.pages))
        hidden = forward_flat(self.model.language_model, embeddings, runs, self.pool)
        took = time.perf_counter() - encoded
        ends = torch.tensor([count for _, count in planned]).cumsum(0)
        due: list[tuple[Sequence, int]] = []
        rows: list[int] = []
        for (sequence, count), end in zip(planned, ends.tolist(), strict=True):
            if sequence.seen < len(sequence.prompt):
                sequence.metrics.encode_s += encoded - start if sequence.encoded else 0.0
                sequence.metrics.prefill_s += took
            self._watch(sequence, hidden[end - count : end])
            if count - len(sequence.draft) == sequence.pending:
                due.append((sequence, len(rows)))
                rows += range(end - 1 - len(sequence.draft), end)
            sequence.seen += count - len(sequence.draft)
        if due:
            last = hidden[rows]
            self._advance(due, last, saved)

    def begin(self, sequence: Sequence) -> None:
        """A reply's forced beginning rides along with its prompt."""
        if self.skip_forced and not sequence.output:
            _guarded(sequence, sequence.append_forced)

    def _encode(self, sequences: list[Sequence]) -> None:
        """The images that the rest of these prompts needs, tile by tile, each distinct tile once."""
        wanted: dict[bytes, Tensor] = {}
        needed = []
        for sequence in sequences:
            for i, (_, end) in enumerate(sequence.spans):
                if end > sequence.seen and i not in sequence.encoded:
                    needed.append((sequence, i))
                    wanted |= zip(sequence.tiles[i], sequence.images[i].pixel_values, strict=True)
        if not needed:
            return
        keys = list(wanted)
        entries: dict[bytes, Any] = dict(zip(keys, self.vision.get_many(keys), strict=True))
        keeps = self.model.grounding_head is not None  # nothing else asks for the tower's own features
        fresh = sorted((key for key in keys if entries[key] is None), key=lambda key: tuple(wanted[key].shape))
        for _, group in groupby(fresh, key=lambda key: wanted[key].shape):
            same = list(group)
            found = self.model.encode_images(torch.stack([wanted[key] for key in same]).to(self.model.dtype))
            for row, key in enumerate(same):
                entries[key] = self.vision.put(key, found.tokens[row], found.features[row] if keeps else None)
        made = set(fresh)
        for sequence, i in needed:
            tiles = [entries[key] for key in sequence.tiles[i]]
            features = [tile.features for tile in tiles if tile.features is not None]
            sequence.encoded[i] = EncodedImages(
                torch.stack([tile.tokens for tile in tiles]),
                torch.stack(features) if features else torch.empty(0),
                sequence.images[i].tokens_per_tile[0],
            )
            sequence.metrics.tiles_requested += len(tiles)
            own = made.intersection(sequence.tiles[i])
            sequence.metrics.tiles_encoded += len(own)
            made -= own  # a tile that two sequences share was encoded for one of them

    def _embed(self, sequence: Sequence, count: int) -> Tensor:
        """(count, hidden) of the next tokens, image tokens replaced by what the tower saw."""
        start, end = sequence.seen, sequence.seen + count - len(sequence.draft)
        ids = torch.tensor([*sequence.tokens[start:end], *sequence.draft])
        embeddings: Tensor = self.model.language_model.backbone.embeddings(ids)
        for i, (first, last) in enumerate(sequence.spans):
            low, high = max(first, start), min(last, end)
            if low < high:
                rows = sequence.encoded[i].tokens.flatten(0, 1)
                embeddings[low - start : high - start] = rows[low - first : high - first].to(embeddings.dtype)
        return embeddings

    def _watch(self, sequence: Sequence, hidden: Tensor) -> None:
        """Collect what the grounding head needs of the newest image; build it when the image is through."""
        if sequence.pointer is not None or not (sequence.wants_pointer and Pointer.available(self.model)):
            return
        first, last = sequence.spans[-1]
        start = sequence.seen
        low, high = max(first, start), min(last, start + len(hidden))
        if low < high:
            sequence.above.append(hidden[low - start : high - start])
            if high == last:
                image = len(sequence.images) - 1
                above = torch.cat(sequence.above)
                sequence.pointer = Pointer.build(self.model, sequence.encoded[image], above, sequence.images[image])
                sequence.above.clear()

    def _advance(self, due: list[tuple[Sequence, int]], last: Tensor, saved: dict[str, SavedState]) -> None:
        """Choose for each sequence from its first row of `last` on; the rows after it belong to its draft."""
        logits = self.model.language_model.lm_head(last).float()
        vocabulary = due[0][0].vocabulary
        if vocabulary.has_unknown:
            logits = logits.masked_fill(vocabulary.unknown, -torch.inf)
        for sequence, row in due:
            draft, sequence.draft = sequence.draft, []
            right = 0  # tokens of the draft that were chosen too
            while sequence.finish_reason is None:
                before = len(sequence.tokens)
                _guarded(sequence, self._choose, sequence, last[row + right], logits[row + right])
                chosen = sequence.tokens[before:]
                if right == len(draft) or not chosen or chosen != draft[right : right + len(chosen)]:
                    break
                right += len(chosen)
            sequence.metrics.draft_tokens += len(draft)
            sequence.metrics.accepted_tokens += right
            if right == len(draft):
                sequence.seen += right
            elif sequence.slot is not None:  # the state went too far; what was chosen is read again
                self.pool.restore(sequence.slot, saved[sequence.request_id])
                sequence.seen -= 1

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
