"""The model against transformers: the same logits, and how much faster on this machine's CPU.

    python benchmarks/model.py [--rounds 7] [--threads 2] [--out benchmarks/results/model.json]

Speed: the language model of weights/pilot (random weights), fp32, both sides on the same threads, taking turns;
every figure is a ratio of medians. Training is forward, loss and backward with labels on the last eighth of each row,
as in fine-tuning on replies, by the call that each side offers for it (transformers scores every token, ours those that
have a label); `training_all` labels every token. Prefill is one prompt of 2,048 tokens into an empty cache, logits of
the last token only. transformers runs the torch code it takes on a CPU, without its time-step clamp (which would
change the result, not the speed). A shape is measured in a process of its own, and the figure is the worst of its
shapes.

Preprocessing: one 1920 x 1080 screenshot to normalised tiles (4 x 2 and a thumbnail) on one thread.

Agreement: fresh tiny checkpoints in the released formats, read from disk by both; the largest difference of any
logit, prompts longer than a chunk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image, ImageDraw
from store import ROOT, store
from torch import Tensor
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3

from holotron.model.cache import HybridCache
from holotron.model.checkpoint import load
from holotron.model.config import HolotronConfig
from holotron.model.images import TileConfig, TileProcessor
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.tiny_checkpoints import make_tiny

TRAINING = ((16, 256), (8, 512), (4, 1024))  # rows, tokens
PROMPT = 2048
SEEDS = range(5)
FAMILIES = {
    "max_logit_diff_nemotron_h": ("nemotron-h",),
    "max_logit_diff_moe": ("nemotron-h-moe", "nemotron-h-latent"),
    "max_logit_diff_omni_dense": ("omni-dense",),
}


def lift_clamp(language: Any) -> None:
    """transformers clamps the time step in prefill only, though no config of the family asks for it."""
    for layer in language.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))


def pair() -> tuple[HolotronForConditionalGeneration, NemotronHForCausalLM]:
    """One language model twice, with the same weights."""
    values = json.loads((ROOT / "weights" / "pilot" / "config.json").read_text())["llm_config"]
    ours = HolotronForConditionalGeneration(HolotronConfig(llm_config=values))
    theirs = NemotronHForCausalLM(NemotronHConfig(**values))
    weights = ours.language_model.state_dict()
    theirs.load_state_dict({key.replace("backbone.", "model."): value for key, value in weights.items()})
    lift_clamp(theirs)
    return ours, theirs


def training(rows: int, tokens: int, share: float = 0.125) -> tuple[Callable[[], Any], Callable[[], Any]]:
    ours, theirs = pair()
    ids = torch.randint(0, ours.config.language.vocab_size, (rows, tokens))
    labels = ids.clone()
    labels[:, : round(tokens * (1 - share))] = -100

    def step(model: Any, arguments: dict[str, Any]) -> float:
        loss = model(ids, labels=labels, **arguments).loss
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    ours.train(), theirs.train()
    runs = (lambda: step(ours, {"return_logits": False}), lambda: step(theirs, {"use_cache": False}))
    first, second = (run() for run in runs)
    assert abs(first - second) < 1e-3, f"the two losses differ: {first}, {second}"
    return runs


def prefill(rows: int, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    ours, theirs = (model.eval() for model in pair())
    ids = torch.randint(0, ours.config.language.vocab_size, (rows, tokens))

    @torch.inference_mode()
    def first() -> Tensor:
        cache = HybridCache.empty(ours.config.language, rows, tokens)
        hidden = ours.language_model(ours.embed(ids), None, cache)
        logits: Tensor = ours.language_model.lm_head(hidden[:, -1])
        return logits

    @torch.inference_mode()
    def second() -> Tensor:
        logits: Tensor = theirs(ids, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits

    gap = (first() - second()).abs().max().item()
    assert gap < 1e-3, f"the two prefills differ by {gap}"
    return first, second


def time_pair(kind: str, rows: int, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kinds = {"training": training, "training_all": partial(training, share=1.0), "prefill": prefill}
    first, second = kinds[kind](rows, tokens)
    times: dict[str, list[float]] = {"ours": [], "transformers": []}
    for _ in range(rounds):
        for name, run in (("ours", first), ("transformers", second)):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    medians = {f"{name}_s": round(median(values), 4) for name, values in times.items()}
    return {
        "measure": kind, "rows": rows, "tokens": tokens, "rounds": rounds, "threads": threads, **medians,
        "speedup": round(median(times["transformers"]) / median(times["ours"]), 3),
        "ours_tokens_per_s": round(rows * tokens / median(times["ours"])),
    }  # fmt: skip


def in_own_process(kind: str, rows: int, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", kind, str(rows), str(tokens)]
    command += ["--rounds", str(rounds), "--threads", str(threads)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    print(json.dumps(row), file=sys.stderr)
    return row


def screenshot() -> Image.Image:
    """Boxes, lines and text: what a page looks like to a resampler."""
    page = Image.new("RGB", (1920, 1080), "white")
    draw = ImageDraw.Draw(page)
    for i in range(40):
        x, y = 40 + 230 * (i % 8), 30 + 210 * (i // 8)
        draw.rectangle((x, y, x + 200, y + 170), fill=(40 * (i % 6), 250 - 30 * (i % 7), 90 + 20 * (i % 8)))
        draw.text((x + 10, y + 10), f"Item {i} of the list\nAdd to basket", fill="black")
    return page


def preprocessing(rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    page = screenshot()
    rows = []
    for resize in ("float", "uint8"):
        processor = TileProcessor(TileConfig((0.48, 0.46, 0.41), (0.27, 0.26, 0.28), resize=resize))
        assert processor(page).grid == (4, 2)
        times = []
        for _ in range(3 * rounds):
            start = time.perf_counter()
            processor(page)
            times.append(1000 * (time.perf_counter() - start))
        rows.append({"measure": "preprocess_1080p", "resize": resize, "ms": round(median(times), 2), "threads": 1})
    return rows


@torch.no_grad()
def agreement(family: str, seed: int, folder: Path) -> float:
    """The largest difference of any logit between transformers and this package on one tiny checkpoint."""
    make_tiny(family, folder, seed=seed)
    ours = load(folder)
    torch.manual_seed(seed)
    text = [torch.randint(200, 280, (n,)) for n in (3, 40, 5)]
    if family != "omni-dense":
        theirs = NemotronHForCausalLM.from_pretrained(folder).eval()
        lift_clamp(theirs)
        ids = torch.cat(text)[None]
        return (ours(ids).logits - theirs(ids, use_cache=False).logits).abs().max().item()
    whole = NemotronH_Omni_Reasoning_V3.from_pretrained(folder).eval()
    lift_clamp(whole.language_model)
    side, patch = 4, 16  # two pictures of 4 x 4 patches, 4 tokens each
    pixels = torch.randn(2, 3, side * patch, side * patch)
    patches = pixels.view(2, 3, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5).reshape(2 * side**2, -1)
    block = torch.full((side**2 // 4,), ours.config.img_context_token_id)
    ids = torch.cat([text[0], block, text[1], block, text[2]])[None]
    grid = torch.tensor([[side, side]] * 2)
    expected = whole(input_ids=ids, pixel_values=patches, image_grid_hw=grid, use_cache=False).logits
    return (ours(ids, pixel_values=pixels).logits - expected).abs().max().item()


def agreements() -> tuple[dict[str, float], list[dict[str, Any]]]:
    rows = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for figure, families in FAMILIES.items():
            for family in families:
                for seed in SEEDS:
                    gap = agreement(family, seed, Path(folder) / f"{family}-{seed}")
                    rows.append({"measure": "max_logit_diff", "family": family, "seed": seed, "value": gap})
                    figures[figure] = max(figures.get(figure, 0.0), gap)
    return figures, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", nargs=3, metavar=("MEASURE", "ROWS", "TOKENS"), help="one timing, printed as JSON")
    options = parser.parse_args()
    if options.only:
        kind, rows, tokens = options.only
        print(json.dumps(time_pair(kind, int(rows), int(tokens), options.rounds, options.threads)))
        return 0
    figures, agreed = agreements()
    speed = (options.rounds, options.threads)
    train = [in_own_process("training", rows, tokens, *speed) for rows, tokens in TRAINING]
    every = [in_own_process("training_all", rows, tokens, *speed) for rows, tokens in TRAINING]
    read = in_own_process("prefill", 1, PROMPT, *speed)
    pixels = preprocessing(options.rounds)
    worst = min(train, key=lambda row: row["speedup"])
    store(
        "model",
        {
            "train_speedup_vs_transformers": worst["speedup"],
            "train_tokens_per_s": worst["ours_tokens_per_s"],
            "train_all_labels_speedup_vs_transformers": min(row["speedup"] for row in every),
            "prefill_speedup_vs_transformers": read["speedup"],
            "prefill_tokens_per_s": read["ours_tokens_per_s"],
            "preprocess_1080p_ms": next(row["ms"] for row in pixels if row["resize"] == "float"),
            "preprocess_1080p_uint8_ms": next(row["ms"] for row in pixels if row["resize"] == "uint8"),
            **figures,
        },
        [*train, *every, read, *pixels, *agreed],
        f"python benchmarks/model.py --rounds {options.rounds} --threads {options.threads}",
        out=options.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
