"""Eyes and hands of one agent: a browser context of its own, driven by tool calls."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import BrowserContext, Error, Page

from holotron.computer.computer import ComputerError, ComputerState, Outcome, Point
from holotron.computer.guard import Guard, GuardProxy
from holotron.computer.hands import Hands
from holotron.computer.keys import UnknownKey
from holotron.computer.settle import LOAD_S
from holotron.computer.tabs import Tab, Tabs
from holotron.contract.conversation import Screenshot
from holotron.contract.step import GoBack, Navigate, TabFocus, TabNew, Tool, ToolCall

ACTION_S = 60.0  # a page that has not answered by then hangs
SCREENSHOT_S = 30.0
OK = "ok"

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:(?!\d+(/|$))", re.IGNORECASE)  # `localhost:80` has none
_LOCAL = re.compile(r"^(localhost|127\.[\d.]+|\[::1\]|0\.0\.0\.0)([:/]|$)", re.IGNORECASE)


class _Refused(Exception):
    """A call that cannot be carried out; its text goes to the model."""


class BrowserComputer:
    """Implements Computer. Made by `Browser.new_computer`.

    Outcomes read "ok" unless there is something to report: new and closed tabs, answered dialogs (see
    DIALOG_POLICY), refused hosts, a crashed page. What happened between two calls is reported by the next.
    """

    def __init__(
        self,
        context: BrowserContext,
        width: int,
        height: int,
        device_scale_factor: float,
        guard: Guard,
        proxy: GuardProxy | None,
    ) -> None:
        self.context = context
        self.width, self.height = width, height
        self.device_scale_factor = device_scale_factor
        self.guard = guard
        self.hands = Hands(width, height)
        self.tabs = Tabs(context, guard)
        self.on_close: Callable[[BrowserComputer], None] | None = None
        self._proxy = proxy
        self._closed = False

    async def open(self) -> None:
        await self.tabs.open()

    # Looking

    @property
    def page(self) -> Page:
        """The page in the focus, for those who read its DOM."""
        if not self.tabs.tabs:
            raise ComputerError("the browser has no open tab")
        return self.tabs.tabs[self.tabs.focused].page

    async def screenshot(self) -> Screenshot:
        """The viewport as PNG in CSS pixels, whatever the scale factor; sizes are those of the bytes."""
        async with self._alive("taking a screenshot"):
            png = await self._capture(await self.tabs.current())
        width, height = struct.unpack(">II", png[16:24])
        return Screenshot(png, width, height, float(self.width), float(self.height))

    async def _capture(self, tab: Tab) -> bytes:
        if self.device_scale_factor == 1.0:
            try:
                assert tab.cdp is not None  # as of every current tab
                sent = tab.cdp.send("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True})
                return base64.b64decode((await asyncio.wait_for(sent, SCREENSHOT_S))["data"])
            except (Error, TimeoutError):
                tab.cdp = None  # its page crashed or was closed; the slow path below knows how to wait
                tab = await self.tabs.current()
        return await tab.page.screenshot(scale="css", timeout=SCREENSHOT_S * 1000)

    async def state(self) -> ComputerState:
        async with self._alive("reading the browser's state"):
            tab = await self.tabs.current()
            title = await asyncio.wait_for(tab.page.title(), SCREENSHOT_S)
        return ComputerState(
            url=tab.page.url,
            title=title,
            tabs=tuple(t.page.url for t in self.tabs.tabs),
            focused_tab=self.tabs.focused,
            css_width=self.width,
            css_height=self.height,
            device_scale_factor=self.device_scale_factor,
            cursor=self.hands.cursor,
        )

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """Run a function of ours in the page in the focus; raises ComputerError where it cannot."""
        async with self._alive("running a script in the page"):
            tab = await self.tabs.current()
            return await asyncio.wait_for(tab.page.evaluate(script, argument), SCREENSHOT_S)

    # Acting

    async def do(self, tool_call: ToolCall, point: Point | None) -> Outcome:
        """See Computer.do. Returns once the page has settled (see `settle`)."""
        try:
            async with self._alive(f"carrying out {tool_call.tool_name}", pass_on=True):
                tab = await self.tabs.current()
                tab.activity.begin()
                self.tabs.begin()
                async with asyncio.timeout(ACTION_S):
                    said = [await self._carry_out(tab, tool_call, point)]
                    said += await self._settle()
                ok = True
        except (_Refused, UnknownKey) as refusal:
            ok, said = False, [str(refusal), *self._news()]
        except TimeoutError:
            said = await self._unstick()
            ok = False
        except Error as error:
            async with self._alive(f"recovering from {tool_call.tool_name}"):
                crashed = any(tab.crashed for tab in self.tabs.tabs)
                await self.tabs.current()
            said = [] if crashed else [error.message.splitlines()[0][:300]]
            ok, said = crashed, [*said, *self._news()]
        return Outcome(ok, "; ".join(text for text in said if text) or OK)

    async def _carry_out(self, tab: Tab, call: Tool, point: Point | None) -> str:
        match call:
            case Navigate():
                return await self._open_address(tab, call.url)
            case TabNew():
                address = self._address(call.url)
                fresh = await self.tabs.open()
                return "" if address == "about:blank" else await self._open_address(fresh, address)
            case TabFocus():
                if call.index >= len(self.tabs.tabs):
                    raise _Refused(f"there is no tab {call.index}, only 0 to {len(self.tabs.tabs) - 1}")
                await self.tabs.focus(call.index)
                return ""
            case GoBack():
                try:
                    if await tab.page.go_back(wait_until="domcontentloaded", timeout=LOAD_S * 1000):
                        return ""
                except Error as error:
                    raise _Refused(f"could not go back: {_reason(error)}") from error
                if tab.page.url in ("", "about:blank"):
                    return ""
                raise _Refused("there is no page to go back to")
        return await self.hands.carry_out(tab.page, call, point)

    def _address(self, url: str) -> str:
        """The full address of what was asked for; raises _Refused where the guard says no."""
        url = url.strip()
        if not _SCHEME.match(url):
            url = ("http://" if _LOCAL.match(url) else "https://") + url
        if reason := self.guard.refusal(url):
            raise _Refused(reason)
        return url

    async def _open_address(self, tab: Tab, url: str) -> str:
        url = self._address(url)
        try:
            response = await tab.page.goto(url, wait_until="domcontentloaded", timeout=LOAD_S * 1000)
        except Error as error:
            if tab.crashed:
                raise
            raise _Refused(f"could not open {url}: {_reason(error)}") from error
        return f"HTTP status {response.status}" if response and response.status >= 400 else ""

    async def _settle(self) -> list[str]:
        tab = await self.tabs.current()
        said = await tab.activity.settle()
        await self.tabs.arrivals()
        after = await self.tabs.current()
        if after is not tab:  # the action opened, closed or crashed a tab
            await after.page.bring_to_front()
            said = await after.activity.settle()
        await self.tabs.clear_refused()
        return [said, *self._news()]

    async def _unstick(self) -> list[str]:
        """A page that hangs is treated like one that crashed."""
        async with self._alive("replacing a page that hangs"):
            if self.tabs.tabs:
                self.tabs.tabs[self.tabs.focused].crashed = True
            await self.tabs.current()
        return ["the page does not respond", *self._news()]

    def _news(self) -> list[str]:
        news, self.tabs.news[:] = list(self.tabs.news), []
        if self._proxy is not None:
            hosts, self._proxy.refused[:] = dict.fromkeys(self._proxy.refused), []
            asked = [host for host in hosts if host in self.tabs.asked_hosts]
            news += [f"refused: host {host} is not allowed" for host in asked]
        return list(dict.fromkeys(news))

    # For tasks

    async def settle(self) -> None:
        """Wait until the page has drawn what it is about to draw (see `settle`), as after an action."""
        async with self._alive("waiting for the page"):
            await (await self.tabs.current()).activity.settle()

    async def goto(self, url: str) -> None:
        """Open the address in the only tab left; raises ComputerError naming it where that fails."""
        async with self._alive(f"opening {url}"):
            tab = await self.tabs.keep_one()
            await self.hands.let_go(tab.page)
            try:
                await self._open_address(tab, url)
            except _Refused as refusal:
                raise ComputerError(str(refusal)) from refusal
            await tab.activity.settle()
            self.tabs.news.clear()

    async def reset(self) -> None:
        """One tab, no keys held, no news; the page stays."""
        async with self._alive("resetting the browser"):
            tab = await self.tabs.keep_one()
            await self.hands.let_go(tab.page)
        self._news()

    async def park_cursor(self) -> None:
        """Move the cursor out of the viewport, so that nothing is hovered."""
        async with self._alive("moving the cursor away"):
            await (await self.tabs.current()).page.mouse.move(-1, -1)
        self.hands.cursor = (0.0, 0.0)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self.context.close()
        except Exception:  # the browser is gone: so is the context
            pass
        if self._proxy is not None:
            await self._proxy.close()
        if self.on_close is not None:
            self.on_close(self)

    @asynccontextmanager
    async def _alive(self, doing: str, pass_on: bool = False) -> AsyncIterator[None]:
        """Turns a broken browser into ComputerError; `pass_on` lets errors of a living one through."""
        try:
            yield
        except ComputerError:
            raise
        except (Error, TimeoutError) as error:
            process = self.context.browser
            if self._closed or process is None or not process.is_connected():
                raise ComputerError(f"Chromium is gone: it was closed, killed or crashed while {doing}") from error
            if pass_on:
                raise
            raise ComputerError(f"{doing} failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The code of a network error, or the first line of any other."""
    text = str(error) or type(error).__name__
    code = re.search(r"net::(ERR_\w+)", text)
    return code[1] if code else text.splitlines()[0][:300]
