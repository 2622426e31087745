"""Every tool, carried out in a real browser on a real page, by its effect in that page."""

from __future__ import annotations

import time
from typing import Any

import pytest
import pytest_asyncio

from holotron.computer.browser import Browser, BrowserComputer
from holotron.computer.computer import Outcome, Point
from holotron.computer.hands import WHEEL_CLICK_PX
from holotron.contract.step import (
    Answer,
    Click,
    DoubleClick,
    DragTo,
    Goal,
    GoBack,
    HoldAndTapKey,
    Hotkey,
    KeyDown,
    KeyUp,
    MoveTo,
    Navigate,
    Scroll,
    UpdatePlan,
    Wait,
    Write,
)
from tests.pages.server import Site

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

OK = Outcome(True, "ok")
TARGET: Point = (70.0, 30.0)
FIELD: Point = (140.0, 70.0)
AREA: Point = (140.0, 130.0)
CLICK = Click(element="it", x=0, y=0)


@pytest_asyncio.fixture(loop_scope="session")
async def controls(computer: BrowserComputer, site: Site) -> BrowserComputer:
    await computer.goto(site.url("controls.html"))
    return computer


async def log(computer: BrowserComputer) -> list[list[Any]]:
    """What the page saw since the last look."""
    return await computer.evaluate("() => log.splice(0)")


async def text(computer: BrowserComputer, selector: str) -> str:
    return await computer.evaluate(
        "s => { const e = document.querySelector(s); return e.value ?? e.innerText }", selector
    )


@pytest.mark.parametrize(
    ("button", "seen"),
    [
        ("left", [["enter"], ["click", 0, 70, 30]]),
        ("right", [["enter"], ["contextmenu", 2, 70, 30], ["auxclick", 2, 70, 30]]),
        ("middle", [["enter"], ["auxclick", 1, 70, 30]]),
    ],
)
async def test_click(controls: BrowserComputer, button: str, seen: list[list[Any]]) -> None:
    assert await controls.do(CLICK.model_copy(update={"button": button}), TARGET) == OK
    assert sorted(await log(controls)) == sorted(seen)
    assert (await controls.state()).cursor == TARGET


async def test_double_click(controls: BrowserComputer) -> None:
    assert await controls.do(DoubleClick(element="it", x=0, y=0), TARGET) == OK
    assert [entry[0] for entry in await log(controls)] == ["enter", "click", "click", "dblclick"]


async def test_move_to(controls: BrowserComputer) -> None:
    assert await controls.do(MoveTo(element="it", x=0, y=0), TARGET) == OK
    assert await log(controls) == [["enter"]]


async def test_drag_starts_at_the_cursor(controls: BrowserComputer) -> None:
    await controls.do(MoveTo(element="ball", x=0, y=0), (55.0, 215.0))
    assert await controls.do(DragTo(element="there", x=0, y=0), (255.0, 315.0)) == OK
    assert await controls.evaluate("() => [ball.style.left, ball.style.top]") == ["240px", "300px"]
    assert await controls.do(DragTo(element="back", x=0, y=0), (155.0, 265.0)) == OK
    assert await controls.evaluate("() => [ball.style.left, ball.style.top]") == ["140px", "250px"]


async def test_scroll_moves_the_container_at_the_point(controls: BrowserComputer) -> None:
    def scroll(direction: str, size: int) -> Scroll:
        return Scroll(element="box", x=0, y=0, direction=direction, scroll_size=size)  # type: ignore[arg-type]

    where = "() => [box.scrollTop, box.scrollLeft, scrollY]"
    at = (370.0, 80.0)
    assert await controls.do(scroll("down", 10), at) == OK
    assert await controls.evaluate(where) == [10 * WHEEL_CLICK_PX, 0, 0]
    await controls.do(scroll("right", 2), at)
    await controls.do(scroll("up", 4), at)
    assert await controls.evaluate(where) == [6 * WHEEL_CLICK_PX, 2 * WHEEL_CLICK_PX, 0]
    await controls.do(scroll("left", 20), at)
    assert await controls.evaluate(where) == [6 * WHEEL_CLICK_PX, 0, 0]


