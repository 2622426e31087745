"""Thinking before a structured reply: the grammar begins where the thought ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holotron.engine.grammar import Constraint, GrammarError
from holotron.engine.sequence import Sequence
from holotron.engine.vocabulary import Vocabulary
from holotron.serving.server.reply import THINK, UNTHINK, Spelling

_LOOK_BACK = 24  # tokens: more than any template writes after opening a thought


def opens_thought(prompt: list[int], spelling: Spelling) -> bool:
    """Whether a prompt ends inside a thought, so that the reply starts with the rest of it."""
    return spelling.of(prompt[-_LOOK_BACK:]).rstrip().endswith(THINK)


def think_first(sequence: Sequence, spelling: Spelling, budget: int | None) -> None:
    """Let a prepared request whose prompt opens a thought think, at most `budget` tokens, then obey its grammar."""
    if sequence.constraint is not None or budget is not None:
        sequence.constraint = AfterThought(sequence.constraint, sequence.vocabulary, spelling, budget)


class AfterThought(Constraint):
    """Anything but an end of turn up to `</think>`, then what `inner` says; None says nothing."""

    def __init__(
        self, inner: Constraint | None, vocabulary: Vocabulary, spelling: Spelling, budget: int | None
    ) -> None:
        self._inner = inner
        self._words = vocabulary
        self._spelling = spelling
        self._left = budget
        self._tail = b""
        self._over = False
        self._closing: list[int] = []  # tokens with which a thought beyond its budget is closed

    @property
    def complete(self) -> bool:
        return self._over and self._inner is not None and self._inner.complete

    def allowed(self) -> NDArray[np.bool_]:
        if self._over:
            return np.ones(self._words.size, dtype=np.bool_) if self._inner is None else self._inner.allowed()
        mask = np.zeros(self._words.size, dtype=np.bool_)
        if self._closing or self._left == 0:
            mask[self._close()[0]] = True
            return mask
        mask[:] = True
        mask[list(self._words.specials - set(self._spelling.spoken))] = False
        mask[list(self._words.stops)] = False
        return mask

    def forced(self) -> int | None:
        if self._over:
            return None if self._inner is None else self._inner.forced()
        return self._close()[0] if self._closing or self._left == 0 else None

    def accept(self, token: int) -> None:
        if self._over:
            if self._inner is not None:
                self._inner.accept(token)
            return
        if self._closing and token == self._closing[0]:
            del self._closing[0]
        elif self._left:
            self._left -= 1
        self._tail = (self._tail + self._spelling(token))[-256:]
        _, closed, after = self._tail.partition(UNTHINK.encode())
        if closed:
            self._over = True
            if after.strip() and self._inner is not None:
                raise GrammarError(f"a token holds both the end of the thought and {after!r}")

    def _close(self) -> list[int]:
        if not self._closing:
            self._closing = self._words.encode(f"\n{UNTHINK}")
        return self._closing
