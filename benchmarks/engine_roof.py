"""How near decoding comes to what the machine can do, and what a session weighs in memory."""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from store import ROOT

from holotron.engine import LLM, SamplingParams
from holotron.model.config import HolotronConfig, LanguageConfig
from holotron.model.linear import onednn
from holotron.model.modeling import HolotronForConditionalGeneration, count_parameters
from holotron.model.tokenizer import load_tokenizer

SESSIONS = Path(__file__).parent / "engine_peers" / "sessions.py"
# A text model too large for a CPU's caches, as a served one is: 33 M parameters.
TOY = {
    "vocab_size": 2357, "hidden_size": 512, "hybrid_override_pattern": "M-M-M*-M-M-M*-M-M-", "intermediate_size": 2048,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_num_heads": 16, "mamba_head_dim": 64,
    "ssm_state_size": 64, "n_groups": 2,
}  # fmt: skip
Rows = list[dict[str, Any]]


def best_rate(work: float, run: Callable[[], Any], seconds: float) -> float:
    """`work` units per second in the quickest of the runs that fit into the time."""
    run()
    fastest, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - began)
    return work / fastest


@torch.inference_mode()
def gemm_flops(seconds: float) -> float:
    """fp32 FLOP/s of the best large product this torch has, its own or oneDNN's."""
    rates = []
    for size in (1024, 2048):
        a, b = torch.randn(size, size), torch.randn(size, size)
        rates += [best_rate(2.0 * size**3, run, seconds) for run in (lambda: a @ b, lambda: onednn(a, b))]  # noqa: B023
    return max(rates)


@torch.inference_mode()
def read_bandwidth(size: int, seconds: float) -> float:
    """Bytes per second of reading `size` bytes over and over: by products with one row, or by summing them."""
    count = max(1, size // 2**22)
    weights = [torch.randn(1024, 1024) for _ in range(count)]
    x = torch.randn(1, 1024)
    work = count * 2**22
    runs = (lambda: [F.linear(x, w) for w in weights], lambda: [w.sum() for w in weights])
    return max(best_rate(work, run, seconds) for run in runs)


def decode_work(config: LanguageConfig, weights: int, batch: int, context: int) -> tuple[float, float]:
    """Bytes that one step of `batch` sequences must move, and its FLOP: every weight once, each sequence's state read
    and written, its keys and values read."""
    moved = 4 * weights + batch * (2 * config.state_bytes() + context * config.kv_bytes_per_token(4))
    heads = config.hybrid_override_pattern.count("*") * config.num_attention_heads * config.head_dim
    states = config.hybrid_override_pattern.count("M") * config.mamba_width * config.ssm_state_size
    return moved, batch * (2.0 * weights + 4.0 * context * heads + 6.0 * states)


def step_seconds(llm: LLM, batch: int, context: int, tokens: int, rounds: int) -> float:
    """Seconds of one decode step: what `tokens` more of them add to the same request; the median of the rounds."""
    vocabulary = llm.model.config.language.vocab_size

    def run(count: int) -> float:
        prompts = torch.randint(270, vocabulary, (batch, context)).tolist()
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True, use_grounding_head=False))
        return time.perf_counter() - began

    run(4)
    found = []
    for _ in range(rounds):
        short, long = run(4), run(4 + tokens)
        found.append((long - short) / tokens)
    return statistics.median(found)


def toy() -> HolotronForConditionalGeneration:
    torch.manual_seed(0)
    return HolotronForConditionalGeneration(HolotronConfig(llm_config=TOY))