@pytest.mark.parametrize("content", ["Ana", "señor Müller, ça va?", "世界 こんにちは", "👩‍🚀🎉", "~{}\\\"'`", "a b  c"])
@pytest.mark.parametrize(("selector", "at"), [("#field", FIELD), ("#area", AREA), ("#editor", (140.0, 280.0))])
async def test_text_arrives_intact(controls: BrowserComputer, content: str, selector: str, at: Point) -> None:
    await controls.do(CLICK, at)
    assert await controls.do(Write(content=content), None) == OK
    assert (await text(controls, selector)).replace("\xa0", " ") == content


async def test_long_text_arrives_intact(controls: BrowserComputer) -> None:
    content = "lorem ípsum 世 " * 80
    await controls.do(CLICK, AREA)
    await controls.do(Write(content=content), None)
    assert await text(controls, "#area") == content


async def test_only_press_enter_submits(controls: BrowserComputer) -> None:
    await controls.do(CLICK, FIELD)
    await controls.do(Write(content="one\ntwo\n"), None)
    assert ["submit"] not in await log(controls)
    assert await text(controls, "#field") == "one two "
    await controls.do(Write(content="three", press_enter=True), None)
    assert ["submit"] in await log(controls)


async def test_a_newline_in_a_textarea_is_text(controls: BrowserComputer) -> None:
    await controls.do(CLICK, AREA)
    await controls.do(Write(content="one\r\ntwo\n\tthree"), None)
    assert await text(controls, "#area") == "one\ntwo\n\tthree"


async def test_overwrite_leaves_no_old_text(controls: BrowserComputer) -> None:
    for selector, at in (("#field", FIELD), ("#area", AREA)):
        await controls.do(CLICK, at)
        await controls.do(Write(content="old text"), None)
        await controls.do(Write(content=" more"), None)
        assert await text(controls, selector) == "old text more"
        await controls.do(Write(content="new", overwrite=True), None)
        assert await text(controls, selector) == "new"
        await controls.do(Write(content="", overwrite=True), None)
        assert await text(controls, selector) == ""


async def test_writing_into_nothing_is_said(controls: BrowserComputer) -> None:
    assert await controls.do(Write(content="x"), None) == Outcome(True, "nothing has the focus")


@pytest.mark.parametrize("keys", [["Ctrl", "A"], ["CONTROL", "a"], ["ctrl+a"], ["command", "a"], ["Control_L", "a"]])
async def test_hotkeys_in_any_spelling(controls: BrowserComputer, keys: list[str]) -> None:
    await controls.do(CLICK, FIELD)
    await controls.do(Write(content="all of it"), None)
    await log(controls)
    assert await controls.do(Hotkey(keys=keys), None) == OK
    seen = await log(controls)
    assert ["down", "a", True, False, False, False] in seen and seen[-1] == ["up", "Control"]
    await controls.do(Hotkey(keys=["del"]), None)
    assert await text(controls, "#field") == ""


async def test_hotkey_repeats(controls: BrowserComputer) -> None:
    await controls.do(CLICK, FIELD)
    await controls.do(Write(content="abcdef"), None)
    await controls.do(Hotkey(keys=["backspace"], repeat_count=4), None)
    assert await text(controls, "#field") == "ab"


async def test_an_unknown_key_is_refused_in_words(controls: BrowserComputer) -> None:
    outcome = await controls.do(Hotkey(keys=["ctrl", "hyperspace"]), None)
    assert not outcome.ok and "hyperspace" in outcome.text
    assert await log(controls) == []


async def test_hold_and_tap(controls: BrowserComputer) -> None:
    await controls.do(HoldAndTapKey(hold_keys=["shift", "alt"], tap_keys=["Left", "esc"]), None)
    assert [entry[:2] for entry in await log(controls)] == [
        ["down", "Shift"], ["down", "Alt"], ["down", "ArrowLeft"], ["up", "ArrowLeft"],
        ["down", "Escape"], ["up", "Escape"], ["up", "Alt"], ["up", "Shift"],
    ]  # fmt: skip


