"""Runs the server: bind, load, answer, and on SIGTERM finish what is under way before leaving."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from holotron.engine import LLM, AsyncLLM
from holotron.serving.server import ServerSettings, create_app
from holotron.serving.server.gate import Traffic

_LAST_SECONDS = 5  # for what outlasts the drain to notice that it is over


class DrainingServer(uvicorn.Server):
    """The first signal makes it refuse new requests with 503 and leave after the last answer; a second, at once.

    It then ends normally, so the process exits with 0.
    """

    def __init__(self, app: FastAPI, ready: Callable[[], None]) -> None:
        """`app` is one of `create_app`; `ready` is called when it can be reached."""
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )
        self._traffic: Traffic = app.state.traffic
        self._drain_seconds: float = app.state.service.limits.drain_seconds
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._asked = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Any thread may call it, as a signal does."""
        if self._asked or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._asked = True
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._traffic.drain(self._drain_seconds)
        self.should_exit = True


def serve(
    model: str | Path,
    settings: ServerSettings,
    *,
    max_batch: int = 32,
    max_model_len: int | None = None,
    threads: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve a checkpoint folder or hub id until a signal ends it. `say` is told, in a line each, how it goes.

    Raises OSError where the address cannot be had, ModelLoadError.
    """
    # bound first, listening last: a taken port shows before minutes of loading, and nobody connects too early
    bound = bind(settings.host, settings.port)
    try:
        say(f"loading {model}")
        llm = LLM(model, max_batch=max_batch, max_model_len=max_model_len, threads=threads)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{bound.getsockname()[1]}/v1"
        asyncio.run(run(llm, settings, bound, lambda: say(f"serving {settings.names[0]} at {address}")))
    finally:
        bound.close()


async def run(
    llm: LLM,
    settings: ServerSettings,
    bound: socket.socket,
    ready: Callable[[], None],
    made: Callable[[DrainingServer, FastAPI], None] = lambda *_: None,
) -> None:
    """Serve on a bound socket until a signal has been obeyed; the engine is closed then. `made` gets what was built."""
    engine = AsyncLLM(llm)
    app = create_app(engine, settings)
    server = DrainingServer(app, ready)
    made(server, app)
    try:
        await server.serve(sockets=[bound])
    finally:
        app.state.service.close()
        await engine.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address but does not listen yet. Raises OSError naming the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror or error}; choose another --host or --port", f"{host}:{port}"
        ) from error
    return bound