def measure_decode(options: argparse.Namespace) -> Rows:
    """Rows for the toy and the checkpoint at batch 1 and 32, with the ceilings they are held against."""
    torch.set_num_threads(options.threads)
    seconds = 0.2 if options.quick else 2.0
    flops = gemm_flops(seconds)
    rows: Rows = [{"measure": "gemm_ceiling", "gflop_per_s": flops / 1e9, "threads": options.threads}]
    context, tokens, rounds = (16, 4, 1) if options.quick else (256, 48, 5)
    pilot = HolotronForConditionalGeneration.from_pretrained(options.model)
    for name, model in (("toy", toy()), ("checkpoint", pilot)):
        language = model.config.language
        table = language.vocab_size * language.hidden_size  # of it a step reads only a few rows
        weights = count_parameters(model.language_model) - table
        bandwidth = read_bandwidth(4 * weights, seconds)
        for batch in (1, 32):
            llm = LLM(model, load_tokenizer(options.model), max_batch=batch, threads=options.threads, snapshot_bytes=0)
            moved, work = decode_work(language, weights, batch, context + tokens // 2)
            took = step_seconds(llm, batch, context, tokens, rounds)
            roof = max(moved / bandwidth, work / flops)
            rows.append({
                "measure": "decode", "model": name, "batch": batch, "context": context, "step_ms": 1e3 * took,
                "tokens_per_s": batch / took, "moved_mib": moved / 2**20, "weights_mib": 4 * weights / 2**20,
                "read_gb_per_s": bandwidth / 1e9, "roof_ms": 1e3 * roof, "fraction": roof / took,
                "fraction_weights_only": max(4 * weights / bandwidth, 2.0 * batch * weights / flops) / took,
                "bound": "memory" if moved / bandwidth > work / flops else "arithmetic",
            })  # fmt: skip
            del llm
            gc.collect()
    return rows


def measure_state(options: argparse.Namespace) -> Rows:
    """State and KV bytes of one session, as the engine reports them, for growing prompts."""
    lengths = (64, 256) if options.quick else (1024, 4096, 16384, 65536)
    llm = LLM(options.model, max_batch=1, threads=options.threads, snapshot_bytes=0)
    rows: Rows = []
    for length in lengths:
        prompt = torch.randint(270, llm.model.config.language.vocab_size, (length,)).tolist()
        [output] = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        found = output.metrics
        rows.append(
            {"measure": "state", "tokens": length, "state_bytes": found.state_bytes, "kv_bytes": found.kv_bytes}
        )
    return rows


def attention_twin(model: Path, folder: Path) -> Path:
    """The checkpoint with attention in place of every Mamba layer, MLPs widened to the same number of parameters."""
    values = json.loads((model / "config.json").read_text())
    language = values["llm_config"]
    target = count_parameters(HolotronForConditionalGeneration(HolotronConfig(**values)))
    language["hybrid_override_pattern"] = language["hybrid_override_pattern"].replace("M", "*")
    now = count_parameters(HolotronForConditionalGeneration(HolotronConfig(**values)))
    layers = language["hybrid_override_pattern"].count("-")
    language["intermediate_size"] += round((target - now) / (2 * layers * language["hidden_size"]))
    twin = HolotronForConditionalGeneration(HolotronConfig(**values))
    twin.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, folder / name)
    return folder


def measure_memory(options: argparse.Namespace) -> Rows:
    """Peak resident memory of many long sessions at once, ours and its attention twin's, each in its own process."""
    sessions, tokens = (3, 200) if options.quick else (options.sessions, options.session_tokens)
    rows: Rows = []
    twin = attention_twin(options.model, options.work / "attention-twin")
    for name, folder in (("hybrid", options.model), ("attention", twin)):
        command = [sys.executable, str(SESSIONS), "--model", str(folder), "--sessions", str(sessions)]
        command += ["--tokens", str(tokens), "--threads", str(options.threads)]
        print(f"memory: {sessions} sessions of {tokens} tokens, {name}", file=sys.stderr)
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=options.memory_timeout)
        told = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"reason": f"exit {run.returncode}"}
        rows.append({"measure": "memory", "model": name, "sessions": sessions, "tokens": tokens, **told})
    return rows


def roof_figures(rows: Rows) -> dict[str, float]:
    """The toy's fractions are the headline: its weights do not fit into a cache, as no served model's do."""
    figures: dict[str, float] = {}
    for row in rows:
        if row["measure"] == "decode":
            end = f"_b{row['batch']}" if row["model"] == "toy" else f"_checkpoint_b{row['batch']}"
            figures[f"decode_roof_fraction{end}"] = row["fraction"]
            figures[f"decode_tokens_per_s{end}"] = row["tokens_per_s"]
            figures[f"read_gb_per_s_{row['model']}"] = row["read_gb_per_s"]
        elif row["measure"] == "gemm_ceiling":
            figures["gemm_gflop_per_s"] = row["gflop_per_s"]
        elif row["measure"] == "state":
            figures[f"state_bytes_{row['tokens']}"] = row["state_bytes"]
            figures[f"kv_bytes_{row['tokens']}"] = row["kv_bytes"]
        elif row["measure"] == "memory" and "peak_rss_mib" in row:
            figures[f"sessions_rss_mib_{row['model']}"] = row["peak_rss_mib"]
    if {"sessions_rss_mib_hybrid", "sessions_rss_mib_attention"} <= set(figures):
        figures["sessions_rss_vs_attention"] = (
            figures["sessions_rss_mib_hybrid"] / figures["sessions_rss_mib_attention"]
        )
    return figures