async def test_a_key_stays_down_until_it_is_let_go(controls: BrowserComputer) -> None:
    await controls.do(KeyDown(key="Shift"), None)
    await controls.do(CLICK, FIELD)
    await controls.do(Hotkey(keys=["x"]), None)
    await controls.do(KeyUp(key="shift"), None)
    await controls.do(Hotkey(keys=["x"]), None)
    assert await text(controls, "#field") == "Xx"


async def test_reset_lets_keys_go(controls: BrowserComputer) -> None:
    await controls.do(KeyDown(key="ctrl"), None)
    await controls.reset()
    assert (await log(controls))[-1] == ["up", "Control"]


async def test_wait_plan_and_answer(controls: BrowserComputer) -> None:
    began = time.perf_counter()
    assert await controls.do(Wait(seconds=0.2), None) == OK
    assert time.perf_counter() - began >= 0.2
    plan = UpdatePlan(goals=[Goal(title="Find it", status="done"), Goal(title="Buy it", status="running")])
    assert await controls.do(plan, None) == Outcome(True, "1. Find it [done]\n2. Buy it [running]")
    assert await controls.do(Answer(content="42"), None) == OK


async def test_navigate_and_back(controls: BrowserComputer, site: Site) -> None:
    assert await controls.do(Navigate(url=site.url("second.html").removeprefix("http://")), None) == OK
    assert (await controls.state()).title == "Second"
    assert await controls.do(GoBack(), None) == OK
    assert (await controls.state()).url == site.url("controls.html")
    assert await controls.do(Navigate(url=site.url("missing.html")), None) == Outcome(True, "HTTP status 404")
    lost = await controls.do(Navigate(url="http://127.0.0.1:9/"), None)
    assert not lost.ok and "http://127.0.0.1:9/" in lost.text
    assert (await controls.do(Navigate(url="file:///etc/passwd"), None)).text.startswith("refused: file:")


async def test_select_popup_is_seen_and_clicked(controls: BrowserComputer) -> None:
    """The browser's own popup can be drawn, but not clicked; ours is part of the page."""
    before = await controls.screenshot()
    await controls.do(CLICK, (375.0, 170.0))
    assert (await controls.screenshot()).png != before.png
    box = await controls.evaluate(
        """() => { const r = pick.options[1].getBoundingClientRect();
                   return [r.x + r.width / 2, r.y + r.height / 2, r.height] }"""
    )
    assert box[2] > 5
    await controls.do(CLICK, (box[0], box[1]))
    assert await text(controls, "#pick") == "pear"
    assert ["change", "pear"] in await log(controls)


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
async def test_scale_factors(browser: Browser, site: Site, factor: float) -> None:
    """The red button is found in the pixels of the screenshot; a click there lands on its centre."""
    computer = await browser.new_computer(321, 243, device_scale_factor=factor)
    page = (
        "<body style='margin:0'><button style='position:absolute;left:171px;top:93px;width:30px;height:20px;"
        "border:0;background:red' onclick='window.at=[event.offsetX,event.offsetY]'></button>"
    )
    await computer.goto(site.url(f"page?{page}"))
    shot = await computer.screenshot()
    assert (shot.width, shot.height, shot.css_width, shot.css_height) == (321, 243, 321.0, 243.0)
    await computer.do(CLICK, red_centre(shot.png))
    x, y = await computer.evaluate("() => window.at")
    assert abs(x - 15) <= 1 and abs(y - 10) <= 1
    assert await computer.evaluate("() => devicePixelRatio") == factor
    await computer.close()


async def test_a_point_beyond_the_edge_lands_on_the_last_pixel(computer: BrowserComputer, site: Site) -> None:
    await computer.goto(site.url("page?<script>onclick=e=>{window.at=[e.clientX,e.clientY]}</script>"))
    await computer.do(CLICK, (500.0, 400.0))
    assert await computer.evaluate("() => window.at") == [499, 399]


def red_centre(png: bytes) -> Point:
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    red = [
        (i % image.width, i // image.width)
        for i, pixel in enumerate(zip(*(band.tobytes() for band in image.split()), strict=True))
        if pixel[0] > 200 and pixel[1] < 60 and pixel[2] < 60
    ]
    xs, ys = zip(*red, strict=True)
    return (min(xs) + max(xs) + 1) / 2, (min(ys) + max(ys) + 1) / 2
