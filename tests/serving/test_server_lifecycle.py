"""Clients that go, are slow or come too late; signals; an engine that fails."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from holotron.engine import LLM, RequestOutput
from holotron.engine.grammar import Constraint, GrammarError
from holotron.engine.sequence import Sequence
from holotron.serving.server import Limits
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.serving.running import Running, eventually, serving

PILOT = Path(__file__).resolve().parents[2] / "weights" / "pilot"
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = {"messages": HELLO, "max_tokens": 10**6, "ignore_eos": True}


class WatchedLLM(LLM):
    """The engine, slower, noting how long each sequence's output was when it was given up."""

    pause = 0.002
    failing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.added: list[Sequence] = []

    def add_request(self, request: Any, params: Any = None) -> str:
        self.added.append(request)
        return super().add_request(request, params)

    def step(self) -> list[RequestOutput]:
        time.sleep(self.pause)
        if self.failing:
            raise RuntimeError("the roof fell in")
        return super().step()


@pytest.fixture(scope="module")
def llm() -> WatchedLLM:
    tokenizer = tiny_tokenizer()
    return WatchedLLM(tiny_model(tokenizer), tokenizer, max_batch=4, max_model_len=8192)


@pytest.fixture
def running(llm: WatchedLLM) -> Iterator[Running]:
    llm.added.clear()
    with serving(llm, Limits(requests=8)) as server:
        yield server
    assert not llm.has_unfinished
    llm.check_integrity()


def open_request(server: Running, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    data = json.dumps(body).encode()
    raw = socket.socket()
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.connect(("127.0.0.1", server.port))
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return raw


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_place_within_one_step(running: Running, llm: WatchedLLM, stream: bool) -> None:
    dropped: dict[str, int] = {}
    engine = running.service.engine
    drop = engine._drop

    def watched(sequence: Sequence) -> None:
        dropped.setdefault(sequence.request_id, len(sequence.output))
        drop(sequence)

    engine._drop = watched  # type: ignore[method-assign]
    clients = [open_request(running, {**ENDLESS, "stream": stream}) for _ in range(7)]  # four run, three wait
    eventually(lambda: len(llm.running) == 4 and len(llm.waiting) == 3)
    eventually(lambda: all(s.output for s in llm.running))
    for client in clients:
        client.close()
    eventually(lambda: not llm.has_unfinished)
    assert len(llm.added) == len(dropped) == 7
    for sequence in llm.added:
        assert sequence.finish_reason == "abort"
        assert len(sequence.output) - dropped[sequence.request_id] <= 1
    llm.check_integrity()
    eventually(lambda: running.service._under_way == 0)
    assert running.chat().status_code == 200


def test_a_client_that_goes_in_the_midst_of_a_stream(running: Running, llm: WatchedLLM) -> None:
    with (
        running.http() as client,
        client.stream("POST", "/v1/chat/completions", json={**ENDLESS, "stream": True, "n": 3}) as response,
    ):
        for _, line in zip(range(20), response.iter_lines(), strict=False):
            assert not line or line.startswith("data: {")
        assert len(llm.running) == 3
    eventually(lambda: not llm.has_unfinished)


def test_a_client_that_goes_while_its_request_is_being_read(running: Running, llm: WatchedLLM) -> None:
    gate = threading.Event()
    pool = running.service.preprocessing._pool
    for _ in range(2):
        pool.submit(gate.wait)
    client = open_request(running, ENDLESS)
    eventually(lambda: running.service.preprocessing.depth == 1)
    client.close()
    time.sleep(0.1)
    gate.set()
    eventually(lambda: running.service.preprocessing.depth == 0 and running.app.state.traffic.active == 0)
    eventually(lambda: not llm.has_unfinished)
    assert len(llm.added) <= 1


def test_a_reader_that_stops_stalls_nobody_and_is_dropped(llm: WatchedLLM) -> None:
    llm.added.clear()
    with serving(llm, Limits(write_seconds=1.0), send_buffer=4096) as running:
        # about 3 kB for each token, so that no buffer between the two takes it all
        body = {**ENDLESS, "stream": True, "logprobs": True, "top_logprobs": 20}
        slow = [open_request(running, body, receive_buffer=4096) for _ in range(3)]
        eventually(lambda: len(llm.running) == 3)
        for _ in range(3):
            start = time.monotonic()
            assert running.chat(max_tokens=20, ignore_eos=True).status_code == 200
            assert time.monotonic() - start < 5
        eventually(lambda: not llm.has_unfinished and running.app.state.traffic.active == 0, 60)
        for client in slow:
            client.close()
    llm.check_integrity()


def test_half_closed_connections_and_pipelined_requests(running: Running) -> None:
    two = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
    with socket.create_connection(("127.0.0.1", running.port), 5) as raw:
        raw.sendall(two)
        received = b""
        while received.count(b"HTTP/1.1 200") < 2:
            piece = raw.recv(4096)
            assert piece
            received += piece


def test_an_engine_that_fails_answers_500_and_goes_on(running: Running, llm: WatchedLLM) -> None:
    llm.failing = True
    try:
        response = running.chat()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error" and "roof" not in response.text
        with running.http() as client:
            streamed = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True}).text
        events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
        assert json.loads(events[-2])["error"]["code"] == "engine_error" and events[-1] == "[DONE]"
    finally:
        llm.failing = False
    assert running.chat().status_code == 200


