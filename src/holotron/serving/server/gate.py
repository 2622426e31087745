"""What happens to a request before anything reads it: key, host, and whether the server still takes requests."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from holotron.serving.server.errors import ApiError
from holotron.serving.server.settings import ServerSettings, is_local

OPEN_PATHS = ("/health",)  # answered without a key, and while draining


@dataclass(slots=True)
class Traffic:
    """`active` requests are being answered; while `draining` no new ones are taken."""

    active: int = 0
    draining: bool = False
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def entered(self) -> None:
        self.active += 1

    def left(self) -> None:
        self.active -= 1
        if not self.active:
            self._quiet.set()

    async def drain(self, seconds: float) -> bool:
        """Take no more requests and wait for those under way. False if some outlast `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                while self.active:
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            return False
        return True


class Gate:
    """ASGI middleware. `refused` is told the status of each refusal."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, traffic: Traffic, refused: Callable[[int], None]
    ) -> None:
        self._app = app
        self._settings = settings
        self._traffic = traffic
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
        except ApiError as refusal:
            self._refused(refusal.status)
            await refusal.response()(scope, receive, send)
            return
        self._traffic.entered()
        try:
            await self._app(scope, receive, send)
        finally:
            self._traffic.left()

    def _check(self, headers: Headers) -> None:
        key = self._settings.api_key
        if key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # in constant time, so that the answer's delay tells nothing about the key
            same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
            if not same or scheme.lower() != "bearer":
                message = "a valid key is needed: Authorization: Bearer KEY"
                headers_back = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, message, code="invalid_api_key", headers=headers_back)
        elif self._settings.local and not is_local(_host(headers.get("host", ""))):
            # a foreign name that resolves to this machine is how pages in a browser reach local servers
            raise ApiError(403, "without an API key this server answers only as localhost; set one to use other names")
        if self._traffic.draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5", "Connection": "close"})


def _host(header: str) -> str:
    """The Host header without its port."""
    if header.startswith("["):
        return header.partition("]")[0][1:]
    return header.partition(":")[0]
