"""Snapshots of sequences, found again by the longest prefix of a new prompt.

A recurrent state cannot be cut back, so a snapshot serves only prompts that go through its exact position. The tree
is a radix tree over token keys; runs of keys hang on edges, snapshots on nodes.

What to drop follows Marconi (arXiv 2411.19379): the lowest sum of recency and of FLOPs saved per byte, each between
0 and 1 among the snapshots that may go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from holotron.engine.errors import EngineError

Payload = TypeVar("Payload")
Key = NDArray[np.int64]

_STRIDE = 0x9E3779B97F4A7C15  # odd, so that places of an image get keys of their own


def prompt_key(
    tokens: Sequence[int], image_token: int | None, image_hashes: Sequence[bytes], counts: Sequence[int]
) -> Key:
    """int64 (len(tokens),): text tokens as they are, below 0 for those of images.

    Image i is the next `counts[i]` of the `image_token`s; its keys follow from `image_hashes[i]` (a multiple of 8
    bytes) and the place inside the image. Four tokens in a row carry all of a 32-byte hash. Raises ValueError where
    placeholders and images do not match.
    """
    key = np.array(tokens, dtype=np.int64)
    where = np.flatnonzero(key == image_token) if image_token is not None else np.empty(0, dtype=np.int64)
    if len(where) != sum(counts) or not all(image_hashes):
        raise ValueError(
            f"{len(where)} image placeholders in the prompt for {len(counts)} images of {sum(counts)} tokens"
        )
    start = 0
    for digest, count in zip(image_hashes, counts, strict=True):
        words, place = np.frombuffer(digest, dtype="<u8"), np.arange(count, dtype=np.uint64)
        mixed = np.resize(words, count) + place * np.uint64(_STRIDE)
        key[where[start : start + count]] = ~(mixed >> np.uint64(1)).astype(np.int64)
        start += count
    return key


@dataclass(slots=True, eq=False)
class Snapshot(Generic[Payload]):
    """`position` tokens of prefix; `worth` FLOPs saved per byte, against starting at the next snapshot above."""

    payload: Payload
    position: int
    nbytes: int
    used: int  # tick of the last use
    worth: float = 0.0
    pins: int = 0


@dataclass(slots=True, eq=False)
class _Node(Generic[Payload]):
    run: Key  # from the parent to here; empty at the root only
    parent: _Node[Payload] | None
    children: dict[int, _Node[Payload]] = field(default_factory=dict)  # by the first key of their runs
    snapshot: Snapshot[Payload] | None = None


@dataclass(slots=True)
class PrefixStats:
    lookups: int = 0
    hits: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    evictions: int = 0
    snapshots: int = 0
    bytes: int = 0


class PrefixTree(Generic[Payload]):
    """Snapshots within `budget_bytes`. `on_evict(payload)` gives back what a dropped snapshot held.

    Going from position a to b costs (b - a) * `flops_per_token` + (b*b - a*a) / 2 * `flops_per_pair` (attention).
    `flops_weight` is how much FLOPs per byte count beside recency: at 0 the least recently used goes first; above 1
    snapshots that once were worth most may stay for good and crowd out all that is new.
    """

    def __init__(
        self,
        budget_bytes: int,
        on_evict: Callable[[Payload], None],
        *,
        flops_per_token: float = 1.0,
        flops_per_pair: float = 0.0,
        flops_weight: float = 1.0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.stats = PrefixStats()
        self._on_evict = on_evict
        self._flops_per_token, self._flops_per_pair, self._flops_weight = flops_per_token, flops_per_pair, flops_weight
        self._root: _Node[Payload] = _Node(np.empty(0, dtype=np.int64), None)
        self._nodes: dict[Snapshot[Payload], _Node[Payload]] = {}
        self._tick = 0

    def find(self, key: Key, below: int) -> Snapshot[Payload] | None:
        """The deepest snapshot of a prefix of `key` at a position <= `below`; it counts as used now."""
        found = self._deepest(key[: max(below, 0)])
        self.stats.lookups += 1
        self.stats.tokens_asked += len(key)
        if found is not None:
            self._use(found)
            self.stats.hits += 1
            self.stats.tokens_hit += found.position
        return found

    def touch(self, key: Key) -> bool:
        """Whether a snapshot of exactly `key` is here; it counts as used now. Ask before making one to insert."""
        found = self._deepest(key)
        if found is None or found.position != len(key):
            return False
        self._use(found)
        return True

    def insert(self, key: Key, payload: Payload, nbytes: int) -> bool:
        """Keep a snapshot of the whole prefix `key`. Others are evicted until it fits.

        False, and `payload` stays the caller's, if there is one already (which then counts as used now), or if pinned
        snapshots leave no room (then none is evicted).
        """
        if not len(key) or nbytes < 1:
            raise ValueError(f"a snapshot of {nbytes} bytes at position {len(key)}: both must be positive")
        if self.touch(key):
            return False
        if self.stats.bytes + nbytes > self.budget_bytes:
            if sum(s.nbytes for s in self._nodes if s.pins) + nbytes > self.budget_bytes:
                return False
            while self.stats.bytes + nbytes > self.budget_bytes:
                self.evict_one()
        node = self._place(key)
        node.snapshot = snapshot = Snapshot(payload, len(key), nbytes, 0)
        self._nodes[snapshot] = node
        self.stats.snapshots += 1
        self.stats.bytes += nbytes
        self._use(snapshot)
        for place in (node, *node.children.values()):
            self._value(place)
        return True

    def pin(self, snapshot: Snapshot[Payload]) -> None:
        """Keep it until `unpin`, however often it was pinned. Raises EngineError for an evicted one."""
        if snapshot not in self._nodes:
            raise EngineError(f"the snapshot at position {snapshot.position} was evicted and cannot be pinned")
        snapshot.pins += 1

    def unpin(self, snapshot: Snapshot[Payload]) -> None:
        """Undo one `pin`. Raises EngineError without one."""
        if not snapshot.pins:
            raise EngineError(f"the snapshot at position {snapshot.position} is not pinned")
        snapshot.pins -= 1

    def evict_one(self) -> bool:
        """Drop the snapshot of the lowest score that is not pinned. False if there is none."""
        free = [s for s in self._nodes if not s.pins]
        if not free:
            return False
        used = np.fromiter(map(attrgetter("used"), free), np.float64, len(free))
        worth = np.fromiter(map(attrgetter("worth"), free), np.float64, len(free))
        recency = (used - used.min()) / max(np.ptp(used), 1.0)
        self._drop(free[int((recency + self._flops_weight * worth / max(worth.max(), 1e-300)).argmin())])
        return True

    def payloads(self) -> list[Payload]:
        """What all snapshots hold."""
        return [snapshot.payload for snapshot in self._nodes]

    def check(self, pins: int | None = None) -> None:
        """Raises EngineError if the tree is broken, or holds other than `pins` pins in all (when given)."""
        seen: dict[Snapshot[Payload], _Node[Payload]] = {}
        stack = [(self._root, 0)]
        while stack:
            node, at = stack.pop()
            at += len(node.run)
            if node.snapshot is not None:
                seen[node.snapshot] = node
            elif node is not self._root and len(node.children) < 2:
                raise EngineError(f"a node at position {at} has no snapshot and {len(node.children)} children")
            if node.snapshot is not None and node.snapshot.position != at:
                raise EngineError(f"the snapshot of position {node.snapshot.position} hangs at position {at}")
            for first, child in node.children.items():
                if child.parent is not node or not len(child.run) or child.run[0] != first:
                    raise EngineError(f"the prefix tree is broken at position {at}, where it goes on with key {first}")
                stack.append((child, at))
        held, pinned = sum(s.nbytes for s in seen), sum(s.pins for s in seen)
        if seen != self._nodes or (len(seen), held) != (self.stats.snapshots, self.stats.bytes):
            raise EngineError(f"{len(seen)} snapshots of {held} bytes hang on the prefix tree; it counts {self.stats}")
        if held > self.budget_bytes or pinned != (pinned if pins is None else pins):
            raise EngineError(f"snapshots hold {held} bytes of {self.budget_bytes} and {pinned} pins; {pins} are known")

    def _use(self, snapshot: Snapshot[Payload]) -> None:
        self._tick += 1
        snapshot.used = self._tick

    def _deepest(self, key: Key) -> Snapshot[Payload] | None:
        node, at, found = self._root, 0, None
        while at < len(key) and (child := node.children.get(int(key[at]))) is not None:
            run = key[at : at + len(child.run)]
            if len(run) < len(child.run) or not (run == child.run).all():
                break
            node, at = child, at + len(run)
            found = node.snapshot or found
        return found

    def _place(self, key: Key) -> _Node[Payload]:
        """The node at the end of `key`, made if need be."""
        node = self._root
        while len(key):
            child = node.children.get(int(key[0]))
            if child is None:
                child = node.children[int(key[0])] = _Node(key.copy(), node)  # a slice would keep all of a prompt
            length = min(len(key), len(child.run))
            differs = key[:length] != child.run[:length]
            if differs.any():
                length = int(differs.argmax())
            if length < len(child.run):  # only part of the run is shared: a node between
                middle = node.children[int(key[0])] = _Node(child.run[:length].copy(), node)
                child.run, child.parent = child.run[length:].copy(), middle
                middle.children[int(child.run[0])] = child
                child = middle
            node, key = child, key[length:]
        return node

    def _value(self, node: _Node[Payload]) -> None:
        """Reckon the worth of the snapshot on `node` or, where it has none, of those next below."""
        above = node.parent
        while above is not None and above.snapshot is None:
            above = above.parent
        start = above.snapshot.position if above and above.snapshot else 0
        stack = [node]
        while stack:
            place = stack.pop()
            if (snapshot := place.snapshot) is None:
                stack += place.children.values()
            else:
                tokens, pairs = snapshot.position - start, (snapshot.position**2 - start**2) / 2
                flops = tokens * self._flops_per_token + pairs * self._flops_per_pair
                snapshot.worth = flops / snapshot.nbytes

    def _drop(self, snapshot: Snapshot[Payload]) -> None:
        node = self._nodes.pop(snapshot)
        node.snapshot = None
        self.stats.evictions += 1
        self.stats.snapshots -= 1
        self.stats.bytes -= snapshot.nbytes
        self._value(node)  # what lies below now saves more
        while node.snapshot is None and len(node.children) < 2 and (parent := node.parent) is not None:
            first = int(node.run[0])
            if not node.children:
                del parent.children[first]
                node = parent
                continue
            (child,) = node.children.values()
            child.run, child.parent = np.concatenate([node.run, child.run]), parent
            parent.children[first] = child
            break
        self._on_evict(snapshot.payload)
