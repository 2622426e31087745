"""One Chromium process, shared: every computer is a context of its own in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from playwright.async_api import Browser as PlaywrightBrowser
from playwright.async_api import Error, Playwright, async_playwright

from holotron.computer.browser_computer import BrowserComputer
from holotron.computer.chromium import ChromiumMissing, chromium_flags, find_chromium
from holotron.computer.computer import ComputerError
from holotron.computer.guard import Guard, GuardProxy

__all__ = ["Browser", "BrowserComputer"]

_INIT = Path(__file__).with_name("page_init.js").read_text(encoding="utf-8")


def ignore_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """Say nothing of Playwright calls that nobody awaits any more.

    Ctrl-C in a terminal reaches Playwright's driver too; calls of tasks that are being cancelled die with it, and
    asyncio would print each of them. A call that is awaited raises to its caller as ever.
    """
    before = loop.get_exception_handler()
    if getattr(before, "ignores_orphans", False):
        return

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        ours = isinstance(error, Error) or "Connection closed" in str(error)
        if ours and "never retrieved" in context.get("message", ""):
            return
        if before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    handle.ignores_orphans = True  # type: ignore[attr-defined]
    loop.set_exception_handler(handle)


class Browser:
    """Owns the process. After a crash the next `new_computer` starts another; those of the old one are lost.

    Use as `async with await Browser.launch() as browser:`.
    """

    def __init__(self, headless: bool = True) -> None:
        self.headless = headless
        self._driver: Playwright | None = None
        self._process: PlaywrightBrowser | None = None
        self._starting = asyncio.Lock()
        self._computers: set[BrowserComputer] = set()

    @classmethod
    async def launch(cls, headless: bool = True) -> Browser:
        """Start Chromium; raises ComputerError where there is none or it does not start."""
        browser = cls(headless)
        await browser._start()
        return browser

    async def _start(self) -> None:
        try:
            chromium = await asyncio.to_thread(find_chromium)
        except ChromiumMissing as error:
            raise ComputerError(str(error)) from error
        await self._stop()
        ignore_orphans(asyncio.get_running_loop())
        try:
            self._driver = await async_playwright().start()
            self._process = await self._driver.chromium.launch(
                executable_path=str(chromium.path), headless=self.headless, args=chromium_flags()
            )
        except Exception as error:  # Playwright raises its Error, OSError or a bare Exception here
            await self._stop()
            raise ComputerError(f"{chromium.path} does not start: {str(error).strip()[:500]}") from error

    @property
    def connected(self) -> bool:
        return self._process is not None and self._process.is_connected()

    @property
    def version(self) -> str:
        """As Chromium reports it, e.g. "156.0.8078.114"."""
        if self._process is None:
            raise ComputerError("the browser is closed")
        return self._process.version

    async def new_computer(
        self,
        width: int,
        height: int,
        device_scale_factor: float = 1.0,
        allowed_hosts: Iterable[str] | None = None,
    ) -> BrowserComputer:
        """A computer with a viewport of width x height CSS pixels, sharing nothing with the others.

        `allowed_hosts`: see Guard. Raises ComputerError if Chromium is gone and cannot be started again.
        """
        async with self._starting:
            if not self.connected:
                await self._start()
        assert self._process is not None
        guard = Guard(allowed_hosts)
        proxy = GuardProxy(guard) if guard.allowed_hosts is not None else None
        try:
            context = await self._process.new_context(
                viewport={"width": width, "height": height},
                device_scale_factor=device_scale_factor,
                locale="en-US",
                timezone_id="UTC",
                accept_downloads=False,
                proxy={"server": await proxy.start()} if proxy else None,
            )
            await context.add_init_script(_INIT)
            computer = BrowserComputer(context, width, height, device_scale_factor, guard, proxy)
            await computer.open()
        except Error as error:
            if proxy is not None:
                await proxy.close()
            raise ComputerError(f"Chromium gave no new page: {error.message.splitlines()[0]}") from error
        self._computers.add(computer)
        computer.on_close = self._computers.discard
        return computer

    async def close(self) -> None:
        for computer in list(self._computers):
            await computer.close()
        await self._stop()

    async def _stop(self) -> None:
        process, driver = self._process, self._driver
        self._process = self._driver = None
        try:
            if process is not None and process.is_connected():
                await process.close()
        except Exception:  # it died meanwhile, which is what was wanted
            pass
        try:
            if driver is not None:
                await asyncio.wait_for(driver.stop(), 10)
        except Exception:  # the driver's own process is gone
            pass

    async def __aenter__(self) -> Browser:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