class Failing(Constraint):
    """A grammar that gives up at the third token."""

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0

    @property
    def complete(self) -> bool:
        return False

    def allowed(self) -> NDArray[np.bool_]:
        if self.seen == 2:
            raise GrammarError("too complex")
        mask = np.zeros(self.size, dtype=np.bool_)
        mask[97] = mask[98] = True
        return mask

    def forced(self) -> int | None:
        return None

    def accept(self, token: int) -> None:
        self.seen += 1


def test_a_grammar_that_gives_up_is_the_requests_fault(
    running: Running, llm: WatchedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = llm.prepare_chat

    def prepared(*args: Any, **kwargs: Any) -> Sequence:
        sequence = prepare(*args, **kwargs)
        sequence.constraint = Failing(llm.vocabulary.size)
        return sequence

    monkeypatch.setattr(llm, "prepare_chat", prepared)
    response = running.chat(max_tokens=9)
    assert response.status_code == 400 and response.json()["error"]["code"] == "grammar_failed"
    with running.http() as client:
        text = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, "max_tokens": 9}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert len(events) > 1 and events[-1]["error"]["code"] == "grammar_failed"


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`holotron serve` as a person starts it, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holotron.cli", "serve", str(PILOT), "--port", "0", "--threads", "1", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"serving \S+ at (http://\S+)/v1", line):
                yield process, found[1]
                break
        else:
            raise AssertionError(f"it did not start: {process.wait()}")
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


@pytest.mark.slow
def test_sigterm_finishes_what_runs_and_refuses_the_rest() -> None:
    with (
        command("--drain-seconds", "120") as (process, url),
        httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
    ):
        long = {"messages": HELLO, "max_tokens": 600, "ignore_eos": True, "temperature": 0}
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=long, timeout=120, trust_env=False)
            with client.stream("POST", "/v1/chat/completions", json={**long, "stream": True}) as stream:
                lines = stream.iter_lines()
                for line in lines:  # it is under way
                    if '"content":"' in line and '"content":""' not in line:
                        break
                process.send_signal(signal.SIGTERM)
                late = httpx.Client(base_url=url, timeout=20, trust_env=False)
                eventually(lambda: late.get("/health").status_code == 503)
                refused = late.post("/v1/chat/completions", json=long)
                assert refused.status_code == 503 and refused.headers["retry-after"]
                assert refused.json()["error"]["type"] == "service_unavailable_error"
                assert process.poll() is None
                rest = list(lines)
            assert "data: [DONE]" in rest
            assert any('"finish_reason":"length"' in line for line in rest)
            assert whole.result().json()["usage"]["completion_tokens"] == 600
        late.close()
        assert process.wait(20) == 0


@pytest.mark.slow
def test_idle_servers_leave_at_once_and_a_second_signal_does_not_wait() -> None:
    with command() as (process, url):
        kept = httpx.Client(base_url=url, trust_env=False)  # an idle connection does not hold it up
        assert kept.get("/health").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        kept.close()
    with command() as (process, url):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as raw:
            body = json.dumps(ENDLESS).encode()
            raw.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0
