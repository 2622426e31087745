"""Measures what a share of attention layers is worth for recall; stores results/recall.json and draws docs/recall.svg.

    python benchmarks/recall.py [--seeds 2] [--tasks copy,needle] [--models 0of4,1of4]
    python benchmarks/recall.py --quick        the same path with next to no training: does it run?

Five tiny models that differ in their four mixers only are trained on four tasks (recall_tasks.py) with the same
batches and steps, then tested on sequences as long as those of the training and longer ones. A finished run is kept
in --folder and not repeated, so Ctrl-C loses one run at most, and two processes with different --tasks share the work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from recall_models import MODELS, Learner, Mixers
from recall_plot import draw
from recall_tasks import COLOURS, LABELS, TASKS, Batch, Task
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from store import ROOT, store
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from holotron.agent.summary import wilson
from holotron.model.modeling import count_parameters

TRAIN, TEST = 0, 1  # first word of every seed: no batch is drawn for both


@dataclass(frozen=True, slots=True)
class Recipe:
    """Learning rate rises over `warmup` steps and falls linearly over the last `decay` part. A batch holds `rows`
    sequences of the middle trained size, or as many tokens in shorter or longer ones. `asked` test sequences a size.
    """

    steps: int
    rows: int = 32
    lr: float = 3e-3
    warmup: int = 50
    decay: float = 0.3
    asked: int = 128
    width: int = 64
    sizes: int | None = None  # test only so many, shortest first


RECIPES = {
    "text_recall": Recipe(1200), "copy": Recipe(1000), "needle": Recipe(400, asked=256), "screen_recall": Recipe(600),
}  # fmt: skip
QUICK = Recipe(3, rows=4, asked=8, warmup=1, sizes=2)


def loss_of(learner: Learner, batch: Batch) -> tuple[Tensor, float]:
    """What is minimised, and the part of it that the questions have."""
    logits, answers, read = learner(batch)
    loss = F.cross_entropy(logits, answers)
    total = loss
    if read is not None and batch.seen is not None:
        label, colour = read.split([len(LABELS), len(COLOURS)], dim=-1)
        total = loss + F.cross_entropy(label, batch.seen[:, 0]) + F.cross_entropy(colour, batch.seen[:, 1])
    return total, float(loss.detach())


@torch.inference_mode()
def measure(learner: Learner, task: Task, size: int, sequences: int) -> dict[str, Any]:
    """Share of right answers, each read from the model after the true ones before it."""
    right = asked = read = tokens = 0
    for part in range(0, sequences, 16):
        rng = np.random.default_rng([TEST, list(TASKS).index(task.name), size, part])
        batch = task.make(rng, size, min(16, sequences - part), True)
        logits, answers, scores = learner(batch)
        right += int((logits.argmax(-1) == answers).sum())
        asked += len(answers)
        if scores is not None and batch.seen is not None:
            read += int((scores[:, : len(LABELS)].argmax(-1) == batch.seen[:, 0]).sum())
            tokens += len(scores)
    low, high = wilson(right, asked)
    found: dict[str, Any] = {"size": size, "length": task.length(size), "trained": size <= max(task.trained)}
    found |= {"accuracy": right / asked, "n": asked, "low": low, "high": high}
    return found | ({"labels_read": read / tokens} if tokens else {})


def forward_flops(learner: Learner, task: Task) -> float:
    """Of matrix products in one pass, per token, at the longest trained size; causal masks are not deducted."""
    batch = task.make(np.random.default_rng(0), max(task.trained), 1, False)
    # only the plain form of attention is made of products that the counter sees
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        learner.model(batch.ids, batch.pixels)
    return counter.get_total_flops() / batch.ids.shape[1]


def train(task: Task, mixers: Mixers, seed: int, recipe: Recipe, tick: Any) -> dict[str, Any]:
    """One run: its description and its measurements. The same seed gives every model the same batches."""
    torch.manual_seed(seed)
    learner = Learner(task, mixers, recipe.width)
    sizes = task.tested[: recipe.sizes]
    untrained = measure(learner, task, sizes[0], recipe.asked)["accuracy"]
    matrices = [p for n, p in learner.named_parameters() if p.ndim > 1 and "embeddings" not in n]
    others = [p for n, p in learner.named_parameters() if p.ndim <= 1 or "embeddings" in n]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98), fused=True)
    began, cpu, losses = time.monotonic(), time.process_time(), []
    middle = task.trained[len(task.trained) // 2]
    for step in range(recipe.steps):
        rng = np.random.default_rng([TRAIN, list(TASKS).index(task.name), seed, step])
        size = int(rng.choice(task.trained))
        left = (recipe.steps - step) / (recipe.decay * recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min((step + 1) / recipe.warmup, left, 1.0)
        total, loss = loss_of(learner, task.make(rng, size, max(2, recipe.rows * middle // size), False))
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
        tick()
    language = learner.model.config.language
    return {
        "task": task.name, "model": mixers.name, "pattern": mixers.pattern, "state_size": mixers.state, "seed": seed,
        "ratio": mixers.pattern.count("*") / len(mixers.pattern), "chance": task.chance,
        "parameters": count_parameters(learner.model), "forward_flops_per_token": forward_flops(learner, task),
        "state_bytes": language.state_bytes(), "kv_bytes_per_token": language.kv_bytes_per_token(),
        "steps": recipe.steps, "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1), "threads": torch.get_num_threads(),
        "loss_first": losses[0], "loss_last": float(np.mean(losses[-20:])), "untrained_accuracy": untrained,
        "measured": [measure(learner, task, size, recipe.asked) for size in sizes],
    }  # fmt: skip


def fingerprint(task: Task, recipe: Recipe) -> dict[str, Any]:
    """What a kept run must agree with to be kept."""
    return asdict(recipe) | {"trained": list(task.trained), "tested": list(task.tested)}


def kept(file: Path, print_: dict[str, Any]) -> dict[str, Any] | None:
    """The run in `file`, or None if there is none or it was made by another recipe."""
    if not file.is_file():
        return None
    run: dict[str, Any] = json.loads(file.read_text())
    return run if run.get("recipe") == print_ else None


def run_all(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every run that was asked for, seed by seed. Raises KeyboardInterrupt, with what is finished on disk."""
    wanted = [(s, t, m) for s in range(options.seeds) for t in options.tasks for m in options.models]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    runs: list[dict[str, Any]] = []
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("runs", total=len(wanted))
        for seed, name, model in wanted:
            task, recipe = TASKS[name], QUICK if options.quick else RECIPES[name]
            recipe = replace(recipe, steps=recipe.steps * options.longer)
            file = options.folder / f"{name}_{model}_{seed}.json"
            run = kept(file, fingerprint(task, recipe))
            if run is None:
                bar: TaskID = progress.add_task(f"{name} {model} seed {seed}", total=recipe.steps)
                run = train(task, MODELS[model], seed, recipe, lambda bar=bar: progress.advance(bar))
                run["recipe"] = fingerprint(task, recipe)
                file.parent.mkdir(parents=True, exist_ok=True)
                part = file.with_suffix(f".{os.getpid()}.part")
                part.write_text(json.dumps(run, indent=1))
                part.replace(file)
                progress.remove_task(bar)
                shown = " ".join(f"{m['length']}:{100 * m['accuracy']:.0f}" for m in run["measured"])
                console.print(f"{name} {model} seed {seed}: {shown} % ({run['cpu_seconds']:.0f} CPU-s)")
            runs.append(run)
            progress.advance(whole)
    return runs


