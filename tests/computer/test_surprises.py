"""What happens without being asked for: tabs, dialogs, downloads, late answers, crashes, a killed browser."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import pytest_asyncio

from holotron.computer.browser import Browser, BrowserComputer
from holotron.computer.computer import ComputerError, Outcome, Point
from holotron.contract.step import Click, Navigate, TabFocus, TabNew, Wait, Write
from tests.pages.server import Site

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

OK = Outcome(True, "ok")
CLICK = Click(element="it", x=0, y=0)
NOTHING = Wait(seconds=0)


def row(n: int) -> Point:
    return 60.0, 40.0 * n + 15


@pytest_asyncio.fixture(loop_scope="session")
async def surprises(computer: BrowserComputer, site: Site) -> BrowserComputer:
    await computer.goto(site.url("surprises.html"))
    return computer


@pytest.mark.parametrize(
    ("n", "report", "said"),
    [
        (0, 'alert "Saved." accepted', "alert"),
        (1, 'confirm "Delete it?" accepted', True),
        (2, 'prompt "Your name?" dismissed', None),
    ],
)
async def test_dialogs_are_answered_and_reported(surprises: BrowserComputer, n: int, report: str, said: object) -> None:
    assert await surprises.do(CLICK, row(n)) == Outcome(True, report)
    assert await surprises.evaluate("() => window.said") == said
    assert await surprises.do(NOTHING, None) == OK


async def test_leaving_is_allowed_and_reported(surprises: BrowserComputer, site: Site) -> None:
    await surprises.do(CLICK, row(7))
    assert await surprises.do(Navigate(url=site.url("second.html")), None) == Outcome(True, "beforeunload accepted")
    assert (await surprises.state()).title == "Second"


async def test_a_new_tab_is_followed_and_its_end_too(surprises: BrowserComputer, site: Site) -> None:
    assert await surprises.do(CLICK, row(3)) == Outcome(True, "new tab 1")
    state = await surprises.state()
    assert state.tabs == (site.url("surprises.html"), site.url("second.html"))
    assert (state.focused_tab, state.title) == (1, "Second")
    assert await surprises.do(TabFocus(index=0), None) == OK
    assert (await surprises.state()).title == "Surprises"
    refused = await surprises.do(TabFocus(index=2), None)
    assert not refused.ok and "no tab 2" in refused.text
    await surprises.do(TabFocus(index=1), None)
    await surprises.evaluate("() => setTimeout(close, 0)")
    await asyncio.sleep(0.3)
    assert await surprises.do(NOTHING, None) == Outcome(True, "tab 1 closed")
    assert (await surprises.state()).title == "Surprises"


async def test_tab_new(surprises: BrowserComputer, site: Site) -> None:
    assert await surprises.do(TabNew(url=site.url("second.html")), None) == OK
    assert (await surprises.state()).focused_tab == 1
    assert await surprises.do(TabNew(), None) == OK
    assert (await surprises.state()).tabs[2] == "about:blank"
    await surprises.reset()
    assert (await surprises.state()).tabs == (site.url("surprises.html"),)


async def test_screenshots_show_the_tab_in_the_focus(surprises: BrowserComputer, site: Site) -> None:
    first = await surprises.screenshot()
    await surprises.do(TabNew(url=site.url("second.html")), None)
    second = await surprises.screenshot()
    assert second.png != first.png
    await surprises.do(TabFocus(index=0), None)
    assert (await surprises.screenshot()).png == first.png


async def test_a_file_chooser_does_not_hang(surprises: BrowserComputer) -> None:
    outcomes = [await surprises.do(CLICK, row(4)), await surprises.do(Wait(seconds=0.5), None)]
    assert "file chooser closed: no file can be given" in [outcome.text for outcome in outcomes]
    assert await surprises.do(CLICK, row(0)) == Outcome(True, 'alert "Saved." accepted')


async def test_a_download_is_reported(surprises: BrowserComputer) -> None:
    outcomes = [await surprises.do(CLICK, row(8)), await surprises.do(Wait(seconds=0.5), None)]
    assert 'download "second.html" cancelled' in [outcome.text for outcome in outcomes]


async def test_an_answer_that_is_late_is_waited_for(surprises: BrowserComputer) -> None:
    assert await surprises.do(CLICK, row(5)) == OK
    assert "late but here" in await surprises.evaluate("() => document.getElementById('late').innerText")


async def test_a_slow_page_is_waited_for(surprises: BrowserComputer) -> None:
    assert await surprises.do(CLICK, row(6)) == OK
    assert (await surprises.state()).title == "Slow"


async def test_a_crashed_page_is_opened_again(browser: Browser, site: Site) -> None:
    computer = await browser.new_computer(300, 200)
    await computer.goto(site.url("second.html"))
    crashed = asyncio.Event()
    computer.page.on("crash", lambda _: crashed.set())
    session = await computer.context.new_cdp_session(computer.page)
    sent = asyncio.ensure_future(session.send("Page.crash"))  # a crashed page answers late or never
    await asyncio.wait_for(crashed.wait(), 20)
    sent.cancel()
    await asyncio.gather(sent, return_exceptions=True)
    shot = await computer.screenshot()
    assert (shot.width, shot.height) == (300, 200)
    outcome = await computer.do(NOTHING, None)
    assert outcome.ok and "the page crashed and was opened again" in outcome.text
    assert (await computer.state()).url == site.url("second.html")
    assert await computer.do(NOTHING, None) == OK
    await computer.close()


async def test_a_page_that_hangs_is_opened_again(browser: Browser, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    computer = await browser.new_computer(300, 400)
    await computer.goto(site.url("surprises.html"))
    monkeypatch.setattr("holotron.computer.browser_computer.ACTION_S", 2.0)
    monkeypatch.setattr("holotron.computer.tabs.CLOSE_S", 0.5)
    outcome = await computer.do(CLICK, row(9))
    assert not outcome.ok and "the page does not respond" in outcome.text
    monkeypatch.undo()
    assert await computer.do(CLICK, row(0)) == Outcome(True, 'alert "Saved." accepted')
    await computer.close()


async def test_a_closed_last_tab_is_replaced(browser: Browser) -> None:
    computer = await browser.new_computer(300, 200)
    await computer.page.close()
    assert "empty one was opened" in (await computer.do(NOTHING, None)).text
    await computer.close()


async def test_a_killed_browser_is_a_computer_error_and_comes_back() -> None:
    async with await Browser.launch() as browser:
        computer = await browser.new_computer(300, 200)
        await computer.page.set_content("<input autofocus>")
        version = browser.version
        for pid in chromium_children():
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        for broken in (
            computer.do(CLICK, (5.0, 5.0)),
            computer.do(Write(content="x"), None),
            computer.screenshot(),
            computer.state(),
            computer.goto("about:blank"),
        ):
            with pytest.raises(ComputerError, match="Chromium is gone"):
                await broken
        assert time.monotonic() - began < 10
        await computer.close()
        again = await browser.new_computer(300, 200)
        assert (await again.screenshot()).width == 300
        assert browser.version == version


def chromium_children() -> list[int]:
    """Browser processes below this one, those of other tests left alone: the youngest driver's."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
    drivers = [pid for pid, parent in parents.items() if parent == os.getpid()]
    return [pid for pid, parent in parents.items() if parent == max(drivers)]


async def test_separate_computers_share_nothing(browser: Browser, site: Site) -> None:
    one, two = await browser.new_computer(200, 100), await browser.new_computer(200, 100)
    await one.goto(site.url("second.html"))
    await two.goto(site.url("second.html"))
    await one.evaluate("() => { localStorage.name = 'one'; document.cookie = 'name=one' }")
    assert await two.evaluate("() => [localStorage.name ?? null, document.cookie]") == [None, ""]
    await one.close()
    assert await two.do(NOTHING, None) == OK
    await two.close()


async def test_an_unreachable_start_page_is_named(browser: Browser) -> None:
    computer = await browser.new_computer(200, 100)
    with pytest.raises(ComputerError, match="http://127.0.0.1:9/nowhere"):
        await computer.goto("http://127.0.0.1:9/nowhere")
    await computer.close()
