"""Snapshots of prefixes in a plain dict, searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass

Prefix = tuple[int, ...]


@dataclass(slots=True)
class Kept:
    name: int
    nbytes: int
    used: int
    pins: int = 0


class SnapshotDict:
    """What `PrefixTree` means. `scores` follow Marconi: recency and FLOPs per byte, each scaled to at most 1."""

    def __init__(self, flops_per_token: float, flops_per_pair: float, flops_weight: float) -> None:
        self.kept: dict[Prefix, Kept] = {}
        self.coefficients = flops_per_token, flops_per_pair, flops_weight
        self.tick = 0

    def use(self, prefix: Prefix) -> None:
        self.tick += 1
        self.kept[prefix].used = self.tick

    def insert(self, prefix: Prefix, name: int, nbytes: int) -> None:
        self.kept[prefix] = Kept(name, nbytes, 0)
        self.use(prefix)

    def deepest(self, key: Prefix, below: int) -> Prefix | None:
        """The longest prefix of `key`, of at most `below` tokens, that is here."""
        lengths = [n for n in range(1, min(len(key), below) + 1) if key[:n] in self.kept]
        return key[: lengths[-1]] if lengths else None

    def nbytes(self, pinned_only: bool = False) -> int:
        return sum(k.nbytes for k in self.kept.values() if k.pins or not pinned_only)

    def flops(self, prefix: Prefix) -> float:
        """Token by token, from the nearest shorter snapshot to `prefix`."""
        start = len(self.deepest(prefix, len(prefix) - 1) or ())
        per_token, per_pair, _ = self.coefficients
        # token t attends to t earlier ones and, half counted, to itself
        return sum(per_token + per_pair * (t + 0.5) for t in range(start, len(prefix)))

    def scores(self) -> dict[int, float]:
        """By name; pinned snapshots have none."""
        free = {prefix: k for prefix, k in self.kept.items() if not k.pins}
        if not free:
            return {}
        oldest, newest = min(k.used for k in free.values()), max(k.used for k in free.values())
        worth = {prefix: self.flops(prefix) / k.nbytes for prefix, k in free.items()}
        best = max(worth.values()) or 1.0
        return {
            k.name: (k.used - oldest) / max(newest - oldest, 1) + self.coefficients[2] * worth[prefix] / best
            for prefix, k in free.items()
        }

    def evict(self, name: int) -> None:
        (prefix,) = (prefix for prefix, k in self.kept.items() if k.name == name)
        del self.kept[prefix]