def rows_of(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a run and length."""
    rows = []
    for run in runs:
        about = {key: value for key, value in run.items() if key not in ("measured", "recipe")}
        about["title"] = TASKS[run["task"]].title
        rows += [about | measured for measured in run["measured"]]
    return rows


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean accuracy over the seeds by task, model and length; the chance level of every task."""
    cells: dict[str, list[float]] = {}
    for row in rows:
        cells.setdefault(f"{row['task']}_{row['model']}_{row['length']}_accuracy", []).append(row["accuracy"])
    figures: dict[str, float] = {name: sum(found) / len(found) for name, found in cells.items()}
    figures |= {f"{row['task']}_chance_accuracy": row["chance"] for row in rows}
    threads = max(row["threads"] for row in rows)
    cpu = sum({(r["task"], r["model"], r["seed"]): r["cpu_seconds"] for r in rows}.values())
    return figures | {"seeds": len({row["seed"] for row in rows}), "threads": threads, "train_cpu_seconds": cpu}


def names(known: Iterable[str]) -> Any:
    def read(text: str) -> list[str]:
        found = [part.strip() for part in text.split(",") if part.strip()]
        unknown = sorted(set(found) - set(known))
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}; known: {', '.join(known)}")
        return found

    return read


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="runs of every model and task (default: 2; --quick: 1)")
    parser.add_argument("--tasks", type=names(TASKS), default=list(TASKS), help=", ".join(TASKS))
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--longer", type=int, default=1, help="train so many times as long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps only; results go to the folder of the runs")
    parser.add_argument("--folder", type=Path, help="where finished runs are kept (default: runs/recall)")
    parser.add_argument("--out", type=Path, help="the result file (default: benchmarks/results/recall.json)")
    parser.add_argument("--plot", type=Path, help="the picture, .svg or .png (default: docs/recall.svg)")
    parser.add_argument("--json", action="store_true", help="nothing but the figures on standard output")
    options = parser.parse_args()
    options.seeds = (1 if options.quick else 2) if options.seeds is None else options.seeds
    if min(options.seeds, options.threads, options.longer) < 1:
        parser.error("--seeds, --threads and --longer start at 1")
    kind = ("recall-quick" if options.quick else "recall") + (f"-{options.longer}" if options.longer > 1 else "")
    options.folder = options.folder or ROOT / "runs" / kind
    whole = kind == "recall" and options.tasks == list(TASKS) and options.models == list(MODELS)
    out = options.out or (None if whole else options.folder / "recall.json")
    plot = options.plot or (ROOT / "docs" / "recall.svg" if whole else options.folder / "recall.svg")
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    try:
        runs = run_all(options, console)
    except KeyboardInterrupt:
        console.print(f"Stopped. Finished runs are kept in {options.folder}; the same command goes on from there.")
        return 130
    rows = rows_of(runs)
    given = [part for part in sys.argv[1:] if not part.startswith("--json")]
    store("recall", figures_of(rows), rows, " ".join(["python benchmarks/recall.py", *given]), out=out)
    draw(rows, plot)
    if not options.json:
        print(f"plot: {plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
