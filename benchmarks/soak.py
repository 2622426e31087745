"""A hundred users, ten thousand requests with random cancels and disconnects, through the HTTP server on the pilot.

    python benchmarks/soak.py [--requests 10000] [--users 100] [--model weights/pilot]

Each user goes through drawn conversations. Of its requests some are read to the end (streamed or not, constrained or
free, sampled or greedy, one choice or two), some are dropped by the client after a random time, of some the connection
breaks in the middle of the body, and some are wrong and must be refused with 4xx.

`errors` counts what should not have happened: another status than expected, a reply that does not fit what was asked, a
connection that the server broke. `leaked` counts requests, slots, pages and snapshots left when all is over, and failed
integrity checks. `rss_growth_mib` is the median resident memory in the last tenth of the requests less that in the
second; the stores of the engine are small, so that they are full by then. Stored in benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from engine_peers.process import tree_rss
from rich.console import Console
from rich.progress import Progress
from store import ROOT, store

from holotron.bench.drawn import draw_traces
from holotron.contract.contract import get_contract

SERVER = Path(__file__).parent / "engine_peers" / "soak_server.py"
KINDS = {"whole": 0.60, "stream": 0.20, "cancel": 0.10, "disconnect": 0.06, "wrong": 0.04}
IMPATIENCE_S = 1.5  # a client that gives up does so within that time


@dataclass(slots=True)
class Soak:
    """What the users share. `seconds` are times of requests read to the end."""

    address: str
    bodies: list[dict[str, Any]]
    left: int
    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def conversations(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Bodies of requests: every turn of drawn sessions, as an agent of the pilot sends it."""
    traces = draw_traces(folder, traces=24, turns=8, viewport=(160, 160), seed=seed)
    contract = get_contract("holotron3", images_kept=1)
    schema = {"name": "step", "schema": contract.schema()}
    bodies = []
    for trace in traces.set.traces:
        for turn in range(len(trace.turns)):
            messages = contract.messages(traces.conversation(trace, turn, contract))
            bodies.append(
                {
                    "model": "pilot",
                    "messages": messages,
                    "response_format": {"type": "json_schema", "json_schema": schema},
                    "chat_template_kwargs": {"enable_thinking": False},
                }
            )
    return bodies


def asked(soak: Soak, rng: random.Random) -> dict[str, Any]:
    body = {**rng.choice(soak.bodies), "max_tokens": rng.randint(1, 96), "temperature": rng.choice([0.0, 0.0, 0.8])}
    if rng.random() < 0.3:
        body.pop("response_format")
    if rng.random() < 0.2:
        body["n"] = 2
    if rng.random() < 0.3:
        body["seed"] = rng.randrange(2**31)
    return body


async def user(soak: Soak, client: httpx.AsyncClient, rng: random.Random, tell: Any) -> None:
    while soak.left > 0:
        soak.left -= 1
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        try:
            await globals()[f"ask_{kind}"](soak, client, rng)
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            soak.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
        soak.done[kind] += 1
        tell()


async def ask_whole(soak: Soak, client: httpx.AsyncClient, rng: random.Random) -> None:
    body = asked(soak, rng)
    began = time.perf_counter()
    answer = await client.post("/v1/chat/completions", json=body)
    soak.seconds.append(time.perf_counter() - began)
    if answer.status_code != 200:
        raise ValueError(f"status {answer.status_code}: {answer.text[:200]}")
    reply = answer.json()
    if len(reply["choices"]) != body.get("n", 1) or reply["usage"]["completion_tokens"] < 1:
        raise ValueError(f"an incomplete reply: {answer.text[:200]}")
    for choice in reply["choices"]:
        if choice["finish_reason"] == "stop" and "response_format" in body:
            json.loads(choice["message"]["content"])


async def ask_stream(soak: Soak, client: httpx.AsyncClient, rng: random.Random) -> None:
    body = asked(soak, rng) | {"stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    events = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
    soak.seconds.append(time.perf_counter() - began)
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"the stream ended with {events[-1:]}")
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks) or chunks[-1]["usage"]["completion_tokens"] < 1:
        raise ValueError(f"a broken stream: {events[-2][:200]}")


