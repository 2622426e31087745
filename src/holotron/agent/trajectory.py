"""Trajectories on disk: a run folder, one folder per episode, every step written before the next begins.

RUN/run.json                          what the run was made with
RUN/summary.json                      written at the end
RUN/episodes/TASK-SEED/step-000.png   what was seen, written to another name and renamed
RUN/episodes/TASK-SEED/steps.jsonl    one JSON line per step, flushed and synced
RUN/episodes/TASK-SEED/episode.json   written last: an episode without it is unfinished
RUN/episodes/TASK-SEED.partial-N/     an attempt that did not finish, kept as it was
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from holotron.agent.records import FORMAT, EpisodeResult, Record, RunInfo, StepRecord
from holotron.contract.conversation import Screenshot

PARTIAL = re.compile(r"\.partial-(\d+)$")


class TrajectoryError(RuntimeError):
    """A run folder could not be written or read. The message names the file and what is kept."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode as read back. `result` is None if it did not finish; `torn`: its last line was cut off."""

    folder: Path
    steps: tuple[StepRecord, ...]
    result: EpisodeResult | None
    torn: bool = False

    @property
    def finished(self) -> bool:
        return self.result is not None


@dataclass(frozen=True, slots=True)
class Run:
    folder: Path
    info: RunInfo
    episodes: tuple[Episode, ...]


def episode_folder(run_dir: Path, task: str, seed: int) -> Path:
    """Where the episode of this task and seed lives; names that are no file names get a digest."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", task)[:80].strip("-")
    if name != task:
        name = f"{name or 'task'}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"
    return run_dir / "episodes" / f"{name}-{seed}"


class TrajectoryWriter:
    """Writes one episode. Calls block until the bytes are on disk; call them off the event loop.

    Any write that fails raises TrajectoryError; everything written before stays readable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._steps = 0

    def begin(self) -> None:
        """Start with an empty folder; what an earlier attempt left there is moved aside."""
        if self.folder.is_dir() and any(self.folder.iterdir()):
            self.set_aside("left unfinished by an earlier session")
        with self._explained("create the folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._steps = 0

    def screenshot(self, index: int, shot: Screenshot) -> tuple[str, str]:
        """Store the PNG of step `index`; returns its file name and the SHA-256 of its bytes."""
        name = f"step-{index:03d}.png"
        with self._explained(f"write {name}"):
            write_atomically(self.folder / name, shot.png)
        return name, hashlib.sha256(shot.png).hexdigest()

    def step(self, record: StepRecord) -> None:
        line = as_json(record) + b"\n"
        with self._explained("append a step to steps.jsonl"):
            append_line(self.folder / "steps.jsonl", line)
        self._steps += 1

    def finish(self, result: EpisodeResult) -> None:
        with self._explained("write episode.json"):
            write_atomically(self.folder / "episode.json", as_json(result) + b"\n")

    def set_aside(self, reason: str) -> Path | None:
        """Move this attempt to the next free `.partial-N` name, with its reason; None if there is nothing."""
        if not self.folder.is_dir():
            return None
        with self._explained("move an unfinished attempt aside"):
            target = _free_partial(self.folder)
            self.folder.rename(target)
        note = {"reason": reason, "at": time.time()}
        with suppress(OSError):  # the steps are what matters
            write_atomically(target / "partial.json", json.dumps(note).encode() + b"\n")
        return target

    def _explained(self, doing: str) -> _Explained:
        return _Explained(self.folder, doing, self._steps)


class _Explained:
    """Turns an OSError into a TrajectoryError that says what is kept and what to do."""

    def __init__(self, folder: Path, doing: str, steps: int) -> None:
        self.folder, self.doing, self.steps = folder, doing, steps

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise TrajectoryError(
                f"could not {self.doing} in {self.folder}: {error.strerror or error}. "
                f"Kept there: {self.steps} complete step(s) of this episode, and every finished episode of "
                "the run. Make room (or fix the permissions) and resume the run."
            ) from error


def as_json(record: Record) -> bytes:
    """One line. Text that UTF-8 cannot carry (half a surrogate pair, made up by a model) becomes "?"."""
    try:
        return record.model_dump_json(fallback=str).encode()
    except PydanticSerializationError:
        text = json.dumps(record.model_dump(), ensure_ascii=False, default=str)
        return text.encode("utf-8", "replace")


def write_atomically(path: Path, content: bytes) -> None:
    """The file is either the old one or the whole new one, also after a crash. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def append_line(path: Path, line: bytes) -> None:
    """Append and sync; a line that does not fit is taken back, so that no torn one stays. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def _free_partial(folder: Path) -> Path:
    number = 1
    while folder.with_name(f"{folder.name}.partial-{number}").exists():
        number += 1
    return folder.with_name(f"{folder.name}.partial-{number}")


def write_run(run_dir: Path, info: RunInfo) -> None:
    """Create the run folder and its run.json. Raises TrajectoryError."""
    try:
        (run_dir / "episodes").mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / "run.json", info.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise TrajectoryError(
            f"could not create the run folder {run_dir}: {error.strerror or error}. Choose a writable folder."
        ) from error


def read_info(run_dir: Path) -> RunInfo:
    """Raises TrajectoryError if `run_dir` is not a run folder, or one of a newer format."""
    path = run_dir / "run.json"
    try:
        info = RunInfo.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise TrajectoryError(f"{run_dir} is not a run folder: it has no run.json.") from None
    except (OSError, ValidationError) as error:
        raise TrajectoryError(f"{path} cannot be read: {error}") from error
    if info.format > FORMAT:
        raise TrajectoryError(f"{path} has format {info.format}; this version reads up to {FORMAT}. Upgrade.")
    return info


def read_steps(path: Path) -> tuple[tuple[StepRecord, ...], bool]:
    """The complete steps of a steps.jsonl, and whether its last line was torn.

    Only the last line can be torn by a crash; damage before it raises TrajectoryError naming the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return (), False
    except OSError as error:
        raise TrajectoryError(f"{path} cannot be read: {error.strerror or error}") from error
    tail = lines.pop()  # what follows the last newline: empty unless the last write was cut
    steps = []
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(StepRecord.model_validate_json(line))
        except ValidationError as error:
            if number == len(lines) and not tail:
                return tuple(steps), True
            raise TrajectoryError(f"{path} line {number} is damaged: {error.errors()[0]['msg']}") from error
    return tuple(steps), bool(tail)


def read_result(folder: Path) -> EpisodeResult | None:
    """The result of a finished episode; None if episode.json is missing or unreadable, hence unfinished."""
    try:
        return EpisodeResult.model_validate_json((folder / "episode.json").read_bytes())
    except (OSError, ValidationError):
        return None


def read_episode(folder: Path) -> Episode:
    """Raises TrajectoryError if a line other than the last is damaged, or there is no such folder."""
    if not folder.is_dir():
        raise TrajectoryError(f"no episode folder {folder}")
    steps, torn = read_steps(folder / "steps.jsonl")
    return Episode(folder, steps, read_result(folder), torn)


def episode_folders(run_dir: Path, partial: bool = False) -> Iterator[Path]:
    """Episode folders by name; those of unfinished attempts only with `partial`."""
    root = run_dir / "episodes"
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and (partial or not PARTIAL.search(folder.name)):
            yield folder


def read_run(run_dir: Path, partial: bool = False) -> Run:
    """A whole run, finished or not. `partial` also reads the attempts that were set aside."""
    info = read_info(run_dir)
    return Run(run_dir, info, tuple(read_episode(folder) for folder in episode_folders(run_dir, partial)))
