"""The tabs of one computer: which has the focus, what happened in them that nobody asked for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, CDPSession, Dialog, Download, Error, FileChooser, Frame, Page

from holotron.computer.guard import Guard
from holotron.computer.settle import WINDOW_S, PageActivity

# beforeunload accepted means: leave. A prompt is dismissed, as nobody was asked what to type.
DIALOG_POLICY = {"alert": "accept", "confirm": "accept", "beforeunload": "accept", "prompt": "dismiss"}
LISTEN_S = 10.0
CLOSE_S = 5.0
_SHOWN = 200  # characters of a page's own text in a report


@dataclass(slots=True, eq=False)
class Tab:
    page: Page
    activity: PageActivity
    cdp: CDPSession | None = None
    crashed: bool = False


class Tabs:
    """Follows new tabs, answers dialogs by DIALOG_POLICY and keeps the news until the model is told."""

    def __init__(self, context: BrowserContext, guard: Guard) -> None:
        self.context = context
        self.guard = guard
        self.tabs: list[Tab] = []
        self.focused = 0
        self.news: list[str] = []
        self.expected = 0  # tabs that we are about to open ourselves, hence no news
        self.asked_hosts: set[str] = set()  # by pages; what Chromium asks for itself is no news
        self._announced = 0  # windows that a page is opening and that are not there yet
        self._arrived = asyncio.Event()
        self._refused: list[Tab] = []
        context.on("page", self._opened)
        context.on("request", lambda request: self._asked(request.url))

    def _opened(self, page: Page) -> None:
        tab = Tab(page, PageActivity(page))
        self.tabs.append(tab)
        self.focused = len(self.tabs) - 1
        self._arrived.set()
        if self.expected:
            self.expected -= 1
        else:
            self._announced = max(0, self._announced - 1)
            self.news.append(f"new tab {self.focused}")
        page.on("crash", lambda _: setattr(tab, "crashed", True))
        page.on("close", lambda _: self._closed(tab))
        page.on("dialog", self._dialog)
        page.on("filechooser", self._file_chooser)
        page.on("download", self._download)
        page.on("websocket", lambda socket: self._asked(socket.url))
        page.on("framenavigated", lambda frame: self._navigated(tab, frame))
        self._navigated(tab, page.main_frame)

    def _asked(self, url: str) -> None:
        if self.guard.allowed_hosts is not None:
            self.asked_hosts.add(urlsplit(url).hostname or "")

    async def _listen(self, tab: Tab) -> None:
        """Hear of navigations and windows from the page itself, before any request of theirs is out."""
        if tab.cdp is not None:
            return
        session = await self.context.new_cdp_session(tab.page)
        await session.send("Page.enable")
        main = (await session.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]

        def navigation(event: dict[str, Any]) -> None:
            if event["frameId"] == main and event.get("disposition") == "currentTab":
                tab.activity.announce()

        def window(_event: dict[str, Any]) -> None:
            self._announced += 1

        session.on("Page.frameRequestedNavigation", navigation)
        session.on("Page.windowOpen", window)
        tab.cdp = session

    def begin(self) -> None:
        self._announced = 0

    async def arrivals(self) -> None:
        """Wait for the windows that a page announced."""
        deadline = time.monotonic() + WINDOW_S
        while self._announced and (left := deadline - time.monotonic()) > 0:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                self._announced = 0

    def _closed(self, tab: Tab) -> None:
        if tab not in self.tabs:
            return
        index = self.tabs.index(tab)
        del self.tabs[index]
        if self.focused >= index:
            self.focused = max(0, self.focused - 1)
        self.news.append(f"tab {index} closed")

    async def _dialog(self, dialog: Dialog) -> None:
        accept = DIALOG_POLICY.get(dialog.type, "dismiss") == "accept"
        text = f' "{dialog.message[:_SHOWN]}"' if dialog.message else ""
        self.news.append(f"{dialog.type}{text} {'accepted' if accept else 'dismissed'}")
        try:
            await (dialog.accept() if accept else dialog.dismiss())
        except Error:
            pass  # its page is gone, and it with it

    def _file_chooser(self, _chooser: FileChooser) -> None:
        self.news.append("file chooser closed: no file can be given")

    def _download(self, download: Download) -> None:
        self.news.append(f'download "{download.suggested_filename[:_SHOWN]}" cancelled')

    def _navigated(self, tab: Tab, frame: Frame) -> None:
        """A page can reach blob: and the like without any connection; such a document is taken away again."""
        if frame.parent_frame is None and (reason := self.guard.refusal(frame.url)):
            self.news.append(reason)
            self._refused.append(tab)

    async def clear_refused(self) -> None:
        while self._refused:
            tab = self._refused.pop()
            if tab in self.tabs:
                try:
                    await tab.page.goto("about:blank")
                except Error:
                    pass  # closed or crashed: nothing is shown either way

    async def focus(self, index: int) -> Tab:
        self.focused = index
        tab = self.tabs[index]
        await tab.page.bring_to_front()
        return tab

    async def open(self) -> Tab:
        """A new empty tab in the focus."""
        self.expected += 1
        await self.context.new_page()
        return self.tabs[self.focused]

    async def current(self) -> Tab:
        """The tab in the focus; opened anew where it crashed or the last one was closed."""
        if not self.tabs:
            tab = await self.open()
            self.news.append("the last tab was closed; an empty one was opened")
            return tab
        tab = self.tabs[min(self.focused, len(self.tabs) - 1)]
        if tab.crashed:
            tab = await self._replace(tab)
        try:
            await asyncio.wait_for(self._listen(tab), LISTEN_S)
        except (Error, TimeoutError):
            if not tab.crashed:
                raise
            tab = await self._replace(tab)
        return tab

    async def _replace(self, tab: Tab) -> Tab:
        index, url = self.tabs.index(tab), tab.page.url
        fresh = await self.open()
        self.tabs.remove(fresh)
        self.tabs[index] = fresh
        self.focused = index
        try:
            await asyncio.wait_for(tab.page.close(), CLOSE_S)
        except (Error, TimeoutError):
            pass  # there is nothing left to close, or it hangs and is left behind
        self.news.append("the page crashed and was opened again")
        if self.guard.refusal(url) is None:
            try:
                await fresh.page.goto(url, wait_until="domcontentloaded")
            except Error:
                self.news.append(f"{url} could not be opened again")
        return fresh

    async def keep_one(self) -> Tab:
        """Close all tabs but the first and forget the news."""
        self.focused = 0
        tab = await self.current()
        for other in [other for other in self.tabs if other is not tab]:
            try:
                await other.page.close()
            except Error:
                pass
        self.tabs, self.focused = [tab], 0
        self.news.clear()
        await tab.page.bring_to_front()
        return tab
