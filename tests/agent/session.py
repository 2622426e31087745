"""A run of the oracle in a process of its own, to be killed, interrupted or starved of disk by a test.

python -m tests.agent.session RUN_DIR [resume] [SECONDS_PER_DECISION]
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from pathlib import Path

from holotron.agent.fleet import Event, Job, run_fleet
from holotron.agent.records import StepRecord
from holotron.agent.trajectory import TrajectoryError
from holotron.computer.browser import Browser
from tests.agent.rig import CONTRACT, SlowOracle, open_in

JOBS = [Job("click-test", 0), Job("enter-password", 0), Job("enter-password", 1)]  # 1, 5 and 5 steps


def show(event: Event) -> None:
    """Says on stdout what a test waits for; a step only once it is on disk."""
    if isinstance(event.record, StepRecord):
        print("step", event.job, event.record.index, flush=True)
    elif event.kind in ("stopped", "skip", "end"):
        print(event.kind, event.job, event.text, flush=True)


async def main(run_dir: Path, resume: bool, seconds: float) -> None:
    async with await Browser.launch() as browser:
        summary = await run_fleet(
            JOBS, open_in(browser), partial(SlowOracle, seconds=seconds), CONTRACT, 2, run_dir,
            resume=resume, on_event=show, model="oracle", started=time.monotonic(),
        )  # fmt: skip
    print("summary", summary.total.successes, summary.total.n, flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main(Path(sys.argv[1]), "resume" in sys.argv, float(sys.argv[-1])))
    except KeyboardInterrupt:
        sys.exit(130)
    except TrajectoryError as error:
        print("trajectory error:", error, flush=True)
        sys.exit(74)
