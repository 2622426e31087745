"""The real server on 127.0.0.1, in a thread of its own, over a tiny model."""

from __future__ import annotations

import asyncio
import base64
import io
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from openai import OpenAI
from PIL import Image

from holotron.engine import LLM
from holotron.serving.serve import DrainingServer, bind, run
from holotron.serving.server import Limits, ServerSettings
from holotron.serving.server.service import Service


@dataclass
class Running:
    url: str
    llm: LLM
    server: DrainingServer
    app: FastAPI
    thread: threading.Thread

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def openai(self, key: str = "unused") -> OpenAI:
        client = httpx.Client(trust_env=False)
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=client)

    def http(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **more)

    def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **fields}
        with self.http() as client:
            return client.post("/v1/chat/completions", json=body)

    def stop(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def serving(
    llm: LLM,
    limits: Limits | None = None,
    send_buffer: int | None = None,
    names: tuple[str, ...] = ("tiny", "alias"),
    **settings: Any,
) -> Iterator[Running]:
    """`send_buffer` is how many bytes the kernel takes from the server before a client reads them."""
    bound = bind("127.0.0.1", 0)
    if send_buffer:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    made: list[Any] = []
    ready = threading.Event()
    chosen = ServerSettings(names, limits=limits or Limits(), **settings)

    def work() -> None:
        asyncio.run(run(llm, chosen, bound, ready.set, lambda *parts: made.extend(parts)))

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(30)
    running = Running(f"http://127.0.0.1:{bound.getsockname()[1]}", llm, made[0], made[1], thread)
    try:
        yield running
    finally:
        running.stop()


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def data_uri(image: Image.Image | bytes, kind: str = "PNG", **options: Any) -> str:
    if isinstance(image, Image.Image):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        image = buffer.getvalue()
    return f"data:image/{kind.lower()};base64," + base64.b64encode(image).decode()


def image_part(image: Image.Image | bytes, kind: str = "PNG", **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(image, kind, **options)}}