async def ask_cancel(soak: Soak, client: httpx.AsyncClient, rng: random.Random) -> None:
    """The client loses patience, before or while the reply comes."""
    asking = (ask_stream if rng.random() < 0.5 else ask_whole)(soak, client, rng)
    try:
        async with asyncio.timeout(rng.uniform(0, IMPATIENCE_S)):
            await asking
    except TimeoutError:
        pass


async def ask_disconnect(soak: Soak, client: httpx.AsyncClient, rng: random.Random) -> None:
    """The connection breaks while the body is sent, or just after."""
    data = json.dumps(asked(soak, rng)).encode()
    host, port = soak.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode())
    writer.write(data if rng.random() < 0.5 else data[: rng.randrange(len(data))])
    await writer.drain()
    await asyncio.sleep(rng.uniform(0, 0.2))
    writer.transport.abort()


async def ask_wrong(soak: Soak, client: httpx.AsyncClient, rng: random.Random) -> None:
    wrong = rng.choice([{"max_tokens": -1}, {"messages": []}, {"temperature": "hot"}, {"model": "another"}])
    answer = await client.post("/v1/chat/completions", json=asked(soak, rng) | wrong)
    if not 400 <= answer.status_code < 500 or "error" not in answer.json():
        raise ValueError(f"status {answer.status_code} for {wrong}")


async def watch(soak: Soak, pid: int) -> None:
    while True:
        soak.memory.append(tree_rss(pid))
        await asyncio.sleep(0.25)


async def load(soak: Soak, users: int, seed: int, pid: int) -> float:
    """Seconds until all requests are done."""
    limits = httpx.Limits(max_connections=2 * users)
    began = time.perf_counter()
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=soak.left)
        async with httpx.AsyncClient(base_url=soak.address, timeout=600, limits=limits, trust_env=False) as client:
            watching = asyncio.create_task(watch(soak, pid))
            await asyncio.gather(
                *(user(soak, client, random.Random(f"{seed}-{i}"), lambda: bar.advance(task)) for i in range(users))
            )
            watching.cancel()
    return time.perf_counter() - began


def growth(memory: list[int]) -> float:
    """MiB between the second tenth and the last, medians; nan where there is too little to say."""
    tenth = len(memory) // 10
    if not tenth:
        return float("nan")
    return (statistics.median(memory[-tenth:]) - statistics.median(memory[tenth : 2 * tenth])) / 2**20


def run(options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(SERVER), "--model", str(options.model), "--threads", str(options.threads)]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with {server.wait()} before it could be reached")
        with tempfile.TemporaryDirectory() as folder:
            bodies = conversations(Path(folder), options.seed)
        soak = Soak(f"http://127.0.0.1:{json.loads(line)['port']}", bodies, options.requests)
        seconds = asyncio.run(load(soak, options.users, options.seed, server.pid))
        server.send_signal(signal.SIGTERM)
        told, _ = server.communicate(timeout=120)
    finally:
        server.kill()
    if server.returncode:
        soak.errors.append(f"the server's exit code is {server.returncode}")
    end = json.loads(told.splitlines()[-1]) if told.strip() else {"left": None, "broken": 1}
    leaked = end["broken"] + (1 if end["left"] is None else sum(end["left"].values()))
    for error in soak.errors[:10]:
        print(error, file=sys.stderr)
    figures = {
        "requests": sum(soak.done.values()),
        "errors": len(soak.errors),
        "leaked": leaked,
        "rss_growth_mib": growth(soak.memory),
        "peak_rss_mib": max(soak.memory) / 2**20,
        "users": options.users,
        "requests_per_s": sum(soak.done.values()) / seconds,
        "median_s": statistics.median(soak.seconds) if soak.seconds else float("nan"),
    }
    thinned = soak.memory[:: max(1, len(soak.memory) // 100)]
    rows = [
        {"kinds": dict(soak.done), "errors": soak.errors[:50], "end": end, "seconds": seconds},
        {"rss_mib": [round(size / 2**20, 1) for size in thinned], "samples": len(soak.memory)},
    ]
    words = f"--requests {options.requests} --users {options.users} --threads {options.threads} --seed {options.seed}"
    return store("soak", figures, rows, f"python benchmarks/soak.py {words}", out=options.out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "weights" / "pilot")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    figures = run(parser.parse_args())["figures"]
    return int(figures["errors"] > 0 or figures["leaked"] > 0)


if __name__ == "__main__":
    sys.exit(main())
