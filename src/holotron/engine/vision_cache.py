"""Remembers encoded tiles by content: successive screenshots share most of their tiles."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

_DIGEST = 32  # bytes: a collision would show one agent another's screen, so nobody may be able to make one


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One encoded tile: `tokens` (rows*columns, hidden) for the language model, `features` (cells, F) of the tower."""

    tokens: Tensor
    features: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.features) if t is not None)


class VisionCache:
    """The tiles used last, as many as fit into `budget_bytes`. One thread at a time.

    `requested` counts the tiles asked for, `encoded` those that had to be encoded and were put: the rest was reused.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.nbytes = 0
        self.requested = 0
        self.encoded = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # the one used last comes last

    def __len__(self) -> int:
        return len(self._entries)

    def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """What is remembered under each key of `tile_hashes`. An entry handed out stays valid when it is dropped."""
        self.requested += len(keys)
        found = [self._entries.get(key) for key in keys]
        for key, entry in zip(keys, found, strict=True):
            if entry is not None:
                self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, tokens: Tensor, features: Tensor | None = None) -> Entry:
        """Remember copies in place of what was there, drop the least recently used. Returns what `get_many` would.

        What exceeds the whole budget is not kept.
        """
        self.encoded += 1
        entry = Entry(_copy(tokens), None if features is None else _copy(features))
        if (former := self._entries.pop(key, None)) is not None:
            self.nbytes -= former.nbytes
        if entry.nbytes <= self.budget_bytes:
            self._entries[key] = entry
            self.nbytes += entry.nbytes
            while self.nbytes > self.budget_bytes:
                self.nbytes -= self._entries.popitem(last=False)[1].nbytes
        return entry


def _copy(tensor: Tensor) -> Tensor:
    # a tile is a slice of what its whole batch became, and would keep all of that alive
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def config_fingerprint(*configs: Mapping[str, Any]) -> bytes:
    """Of the settings that shape an encoded tile: the vision tower's, the projector's, the processor's."""
    return blake2b(json.dumps(configs, sort_keys=True, default=str).encode(), digest_size=_DIGEST).digest()


def tile_hashes(pixel_values: Tensor, fingerprint: bytes = b"") -> list[bytes]:
    """Keys of tiles (n, channels, height, width): of their exact values, dtype, shape, and the `fingerprint`.

    The float pixels are hashed as they are, about 1.3 GB/s: no smaller form gives them back exactly, since resampling
    overshoots the range of bytes.
    """
    tiles = pixel_values.detach().cpu()
    header = repr((fingerprint, str(tiles.dtype), tuple(tiles.shape[1:]))).encode()
    found = []
    for tile in tiles:
        digest = blake2b(header, digest_size=_DIGEST)
        digest.update(tile.reshape(-1).view(torch.uint8).numpy())
        found.append(digest.digest())
    return found


def image_hash(tiles: Sequence[bytes], grid: tuple[int, int], size: tuple[int, int]) -> bytes:
    """Of a whole picture: its `tile_hashes` in order, columns and rows of tiles, width and height in pixels."""
    header = struct.pack("<4q", *grid, *size)
    return blake2b(header + b"".join(tiles), digest_size=_DIGEST).digest()
