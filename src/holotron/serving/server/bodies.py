"""Receiving bodies: how large, how many at once, how slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from holotron.serving.server.errors import ApiError, overloaded
from holotron.serving.server.settings import Limits


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Bodies:
    """Counts the bytes of all bodies that are being received or read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytes]:
        """The body, accounted for until the block ends. Raises ApiError, ClientGone."""
        _check_type(request)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._limits.body:
            raise self._too_large()
        data = bytearray()
        try:
            try:
                async with asyncio.timeout(self._limits.body_seconds):
                    async for chunk in request.stream():
                        self._take(data, chunk)
            except TimeoutError:
                message = f"the body did not arrive within {self._limits.body_seconds:g} s"
                raise ApiError(408, message, headers={"Connection": "close"}) from None
            except ClientDisconnect:
                raise ClientGone from None
            yield bytes(data)
        finally:
            self._held -= len(data)

    def _take(self, data: bytearray, chunk: bytes) -> None:
        if len(data) + len(chunk) > self._limits.body:
            raise self._too_large()
        if self._held + len(chunk) > self._limits.bodies:
            raise overloaded("too many large requests at once; try again soon", 2)
        self._held += len(chunk)
        data += chunk

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._limits.body} bytes; send fewer or smaller images"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def _check_type(request: Request) -> None:
    """A page in a browser can send forms and plain text to any server, JSON only where that server agrees."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the Content-Type must be application/json, not {kind[:80] or 'absent'!r}")
