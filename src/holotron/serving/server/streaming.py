"""Server-sent events that stop at once when nobody listens, and never make anyone else wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holotron.serving.server.bodies import ClientGone

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes. Raises ClientGone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await _stop(working, gone)


class EventStream(Response):
    """Sends `events` until they end, the client goes, or takes `write_seconds` for one; then calls `close`."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], write_seconds: float, close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._write_seconds = write_seconds
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except (TimeoutError, OSError):
            pass  # too slow, or gone while it was being written to
        finally:
            await _stop(sending, gone)
            await self._close()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in events:
                # not wait_for, which in Python 3.11 may swallow that it was cancelled
                async with asyncio.timeout(self._write_seconds):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """What several sources yield, as it comes. They wait for a slow reader; the first failure ends it."""
    items: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue(maxsize=2 * len(sources))

    async def pour(source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                await items.put((item,))
            await items.put(None)
        except Exception as error:
            await items.put(error)

    tasks = [asyncio.create_task(pour(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            item = await items.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item[0]
    finally:
        await _stop(*tasks)


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
