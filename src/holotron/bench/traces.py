"""Recorded agent sessions as load: what was seen, what was replied, how long it took to come back.

FOLDER/index.json          a TraceSet: every trace, turn by turn
FOLDER/images/SHA256.png   each different screenshot once

A replay sends the history up to a turn, throws the live reply away and goes on with the recorded one, so every engine
gets the same prompts.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holotron.contract.contract import Contract, get_contract
from holotron.contract.conversation import Conversation, Screenshot, Settings, Turn
from holotron.contract.policy import ContractError
from holotron.contract.step import Step

FORMAT = 1
CONTRACT = "holotron3"
_SHA = re.compile(r"[0-9a-f]{64}")


class TraceError(ValueError):
    """A folder of traces cannot be read. The message names the file and what to do."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TraceTurn(_Record):
    """`image` is the SHA-256 of the PNG's bytes, sizes are its pixels; `reply` is a step in the contract's own text.

    `think_s` is the time between the reply and the next request: the browser's and the page's.
    """

    image: Annotated[str, Field(pattern=_SHA.pattern)]
    width: Annotated[int, Field(ge=1)]
    height: Annotated[int, Field(ge=1)]
    reply: str
    observation: str = ""
    result: str = "ok"
    is_error: bool = False
    think_s: Annotated[float, Field(ge=0)] = 0.0


class Trace(_Record):
    name: str
    goal: str
    turns: tuple[TraceTurn, ...]


class TraceSet(_Record):
    """`source` says what was recorded: miniwob, pages or drawn. Equal `seed` and `source` give equal files."""

    format: int = FORMAT
    source: str
    seed: int
    contract: str = CONTRACT
    viewport: tuple[int, int]
    traces: tuple[Trace, ...]


@dataclass(slots=True)
class TraceFolder:
    """A trace set and its screenshots. Raises TraceError from `read`."""

    folder: Path
    set: TraceSet
    _pngs: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> TraceFolder:
        index = folder / "index.json"
        try:
            found = TraceSet.model_validate_json(index.read_bytes())
        except FileNotFoundError:
            raise TraceError(f"{folder} holds no traces (no index.json); record some first") from None
        except (OSError, ValidationError) as error:
            raise TraceError(f"{index} cannot be read: {error}") from error
        if found.format > FORMAT:
            raise TraceError(f"{index} has format {found.format}; this version reads up to {FORMAT}")
        missing = {t.image for trace in found.traces for t in trace.turns} - {p.stem for p in _images(folder)}
        if missing:
            raise TraceError(f"{folder} lacks {len(missing)} screenshots, {min(missing)} first; record it again")
        return cls(folder, found)

    def path(self, image: str) -> Path:
        return self.folder / "images" / f"{image}.png"

    def png(self, image: str) -> bytes:
        if image not in self._pngs:
            self._pngs[image] = self.path(image).read_bytes()
        return self._pngs[image]

    def contract(self, images_kept: int | None) -> Contract:
        """The contract of the set, with a window of so many screenshots; None keeps all (an append-only history)."""
        kept = max(len(trace.turns) for trace in self.set.traces) if images_kept is None else images_kept
        return get_contract(self.set.contract, images_kept=kept)

    def conversation(self, trace: Trace, turn: int, contract: Contract) -> Conversation:
        """What the agent would have in hand when it asks for turn number `turn`, from 0."""
        turns = []
        for place, recorded in enumerate(trace.turns[: turn + 1]):
            png = self.png(recorded.image)
            shot = Screenshot(png, recorded.width, recorded.height, float(recorded.width), float(recorded.height))
            past = place < turn
            step = contract.parse(recorded.reply) if past else None
            result = recorded.result if past else None
            turns.append(Turn(shot, recorded.observation, step, result, recorded.is_error and past))
        return Conversation(trace.goal, turns, Settings())


class TraceWriter:
    """Collects traces and writes their screenshots as they come; `close` writes the index, last."""

    def __init__(self, folder: Path, source: str, seed: int, viewport: tuple[int, int]) -> None:
        self.folder, self.source, self.seed, self.viewport = folder, source, seed, viewport
        self.traces: dict[str, Trace] = {}
        (folder / "images").mkdir(parents=True, exist_ok=True)
        self._contract = get_contract(CONTRACT)

    def turn(
        self, png: bytes, step: Step, *, observation: str = "", result: str = "ok", is_error: bool = False,
        think_s: float = 0.0,
    ) -> TraceTurn:  # fmt: skip
        """Stores the screenshot and returns the turn. Raises ContractError for a step that the contract cannot say."""
        reply = self._contract.dump(step)
        if self._contract.parse(reply) != step:
            raise ContractError(f"a recorded step does not survive the contract: {reply}")
        name = hashlib.sha256(png).hexdigest()
        path = self.folder / "images" / f"{name}.png"
        if not path.exists():
            path.write_bytes(png)
        width, height = struct.unpack(">II", png[16:24])
        return TraceTurn(
            image=name, width=width, height=height, reply=reply, observation=observation, result=result,
            is_error=is_error, think_s=think_s,
        )  # fmt: skip

    def add(self, name: str, goal: str, turns: list[TraceTurn]) -> None:
        self.traces[name] = Trace(name=name, goal=goal, turns=tuple(turns))

    def close(self) -> TraceFolder:
        """Writes the index, traces by name. Screenshots of an older recording that it does not name are removed."""
        traces = tuple(self.traces[name] for name in sorted(self.traces))
        found = TraceSet(source=self.source, seed=self.seed, viewport=self.viewport, traces=traces)
        used = {turn.image for trace in traces for turn in trace.turns}
        for path in _images(self.folder):
            if path.stem not in used:
                path.unlink()
        text = json.dumps(found.model_dump(mode="json"), ensure_ascii=False, indent=0)
        (self.folder / "index.json").write_text(text + "\n", encoding="utf-8")
        return TraceFolder(self.folder, found)


def think_time(rng: random.Random) -> float:
    """Seconds between a reply and the next screenshot, around the 2 s of a browser at work."""
    return round(min(rng.lognormvariate(0.6, 0.4), 10.0), 2)


def _images(folder: Path) -> list[Path]:
    return [path for path in (folder / "images").glob("*.png") if _SHA.fullmatch(path.stem)]
