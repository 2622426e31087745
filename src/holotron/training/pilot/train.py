"""Training of the pilot: AdamW in fp32 on the CPU, resuming exactly wherever it was killed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from holotron.contract.holotron3 import Holotron3
from holotron.engine.checkpoint import build_image_processor
from holotron.model.images import ImageProcessor
from holotron.model.modeling import HolotronForConditionalGeneration, count_parameters
from holotron.training.pilot.losses import (
    AttentionProbe,
    CharacterHead,
    Weights,
    character_loss,
    forward_questions,
    pad_images,
)
from holotron.training.pilot.preset import AGENT, pilot_config, write_agent_file
from holotron.training.pilot.samples import Example, ExampleMaker, batches, read_records
from holotron.training.pilot.vocabulary import build_pilot_tokenizer

MICRO_BATCH = 16  # questions in one pass of the language model, neighbours in length


class TrainingError(RuntimeError):
    """Training cannot start or go on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Learning rate rises over `warmup` batches, stays, and falls linearly to zero over the last `decay` part.

    A batch has `images` screenshots with up to `questions` questions each, and `reading` ones of which only the
    characters are read. `stop` ends a run early, as a stage of a longer recipe.
    """

    steps: int = 2000
    images: int = 12
    questions: int = 4
    reading: int = 0
    stop: int | None = None
    lr: float = 1.5e-3
    warmup: int = 100
    decay: float = 0.3
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    hidden: int = 192
    channels: int = 48
    pointer: bool = True
    weights: Weights = field(default_factory=Weights)


class Learner(nn.Module):
    """The model and the heads that only training needs."""

    def __init__(self, model: HolotronForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        assert model.vision_model is not None
        self.characters = CharacterHead(model.vision_model.out_features)


def build_learner(recipe: Recipe) -> Learner:
    torch.manual_seed(recipe.seed)
    config = pilot_config(build_pilot_tokenizer(), recipe.hidden, recipe.channels)
    if not recipe.pointer:
        config.grounding_config = None
    learner = Learner(HolotronForConditionalGeneration(config))
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return learner


def learning_rate(recipe: Recipe, step: int) -> float:
    left = (recipe.steps - step) / max(1.0, recipe.decay * recipe.steps)
    return recipe.lr * min((step + 1) / recipe.warmup, 1.0, max(left, 0.0))


def build_optimizer(learner: Learner, recipe: Recipe) -> torch.optim.AdamW:
    """Matrices decay; vectors (norms, biases, A_log, D, dt_bias) and embeddings do not."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, p in learner.named_parameters():
        (decayed if p.ndim > 1 and "embeddings" not in name else plain).append(p)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98), eps=1e-8, fused=True)


def batch_loss(
    learner: Learner,
    examples: list[Example],
    processor: ImageProcessor,
    weights: Weights,
    probe: AttentionProbe | None,
) -> tuple[Tensor, dict[str, float]]:
    """Mean loss of a batch, and sums for the log."""
    pixels, labels = pad_images(examples, [processor(e.png).pixel_values for e in examples])
    encoded = learner.model.encode_images(pixels.contiguous(memory_format=torch.channels_last))
    rows = pixels.shape[2] // 8
    loss_char, right, letters = character_loss(learner.characters(encoded.features, rows), labels, weights.blank)
    flat = [(i, q) for i, e in enumerate(examples) for q in e.questions]
    flat.sort(key=lambda pair: len(pair[1].ids))
    sums: dict[str, Tensor] = {"questions": torch.tensor(len(flat))}
    for at in range(0, len(flat), MICRO_BATCH):
        part = flat[at : at + MICRO_BATCH]
        found = forward_questions(learner.model, encoded, [i for i, _ in part], [q for _, q in part], weights, probe)
        for key, value in found.items():
            sums[key] = sums[key] + value if key in sums else value
    asked = [sums[key] for key in ("reply", "pointer", "attention") if key in sums]
    loss = weights.characters * loss_char + sum(asked) / max(len(flat), 1)
    log = {key: float(value.detach()) for key, value in sums.items()}
    log |= {"letters_right": float(right), "letters": float(letters), "loss": float(loss.detach())}
    return loss, log


class Prefetch:
    """Makes batches on a thread while the model works on the last one."""

    def __init__(self, source: Iterator[list[Example]], depth: int = 4) -> None:
        self.ready: queue.Queue[list[Example] | Exception] = queue.Queue(depth)
        threading.Thread(target=self._fill, args=(source,), daemon=True).start()

    def _fill(self, source: Iterator[list[Example]]) -> None:
        try:
            for batch in source:
                self.ready.put(batch)
        except Exception as error:  # handed to the training loop, which raises it
            self.ready.put(error)

    def next(self) -> list[Example]:
        batch = self.ready.get()
        if isinstance(batch, Exception):
            raise batch
        return batch


