"""Who runs: admission by pages and slots, turns between users, chunks of prompts, and who gives way.

A step takes one token or forced span of every sequence that is past its prompt, and fills up with pieces of prompts.
A piece ends where a snapshot is to be kept. Memory is counted exactly: a sequence is admitted when the pages of its
whole prompt are free, and one that needs a page where there is none takes it from snapshots first, then from the
sequence admitted last, which starts again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from holotron.engine.pages import OutOfPages, PagePool
from holotron.engine.sequence import Sequence

MOST_DRAFTED = 12  # tokens: a rejected draft costs their pass


class Scheduler:
    """`step_tokens` is the most one step computes, unless running sequences alone need more."""

    def __init__(self, pages: PagePool, slots: int, step_tokens: int) -> None:
        self.pages = pages
        self.step_tokens = step_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # in order of admission
        self.free_slots = list(reversed(range(slots)))
        self.preemptions = 0
        self._served: Counter[str] = Counter()  # tokens computed for each user that has requests here

    def add(self, sequence: Sequence) -> None:
        if not any(s.user == sequence.user for s in (*self.waiting, *self.running)):
            # who comes back after a pause has no credit for the time away
            self._served[sequence.user] = min(self._served.values(), default=0)
        self.waiting.append(sequence)

    def admit(self, start: Callable[[Sequence], None], make_room: Callable[[], bool]) -> list[Sequence]:
        """Give slots and prompt pages to those whose turn it is, in order. `start` puts a sequence at the longest known
        prefix (slot set, pages of the prefix held); `make_room` drops a snapshot and says whether it could. Of requests
        with the same prompt one reads it first, and the others start from there."""
        admitted = []
        reading = {sequence.digest for sequence in self.running if not sequence.answering}
        while self.free_slots and (ready := [s for s in self.waiting if s.digest not in reading]):
            sequence = min(ready, key=self._turn)
            if not self._has_room(1, make_room):  # for the page in which a known prefix ends
                break
            self.waiting.remove(sequence)
            sequence.slot = self.free_slots.pop()
            start(sequence)
            # what a prefix shares is held from here on, so that making room cannot take it
            if not self._has_room(self.pages.pages_for(len(sequence.tokens) + 1) - len(sequence.pages), make_room):
                self._free(sequence)
                sequence.seen, sequence.borders, sequence.pointer = 0, [], None
                self.waiting.append(sequence)
                if self.running:
                    break  # pages come back when one of them ends
                raise OutOfPages(f"{sequence.request_id} needs more keys and values than the whole pool holds")
            self._reach(sequence, len(sequence.tokens) + 1)
            self.running.append(sequence)
            admitted.append(sequence)
            reading.add(sequence.digest)
        return admitted

    def plan(self, make_room: Callable[[], bool]) -> list[tuple[Sequence, int]]:
        """Sequences and how many of their pending and drafted tokens to compute now, those of one token first."""
        self._grow(make_room)
        planned = [(s, s.pending + self._draft(s)) for s in self.running if s.answering]
        budget = self.step_tokens - sum(count for _, count in planned)
        for sequence in self.running:
            if sequence.answering or (budget <= 0 and planned):
                continue
            ahead = [border for border in sequence.borders if border > sequence.seen]
            count = min([sequence.pending, max(budget, 1), *(border - sequence.seen for border in ahead[:1])])
            planned.append((sequence, count))
            budget -= count
        for sequence, count in planned:
            self._served[sequence.user] += count
        return sorted(planned, key=lambda pair: pair[1] > 1)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out and free what it held."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.slot is not None:
            self.running.remove(sequence)
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.free_slots.append(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.slot, sequence.pages = None, []

    def _turn(self, sequence: Sequence) -> tuple[int, int, float]:
        return sequence.priority, self._served[sequence.user], sequence.arrived

    def _reach(self, sequence: Sequence, tokens: int) -> None:
        missing = self.pages.pages_for(tokens) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.pages.allocate(missing)

    def _has_room(self, pages: int, make_room: Callable[[], bool]) -> bool:
        while self.pages.free < pages:
            if not make_room():
                return False
        return True

    def _grow(self, make_room: Callable[[], bool]) -> None:
        """A page for whoever is about to outgrow the last one."""
        for sequence in list(self.running):
            if sequence.slot is None:  # has just given way to another
                continue
            missing = self.pages.pages_for(len(sequence.tokens)) - len(sequence.pages)
            while missing > 0 and not self._has_room(missing, make_room):
                last = max(self.running, key=lambda s: (s.priority, self.running.index(s)))
                if last is sequence and len(self.running) == 1:
                    raise OutOfPages(f"{sequence.request_id} has outgrown the whole pool of keys and values")
                self._preempt(last)
                if last is sequence:
                    break
            if sequence.slot is not None:
                self._reach(sequence, len(sequence.tokens))

    def _draft(self, sequence: Sequence) -> int:
        """How many tokens are drafted beyond the one that is pending: as far as the pages it has go."""
        room = len(sequence.pages) * self.pages.page_tokens - len(sequence.tokens)
        most = min(room, MOST_DRAFTED, sequence.max_tokens - len(sequence.output) - 1)
        if sequence.lookup is None or sequence.pending != 1 or most < 1:
            sequence.draft = []
        else:
            sequence.draft = sequence.lookup.draft(sequence.tokens, most)
        return len(sequence.draft)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, nothing lost but the work: the tokens chosen so far are read again as a prompt."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.seen, sequence.borders = 0, []
        sequence.above.clear()
        self.waiting.append(sequence)
        self.preemptions += 1
