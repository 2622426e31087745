"""The browser and site of tests/computer, and a computer of the size that MiniWoB++ needs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from holotron.computer.browser import Browser, BrowserComputer
from holotron.tasks.miniwob import viewport
from tests.computer.conftest import browser, site

__all__ = ["browser", "computer", "site"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def computer(browser: Browser) -> AsyncIterator[BrowserComputer]:  # noqa: F811 - the fixture above
    computer = await browser.new_computer(*viewport())
    yield computer
    await computer.close()
