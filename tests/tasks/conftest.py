"""One Chromium for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from holotron.computer.browser import Browser, BrowserComputer
from holotron.tasks.miniwob import viewport
from tests.pages.server import Site, serve_pages


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    with serve_pages() as site:
        yield site


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with await Browser.launch() as browser:
        yield browser


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def computer(browser: Browser) -> AsyncIterator[BrowserComputer]:
    computer = await browser.new_computer(*viewport())
    yield computer
    await computer.close()
