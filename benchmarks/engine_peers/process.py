"""A peer in a process of its own, as the benchmark sees it: ask, wait, measure its memory, stop it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MARK = "@@answer "  # as in worker.py


class PeerError(RuntimeError):
    """A peer could not do what it was asked; the message is the reason to report."""


class PeerProcess:
    """One worker. While it is paused it takes no CPU, so that peers can take turns without loading anew."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.command, self.log = name, command, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[str] = log.open("w")
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """The worker's answer, with `peak_rss_mib` of the process and its children meanwhile. Raises PeerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerError(f"the process is gone: {self._last_words()}") from None
        meter = MemoryMeter(self._process.pid)
        try:
            with meter:
                answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.stop(grace_s=0)
            raise PeerError(f"no answer to {do} within {timeout_s:g} s") from None
        if answer is None:
            raise PeerError(f"the process ended: {self._last_words()}")
        if "error" in answer:
            raise PeerError(answer["error"])
        return {**answer, "peak_rss_mib": round(meter.peak / 2**20, 1)}

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self, grace_s: float = 15) -> None:
        self.resume()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write('{"do": "quit"}\n')
            self._process.stdin.flush()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)  # it leads a session of its own, children included

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(json.loads(line.removeprefix(MARK)))
            elif not self._log.closed:
                self._log.write(line)
        self._answers.put(None)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1][-300:]


class MemoryMeter:
    """The largest sum of resident memory, bytes, of a process and its descendants, looked at five times a second."""

    def __init__(self, pid: int, interval_s: float = 0.2) -> None:
        self.pid, self.interval_s, self.peak = pid, interval_s, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryMeter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, tree_rss(self.pid))
            if self._stop.wait(self.interval_s):
                return


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and its descendants; memory they share counts for each."""
    children: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            sizes[int(folder.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        total += sizes.get(one, 0)
        todo += children.get(one, [])
    return total
