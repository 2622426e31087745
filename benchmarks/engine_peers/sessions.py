"""Holds many long sessions in one engine at once and prints the process's peak resident memory as JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from holotron.engine import LLM, SamplingParams


def resident(field: str) -> int:
    """Bytes: VmRSS, now, or VmHWM, the most so far. (getrusage would count the process that started this one, too.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())["llm_config"]
    pattern = config["hybrid_override_pattern"]
    token_bytes = pattern.count("*") * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    # Replies go on until the last prompt is in: long prompts are worked off in pieces, the others decode meanwhile.
    room = options.tokens + 1024
    llm = LLM(
        options.model, max_batch=options.sessions, max_model_len=room + 64, threads=options.threads,
        snapshot_bytes=0, step_tokens=4096, kv_bytes=options.sessions * (room + 64) * token_bytes,
    )  # fmt: skip
    loaded = resident("VmRSS")
    began = time.perf_counter()
    for _ in range(options.sessions):
        prompt = torch.randint(270, config["vocab_size"], (options.tokens,)).tolist()
        llm.add_request(prompt, SamplingParams(max_tokens=1024, ignore_eos=True, use_grounding_head=False))
    while llm.waiting or any(not sequence.output for sequence in llm.running):
        if llm.step():
            raise SystemExit("a session ended before the last had begun")
    held = len(llm.running)
    peak = resident("VmHWM")
    llm.check_integrity()
    mib = {"peak_rss_mib": peak / 2**20, "loaded_rss_mib": loaded / 2**20}
    state = llm.model.config.language.state_bytes()
    print(json.dumps({
        "held": held, **{name: round(value, 1) for name, value in mib.items()}, "seconds": time.perf_counter() - began,
        "state_bytes": state, "kv_bytes_per_token": token_bytes, "pattern": pattern,
        "parameters": sum(p.numel() for p in llm.model.parameters()),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
