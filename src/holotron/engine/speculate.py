"""Drafts by prompt lookup: what followed the last tokens when they stood in the sequence before.

Agents copy: names from the goal, text from the page, the shape of their own earlier replies. A draft costs no model; it
is verified in one pass, and where it was wrong the recurrent state goes back to where it started.
"""

from __future__ import annotations

from collections.abc import Sequence


class Lookup:
    """Where each run of `size` tokens of one growing sequence last went on. `barred` tokens are never drafted."""

    def __init__(self, barred: frozenset[int], size: int = 3) -> None:
        self._barred = barred
        self._size = size
        self._next: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens whose runs are in the table

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`; `tokens` must continue those of the last call."""
        size = self._size
        for end in range(max(self._known, size), len(tokens)):
            self._next[tuple(tokens[end - size : end])] = end
        self._known = max(self._known, len(tokens))
        start = self._next.get(tuple(tokens[-size:]))
        if start is None:
            return []
        found = []
        for token in tokens[start : start + most]:
            if token in self._barred:
                break
            found.append(token)
        return found
