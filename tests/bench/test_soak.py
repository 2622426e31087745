"""The soak test notices what it is there to notice, and passes on the pilot."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import soak  # noqa: E402


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "benchmarks/soak.py", "--requests", "60", "--users", "12", "--threads", "1"]
    run = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    figures = result["figures"]
    assert (figures["requests"], figures["errors"], figures["leaked"]) == (60, 0, 0)
    assert result["rows"][0]["end"]["stats"]["prefix_queries"] > 0, "the engine worked"
    assert figures["peak_rss_mib"] > 100


async def test_what_a_server_does_wrong_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers 500, or hangs up, to everything."""
    answers = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answers
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(length)
        answers += 1
        if answers % 2:
            writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(soak, "KINDS", {"whole": 0.5, "stream": 0.3, "wrong": 0.2})
    bodies = [{"model": "pilot", "messages": [], "response_format": {}}]
    found = soak.Soak(f"http://127.0.0.1:{port}", bodies, 12)
    await soak.load(found, 3, 0, 1)
    server.close()
    assert sum(found.done.values()) == 12
    assert len(found.errors) == 12
    assert any("500" in error for error in found.errors)


def test_growth_is_between_the_second_tenth_and_the_last() -> None:
    mib = 2**20
    start, flat, end = [100 * mib] * 10, [300 * mib] * 80, [307 * mib] * 10
    assert soak.growth(start + flat + end) == 7
    assert soak.growth(start + flat + flat) == 0
