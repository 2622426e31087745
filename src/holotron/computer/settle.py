"""When a page counts as ready to be looked at. Every wait has a reason to end early and a bound.

After an action:
1. two animation frames, so that what the page's own handlers did is drawn (bound FRAME_S);
2. if the page announced a navigation: until its request is out (bound ANNOUNCED_S);
3. if the action started a navigation of the page: until the document is parsed (bound LOAD_S), then until no
   request has been open for QUIET_S (bound QUIET_BOUND_S), then two frames again;
4. else, if it started requests: until they are answered (bound FETCH_S), then two frames again.
A new window that the page announced is waited for likewise (bound WINDOW_S, see `tabs`).
Streams that stay open by design (websockets, event sources, media, pings) are not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from playwright.async_api import Error, Page, Request

FRAME_S = 0.5
ANNOUNCED_S = 1.0
WINDOW_S = 5.0
LOAD_S = 30.0
QUIET_S = 0.1
QUIET_BOUND_S = 2.0
FETCH_S = 0.7

_ENDLESS = frozenset({"websocket", "eventsource", "media", "ping", "texttrack"})
_TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"


class PageActivity:
    """Counts the open requests of one page and notes when its main document is being replaced."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._navigation: Request | None = None
        self._announced = False
        self._open: set[Request] = set()
        self._changed = asyncio.Event()
        page.on("request", self._started)
        page.on("requestfinished", self._ended)
        page.on("requestfailed", self._ended)
        page.on("domcontentloaded", self._parsed)

    def _started(self, request: Request) -> None:
        if request.resource_type in _ENDLESS:
            return
        self._open.add(request)
        if _replaces_document(request, self.page):
            self._open = {request}
            self._navigation = request
            self._announced = False
        self._changed.set()

    def _ended(self, request: Request) -> None:
        self._open.discard(request)
        if request is self._navigation and request.failure:  # refused, a download, or no content
            self._navigation = None
        self._changed.set()

    def _parsed(self, _page: Page) -> None:
        self._navigation = None
        self._announced = False
        self._changed.set()

    @property
    def navigating(self) -> bool:
        return self._navigation is not None

    def begin(self) -> None:
        """Forget what was open before: an action is judged by what it starts itself."""
        self._open.clear()
        self._announced = False

    def announce(self) -> None:
        """The page said that it is about to be replaced; its request may still take a moment."""
        self._announced = not self.navigating

    async def _until(self, holds: Callable[[], bool], bound: float) -> bool:
        deadline = time.monotonic() + bound
        while not holds():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return holds()
        return True

    async def _quiet(self, bound: float, quiet: float) -> None:
        deadline = time.monotonic() + bound
        while time.monotonic() < deadline:
            await self._until(lambda: not self._open, deadline - time.monotonic())
            if await self._until(lambda: bool(self._open), quiet):
                continue
            return

    async def settle(self) -> str:
        """Wait as the module says; returns what the model should know, "" when all is well."""
        await frames(self.page)
        if self._announced:
            await self._until(lambda: self.navigating or not self._announced, ANNOUNCED_S)
        if self.navigating:
            parsed = await self._until(lambda: not self.navigating, LOAD_S)
            await self._quiet(QUIET_BOUND_S, QUIET_S)
            await frames(self.page)
            return "" if parsed else "the page is still loading"
        if self._open:
            await self._until(lambda: not self._open or self.navigating, FETCH_S)
            await frames(self.page)
        return ""


def _replaces_document(request: Request, page: Page) -> bool:
    try:
        return request.is_navigation_request() and request.frame == page.main_frame
    except Error:  # a navigation so early that its frame is not there yet: a new tab's first
        return request.is_navigation_request()


async def frames(page: Page) -> None:
    """Two animation frames; gives up at FRAME_S, as a hidden or busy page draws none."""
    try:
        await asyncio.wait_for(page.evaluate(_TWO_FRAMES), FRAME_S)
    except (TimeoutError, Error):
        return  # replaced, closed or crashed meanwhile: whoever looks next finds out which
