"""The process around one engine: reads commands from stdin, one JSON object a line, and answers on stdout.

The standard library and `holotron.bench.replay` only: a peer's environment need not hold anything else of ours. Answers
start with MARK, so that whatever else an engine prints does not disturb.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from holotron.bench.replay import Answer, Request, plan, read_requests, replay, summarize

MARK = "@@answer "


class Engine(Protocol):
    """What a peer script implements. `placeholder` is the id of an image's place in a prompt."""

    async def start(self) -> dict[str, Any]:
        """Load; returns what is worth knowing of it (versions, choices)."""

    async def clear(self) -> None:
        """Forget every prompt and picture."""

    async def ask(self, request: Request) -> Answer: ...

    async def settle(self) -> None:
        """Return when nothing runs any more of requests that were cancelled."""

    async def close(self) -> None: ...


class Worker:
    """`start`, `replay` and `check` are the commands; each names its arguments as the method does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._files: dict[str, list[list[Request]]] = {}

    async def start(self) -> dict[str, Any]:
        began = time.perf_counter()
        told = await self.engine.start()
        return {"load_s": time.perf_counter() - began, **told}

    async def replay(
        self, requests: str, users: int, steps: int, skip: int, clear: bool, limit_s: float, think: float | None
    ) -> dict[str, Any]:
        """`skip` steps of every user's plan were played before; `clear` starts from empty caches."""
        if clear:
            await self.engine.clear()
        traces = self._read(requests)
        plans = [islice(plan(traces, user, users), skip, None) for user in range(users)]
        found = summarize(await replay(self.engine.ask, plans, steps, limit_s=limit_s, think=think))
        await self.engine.settle()
        return found

    async def answers(self, requests: str, count: int) -> dict[str, Any]:
        """Single requests one after another, as a warm-up and a sign of life."""
        found = [await self.engine.ask(request) for trace in self._read(requests) for request in trace[:1]][:count]
        return {"answers": [asdict(answer) for answer in found]}

    def _read(self, requests: str) -> list[list[Request]]:
        if requests not in self._files:
            self._files[requests] = read_requests(Path(requests))
        return self._files[requests]

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            name = command.pop("do")
            if name == "quit":
                break
            try:
                result = await getattr(self, name)(**command)
            except Exception as error:  # whatever a peer does, the other side must hear of it
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(MARK + json.dumps(result), flush=True)
        await self.engine.close()


class Pictures:
    """Files read once."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytes] = {}

    def read(self, path: str) -> bytes:
        if path not in self._bytes:
            self._bytes[path] = Path(path).read_bytes()
        return self._bytes[path]