def data_fingerprint(lines: list[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line[:64].encode() + str(len(line)).encode())
    return digest.hexdigest()[:16]


def save_checkpoint(folder: Path, learner: Learner, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Weights, optimizer and position in one file, written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "checkpoint.pt.new"
    torch.save({"learner": learner.state_dict(), "optimizer": optimizer.state_dict(), "state": state}, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(folder / "checkpoint.pt")


def export(learner: Learner, folder: Path) -> None:
    """The model as a bf16 checkpoint folder with tokenizer and agent file."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in learner.model.state_dict().items()}
    for key, value in learner.model.state_dict().items():
        if key.endswith(("A_log", ".D", "dt_bias")):
            weights[key] = value.float().contiguous()
    learner.model.save_pretrained(folder, state_dict=weights)
    build_pilot_tokenizer().save_pretrained(folder)
    write_agent_file(folder)


def train(
    recipe: Recipe, data: list[Path], out: Path, init: Path | None = None, save_every: int = 100
) -> dict[str, float]:
    """Train, resuming from `out/checkpoint.pt` if it is there. Returns the last running means and `step`.

    Raises TrainingError for missing or too few records, changed data under a checkpoint, or a loss that is
    not finite (the batch's number is in the message and the last good checkpoint stays).
    """
    lines = read_records(data)
    if len(lines) < recipe.images + recipe.reading:
        raise TrainingError(f"only {len(lines)} records in {[str(p) for p in data]}: collect some first")
    tokenizer = build_pilot_tokenizer()
    maker = ExampleMaker(tokenizer, Holotron3(images_kept=AGENT["images_kept"]), recipe.questions)  # type: ignore[arg-type]
    learner = build_learner(recipe)
    optimizer = build_optimizer(learner, recipe)
    fingerprint = data_fingerprint(lines)
    state: dict[str, Any] = {"step": 0, "questions": 0, "seconds": 0.0, "data": fingerprint, "recipe": asdict(recipe)}
    if (out / "checkpoint.pt").exists():
        saved = torch.load(out / "checkpoint.pt", weights_only=True)
        if saved["state"]["data"] != fingerprint:
            raise TrainingError(
                f"{out} was trained on other records; use a new folder, or a further stage of the recipe, for more data"
            )
        learner.load_state_dict(saved["learner"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"] | {"recipe": asdict(recipe)}
    elif init is not None:
        saved = torch.load(init / "checkpoint.pt", weights_only=True)
        learner.load_state_dict(saved["learner"])
        state["before"] = saved["state"]
    processor = build_image_processor(learner.model)
    assert processor is not None  # the pilot has a vision tower
    probe = AttentionProbe(learner.model) if recipe.weights.attention else None
    source = Prefetch(batches(lines, maker, recipe.seed, state["step"], recipe.images, recipe.reading))
    return _loop(recipe, learner, optimizer, processor, probe, source, state, out, save_every)


def _loop(
    recipe: Recipe,
    learner: Learner,
    optimizer: torch.optim.AdamW,
    processor: ImageProcessor,
    probe: AttentionProbe | None,
    source: Prefetch,
    state: dict[str, Any],
    out: Path,
    save_every: int,
) -> dict[str, float]:
    stopping: list[int] = []
    previous = {s: signal.signal(s, lambda *_: stopping.append(1)) for s in (signal.SIGINT, signal.SIGTERM)}
    out.mkdir(parents=True, exist_ok=True)
    window: dict[str, float] = {}
    means: dict[str, float] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, (out / "log.jsonl").open("a") as log_file:
        size = count_parameters(learner.model) / 1e6
        bar = progress.add_task(f"pilot {size:.1f} M", total=recipe.stop or recipe.steps, completed=state["step"])
        end = recipe.steps if recipe.stop is None else min(recipe.stop, recipe.steps)
        while state["step"] < end and not stopping:
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, state["step"])
            loss, log = batch_loss(learner, source.next(), processor, recipe.weights, probe)
            if not math.isfinite(log["loss"]):
                raise TrainingError(f"loss is {log['loss']} at batch {state['step']}; lower lr and resume")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(learner.parameters(), recipe.clip)
            optimizer.step()
            state["step"] += 1
            state["questions"] += int(log["questions"])
            state["seconds"] += time.perf_counter() - began
            for key, value in (log | {"batches": 1.0, "seconds": time.perf_counter() - began}).items():
                window[key] = window.get(key, 0.0) + value
            if state["step"] % 20 == 0:
                means = summarise(window)
                log_file.write(json.dumps({"step": state["step"], "questions": state["questions"], **means}) + "\n")
                log_file.flush()
                window = {}
                text = " ".join(f"{k} {v:.2f}" for k, v in means.items())
                progress.update(bar, description=text)
            progress.update(bar, completed=state["step"])
            if state["step"] % save_every == 0:
                save_checkpoint(out, learner, optimizer, state)
    save_checkpoint(out, learner, optimizer, state)
    export(learner, out / "model")
    for number, handler in previous.items():
        signal.signal(number, handler)
    return means | {"step": state["step"]}


def summarise(window: dict[str, float]) -> dict[str, float]:
    """Running means: loss, share of exact replies, of pointer hits, of right bins and of characters read."""

    def share(part: str, whole: str) -> float:
        return window.get(part, 0.0) / max(window.get(whole, 0.0), 1.0)

    return {
        "loss": window["loss"] / window["batches"],
        "exact": share("exact", "questions"),
        "pointer": share("hits", "points"),
        "bins": share("bins_right", "bins"),
        "chars": share("letters_right", "letters"),
        "per_s": window["questions"] / window["seconds"],
    }
