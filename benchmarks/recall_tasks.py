"""What the recall suite asks: four tasks whose answers stand somewhere earlier in the sequence.

Every batch is drawn from a numpy generator, so a seed names it. Ids are dense: each task has a vocabulary of its own,
with the image placeholder, where there are pictures, as its last id. `labels` holds -100 where nothing is asked; the
answer to the token at position t is `labels[:, t + 1]`, which is also the token that stands there.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Ints = NDArray[np.int64]

KEYS, VALUES = 64, 32  # text recall and needle
LETTERS = 32  # copy
CELL = 16  # px: the side of a button's cell, and of what one image token covers
LABELS = [c for c in string.ascii_uppercase + string.digits if c not in "0O1I"]
COLOURS = [
    (214, 48, 49), (9, 132, 227), (0, 148, 50), (253, 203, 110), (162, 82, 214), (24, 24, 28), (255, 255, 255),
    (0, 206, 201),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` and `labels` (B, T) int64. With pictures, `pixels` (n, 3, H, W) in -1..1 and, for every image token in its
    order, `seen` (tokens, 2): which label and which colour it covers.
    """

    ids: Tensor
    labels: Tensor
    pixels: Tensor | None = None
    seen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One task. A size is what grows: pairs, letters, words or screenshots; `length(size)` the tokens it fills."""

    name: str
    title: str
    vocabulary: int
    chance: float
    trained: tuple[int, ...]
    tested: tuple[int, ...]
    make: Callable[[np.random.Generator, int, int, bool], Batch]
    tokens_per_size: int = 1
    pictures: bool = False

    def length(self, size: int) -> int:
        return size * self.tokens_per_size


def choose(rng: np.random.Generator, batch: int, count: int, among: int) -> Ints:
    """(batch, count) different numbers below `among` in every row."""
    return rng.random((batch, among)).argsort(axis=1)[:, :count]


def asked(ids: Ints, first: int, stride: int) -> Tensor:
    """Labels for answers at positions first, first + stride, ... to the end."""
    labels = np.full_like(ids, -100)
    labels[:, first::stride] = ids[:, first::stride]
    return torch.from_numpy(labels)


def text_recall(rng: np.random.Generator, pairs: int, batch: int, test: bool) -> Batch:
    """k v k v ... | k v k v: the second half asks for up to 16 of the pairs in another order. All keys differ."""
    keys = choose(rng, batch, pairs, KEYS)
    values = KEYS + rng.integers(0, VALUES, (batch, pairs))
    picked = choose(rng, batch, min(pairs, 16), pairs)
    bar = np.full((batch, 1), KEYS + VALUES)
    told = np.stack([keys, values], axis=2).reshape(batch, -1)
    questions = np.stack([np.take_along_axis(t, picked, 1) for t in (keys, values)], axis=2).reshape(batch, -1)
    ids = np.concatenate([told, bar, questions], axis=1)
    return Batch(torch.from_numpy(ids), asked(ids, 2 * pairs + 2, 2))


def copy(rng: np.random.Generator, letters: int, batch: int, test: bool) -> Batch:
    """[ letters | the same letters: random, repeats allowed."""
    text = rng.integers(0, LETTERS, (batch, letters))
    start, bar = (np.full((batch, 1), LETTERS + i) for i in range(2))
    ids = np.concatenate([start, text, bar, text], axis=1)
    return Batch(torch.from_numpy(ids), asked(ids, letters + 2, 1))


def needle(rng: np.random.Generator, words: int, batch: int, test: bool) -> Batch:
    """Filler with one `key value` somewhere in it, then the key again: its value is asked.

    Filler words are the KEYS ids but for the last 8, which are the keys; no value stands in the filler.
    """
    ids = rng.integers(0, KEYS - 8, (batch, words + 2))
    where = rng.integers(0, words - 1, batch)
    rows = np.arange(batch)
    key = rng.integers(KEYS - 8, KEYS, batch)
    value = KEYS + rng.integers(0, VALUES, batch)
    ids[rows, where], ids[rows, where + 1] = key, value
    ids[:, -2], ids[:, -1] = key, value
    return Batch(torch.from_numpy(ids), asked(ids, words + 1, 1))


@cache
def buttons(jitter: int = 5) -> NDArray[np.uint8]:
    """(labels, colours, jitter, CELL, CELL, 3): every button, drawn at `jitter` offsets of a pixel."""
    font = ImageFont.load_default(11)
    drawn = np.zeros((len(LABELS), len(COLOURS), jitter, CELL, CELL, 3), np.uint8)
    offsets = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1)][:jitter]
    for i, label in enumerate(LABELS):
        for j, colour in enumerate(COLOURS):
            ink = "black" if sum(colour) > 380 else "white"
            for k, (dx, dy) in enumerate(offsets):
                image = Image.new("RGB", (CELL, CELL), (236, 238, 242))
                draw = ImageDraw.Draw(image)
                draw.rounded_rectangle((1 + dx, 1 + dy, 14 + dx, 14 + dy), 3, fill=colour, outline=(140, 140, 150))
                draw.text((8 + dx, 8 + dy), label, fill=ink, font=font, anchor="mm")
                drawn[i, j, k] = np.asarray(image)
    return drawn


def screenshots(rng: np.random.Generator, labels: Ints, colours: Ints, side: int = 2) -> Tensor:
    """Pictures (n, 3, side * CELL, side * CELL) in -1..1 of the buttons (n, side * side) in rows."""
    atlas = buttons()
    cells = atlas[labels, colours, rng.integers(0, atlas.shape[2], labels.shape)]
    grid = cells.reshape(-1, side, side, CELL, CELL, 3).transpose(0, 5, 1, 3, 2, 4)
    pixels = grid.reshape(-1, 3, side * CELL, side * CELL)
    return torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1)


def screen_recall(rng: np.random.Generator, shots: int, batch: int, test: bool) -> Batch:
    """A history of screenshots of 2 x 2 labelled buttons, then labels: the colour of each button is asked.

    All labels of a history differ. In training up to 8 questions are about any screenshot; in tests all 4 are about
    the oldest.
    """
    labels = choose(rng, batch, 4 * shots, len(LABELS))
    colours = rng.integers(0, len(COLOURS), labels.shape)
    pixels = screenshots(rng, labels.reshape(-1, 4), colours.reshape(-1, 4))
    opening, closing, image = (len(LABELS) + len(COLOURS) + i for i in range(3))
    seen = torch.from_numpy(np.stack([labels, colours], axis=2).reshape(-1, 2))
    history = np.tile(np.array([opening, *[image] * 4, closing]), (batch, shots))
    picked = choose(rng, batch, 4, 4) if test else choose(rng, batch, min(4 * shots, 8), 4 * shots)
    labels, answers = (np.take_along_axis(t, picked, 1) for t in (labels, len(LABELS) + colours))
    ids = np.concatenate([history, np.stack([labels, answers], axis=2).reshape(batch, -1)], axis=1)
    return Batch(torch.from_numpy(ids), asked(ids, history.shape[1] + 1, 2), pixels, seen)


TASKS = {
    task.name: task
    for task in (
        Task("text_recall", "associative recall, text", KEYS + VALUES + 1, 1 / VALUES, (4, 8, 16), (4, 8, 16, 32, 64),
             text_recall, 2),
        Task("copy", "copy", LETTERS + 2, 1 / LETTERS, (8, 16, 32), (8, 16, 32, 64, 128), copy),
        Task("needle", "needle in filler", KEYS + VALUES, 1 / VALUES, (16, 32, 64, 128),
             (16, 64, 128, 256, 512, 1024), needle),
        Task("screen_recall", "associative recall, screenshots", len(LABELS) + len(COLOURS) + 3, 1 / len(COLOURS),
             (1, 2, 4), (1, 2, 4, 8), screen_recall, 6, True),
    )
}  # fmt: skip
