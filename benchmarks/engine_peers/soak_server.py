"""The server as `holotron serve` runs it, with an engine that counts what it did not get back.

Prints {"port": ...} when it can be reached, and after SIGTERM what was left behind, one JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from holotron.engine import LLM, EngineError
from holotron.serving.serve import bind, run
from holotron.serving.server import ServerSettings

MIB = 2**20


class CountedLLM(LLM):
    """`broken` counts failed integrity checks, which the engine makes whenever it is idle; `left` says what requests
    and memory were not free when everything had been dropped at the end."""

    checks = broken = 0
    left: dict[str, int] | None = None

    def check_integrity(self) -> None:
        self.checks += 1
        try:
            super().check_integrity()
        except EngineError:
            self.broken += 1
            raise

    def reset(self) -> None:
        requests = len(self.running) + len(self.waiting)
        super().reset()
        pages = self.scheduler.pages
        self.left = {
            "requests": requests,
            "slots": self.max_batch - len(self.scheduler.free_slots),
            "pages": pages.pages - pages.free,
            "snapshots": int(self.stats()["snapshots"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=32)
    options = parser.parse_args()
    # Stores so small that they are full early on: what grows after that is no cache.
    llm = CountedLLM(
        options.model, max_batch=options.max_batch, threads=options.threads, max_model_len=4096,
        kv_bytes=64 * MIB, snapshot_bytes=16 * MIB, vision_bytes=8 * MIB,
    )  # fmt: skip
    settings = ServerSettings(("pilot",), port=0)
    bound = bind(settings.host, settings.port)
    port = bound.getsockname()[1]
    asyncio.run(run(llm, settings, bound, lambda: print(json.dumps({"port": port}), flush=True)))
    print(json.dumps({"checks": llm.checks, "broken": llm.broken, "left": llm.left, "stats": llm.stats()}), flush=True)


if __name__ == "__main__":
    main()
