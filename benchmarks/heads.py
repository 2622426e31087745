"""Compares three ways to say where to click, in short runs on the same questions; stores results/heads.json.

    python benchmarks/heads.py --data runs/pilot/data [--steps 250]

pointer           the grounding head, coordinate tokens learnt beside it with little weight
tokens+attention  no head: coordinate tokens, the last attention layer supervised to look at the target
tokens+pointer    coordinate tokens at full weight; the pointer is only an auxiliary loss and not read out

All start from the same seed and see the same batches. Measured on screenshots of held-out seeds, made here: the share
of grounding questions whose point lies in the target's box, read from the pointer and from greedy tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from store import ROOT, store

from holotron.contract.holotron3 import Holotron3
from holotron.data.collect import Job, collect
from holotron.engine.checkpoint import build_image_processor
from holotron.model.images import ImageProcessor
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.tasks.miniwob import EASY20
from holotron.training.pilot.losses import Weights, pointer_scores
from holotron.training.pilot.samples import CELL, Example, ExampleMaker, Question, read_records
from holotron.training.pilot.train import Recipe, train
from holotron.training.pilot.vocabulary import build_pilot_tokenizer

HELD_OUT = 3_000_000  # first seed of screenshots that no training run sees
RECIPE = Recipe(images=10, questions=3, hidden=128, channels=32, warmup=50, decay=0.3)
VARIANTS = {
    "pointer": replace(RECIPE, weights=Weights(characters=2.0)),
    "tokens+attention": replace(
        RECIPE, pointer=False, weights=Weights(characters=2.0, pointer=0.0, attention=1.0, bins=1.0)
    ),
    "tokens+pointer": replace(RECIPE, weights=Weights(characters=2.0, bins=1.0)),
}


def inside(question: Question, x: float, y: float) -> bool:
    return any(x0 <= x <= x1 and y0 <= y <= y1 for x0, y0, x1, y1 in question.boxes)


@torch.inference_mode()
def read_out(
    model: HolotronForConditionalGeneration, processor: ImageProcessor, example: Example, question: Question
) -> dict[str, bool]:
    """Whether pointer and greedy coordinate tokens fall into the target's box. The reply up to x is given."""
    encoded = model.encode_images(processor(example.png).pixel_values)
    first = model.config.coordinate_tokens
    assert first is not None
    ids = torch.tensor([question.ids[: question.point]])
    hidden = model.language_model(model.embed(ids, encoded.tokens.flatten(0, 1)))
    found = {}
    if model.grounding_head is not None:
        where = (ids == model.config.img_context_token_id).nonzero()[:, 1][None]
        at = torch.tensor([ids.shape[1] - 1])
        row = torch.tensor([0])
        scores = pointer_scores(model.grounding_head, encoded, hidden, row, at, where, row)
        cell, across = int(scores.argmax()), encoded.columns * 2
        found["pointer"] = inside(question, (cell % across + 0.5) * CELL, (cell // across + 0.5) * CELL)
    logits = model.language_model.lm_head(hidden[0, -1])
    x = int(logits[first["x"] : first["x"] + 1001].argmax())
    ids = torch.cat([ids, torch.tensor([[first["x"] + x]])], dim=1)
    hidden = model.language_model(model.embed(ids, encoded.tokens.flatten(0, 1)))
    y = int(model.language_model.lm_head(hidden[0, -1])[first["y"] : first["y"] + 1001].argmax())
    found["tokens"] = inside(question, x * example.width / 1000, y * example.height / 1000)
    return found


def score(folder: Path, lines: list[str], maker: ExampleMaker) -> dict[str, Any]:
    model = HolotronForConditionalGeneration.from_pretrained(folder).float().eval()
    processor = build_image_processor(model)
    assert processor is not None  # the pilot has a vision tower
    right: dict[str, int] = {}
    asked = 0
    for number, line in enumerate(lines):
        record = json.loads(line)
        record.pop("step", None)  # grounding questions only
        example = maker(json.dumps(record), random.Random(number))
        for question in example.questions:
            asked += 1
            for way, hit in read_out(model, processor, example, question).items():
                right[way] = right.get(way, 0) + hit
    return {"asked": asked, **{way: count / max(asked, 1) for way, count in right.items()}}


def main() -> None:
    import asyncio

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of records, as `holotron train pilot` makes")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "benchmark-heads")
    options = parser.parse_args()
    held = options.folder / "held-out"
    names = [
        name for name in EASY20 if name.startswith(("click-button", "click-link", "click-option", "click-checkboxes"))
    ]
    asyncio.run(collect([Job("practice", HELD_OUT, 150), *(Job(name, HELD_OUT, 10) for name in names)], held))
    lines = read_records(sorted(held.glob("*.jsonl")))
    maker = ExampleMaker(build_pilot_tokenizer(), Holotron3(images_kept=1), 4)
    rows = []
    for name, recipe in VARIANTS.items():
        began = time.monotonic()
        last = train(replace(recipe, steps=options.steps), sorted(options.data.glob("*.jsonl")), options.folder / name)
        if last["step"] < options.steps:
            raise KeyboardInterrupt  # training saved and stopped, as it was told to
        row = {"variant": name, "train_s": time.monotonic() - began, "last": last}
        rows.append(row | score(options.folder / name / "model", lines, maker))
        print(json.dumps(rows[-1]))
    by_name = {row["variant"]: row for row in rows}
    figures = {
        "pointer_click_accuracy": by_name["pointer"]["pointer"],
        "pointer_run_tokens_click_accuracy": by_name["pointer"]["tokens"],
        "tokens_attention_click_accuracy": by_name["tokens+attention"]["tokens"],
        "tokens_aux_pointer_click_accuracy": by_name["tokens+pointer"]["tokens"],
        "questions_asked": rows[0]["asked"],
        "steps": options.steps,
    }
    store("heads", figures, rows, f"python benchmarks/heads.py --data DIR --steps {options.steps}")


if __name__ == "__main__":
    main()
