"""The page in a real Chromium: it opens offline, its script works, its markers sit on their points."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Page, async_playwright

from holotron.agent.trajectory import read_run
from holotron.computer.chromium import find_chromium
from holotron.report.html import write_report
from tests.report.real_run import play
from tests.report.run_folder import small_run

pytestmark = pytest.mark.browser

# The centre of each marker's ring and the rectangle of its image, in the page's CSS pixels.
MARKERS = """() => [...document.querySelectorAll("details[open] button.frame")].map(frame => {
  const box = frame.querySelector("img").getBoundingClientRect();
  const ring = frame.querySelector(".over circle")?.getBoundingClientRect();
  return ring ? [(ring.left + ring.right) / 2 - box.left, (ring.top + ring.bottom) / 2 - box.top,
                 box.width, box.height] : null;
})"""

UNNAMED_BUTTONS = """[...document.querySelectorAll("button")].filter(
  button => !(button.ariaLabel || button.textContent.trim())).length"""
DECODE_ALL = """Promise.all([...document.images].map(image => { image.loading = "eager"; return image.decode(); }))"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(small_run(tmp_path_factory.mktemp("run")))


@asynccontextmanager
async def opened(path: Path, width: int = 1280, dark: bool = False) -> AsyncIterator[Page]:
    """The page, and at the end the proof that it asked for nothing and complained of nothing."""
    troubles: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=str(find_chromium().path),
            args=["--no-sandbox", "--disable-gpu", "--disable-quic"],
        )
        try:
            page = await browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
            )
            page.on("console", lambda message: troubles.append(f"console: {message.text}"))
            page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
            page.on("request", lambda request: troubles.append(request.url))
            await page.goto(path.as_uri())
            yield page
        finally:
            await browser.close()
    assert [one for one in troubles if not one.startswith("data:")] == [path.as_uri()]


async def test_filters_and_details(report: Path) -> None:
    async with opened(report) as page:
        shown = page.locator("details.episode:visible")
        assert await shown.count() == 7
        assert await page.locator("details.episode[open]").count() == 1
        await page.select_option("#outcome", "failure")
        assert await shown.count() == 2
        assert await page.inner_text("#shown") == "2 of 7 episodes"
        await page.select_option("#task", "enter-text")
        assert await shown.count() == 0
        assert await page.is_visible("#none")
        await page.click("a[data-task='click-test']")  # shows the whole task
        assert await shown.count() == 3
        assert not await page.is_visible("#none")
        await page.click("#open-all")
        assert await page.locator("details.episode[open]").count() == 3
        await page.click("#close-all")
        assert await page.locator("details.episode[open]").count() == 0
        await shown.first.locator("summary").focus()
        await page.keyboard.press("Enter")
        assert await page.locator("details.episode[open]").count() == 1


async def test_hostile_text_does_nothing_and_everything_has_a_name(report: Path) -> None:
    async with opened(report) as page:
        await page.click("#open-all")
        assert await page.title() == "pilot on 4 tasks"
        assert await page.locator("img[src='x']").count() == 0
        thought = page.locator("[data-task=drag-box] .thought")
        assert (await thought.inner_text()).count("<script>") == 1
        assert await page.locator("img:not([alt]), img[alt='']").count() == 0
        assert await page.evaluate(UNNAMED_BUTTONS) == 0
        assert await page.locator("h1").count() == 1


async def test_a_frame_is_enlarged_and_left_by_keyboard(report: Path) -> None:
    async with opened(report) as page:
        frame = page.locator("button.frame").first
        await frame.focus()
        await page.keyboard.press("Enter")
        assert await page.is_visible("#enlarged")
        assert "Step 1: click “Ok button”" in await page.inner_text("#enlarged-caption")
        stage, small = await page.locator("#stage img").bounding_box(), await frame.bounding_box()
        assert stage and small and stage["width"] > 2 * small["width"]
        assert stage["y"] >= 0 and stage["y"] + stage["height"] <= 900
        await page.keyboard.press("ArrowRight")
        assert "Step 2: write" in await page.inner_text("#enlarged-caption")
        await page.keyboard.press("Escape")
        assert not await page.is_visible("#enlarged")
        assert await frame.evaluate("frame => frame === document.activeElement")


@pytest.mark.parametrize("width", [1280, 390])
async def test_nothing_spills_over_the_sides(report: Path, width: int) -> None:
    async with opened(report, width=width, dark=True) as page:
        await page.click("#open-all")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


async def test_markers_of_a_real_run_sit_where_the_click_went(tmp_path: Path) -> None:
    summary = await play(tmp_path, ["click-test", "enter-text"], seeds=2, slips=0.0)
    assert summary.total.successes == 4  # an oracle that never slips
    steps = [step for episode in read_run(tmp_path).episodes for step in episode.steps]
    async with opened(write_report(tmp_path)) as page:
        await page.click("#open-all")
        found = await page.evaluate(MARKERS)
        assert len(found) == len(steps) >= 7  # all succeeded, so the order is that of the folders
        for marker, step in zip(found, steps, strict=True):
            if step.point is None:
                assert marker is None
                continue
            x, y, width, height = marker
            assert x * step.css_width / width == pytest.approx(step.point[0], abs=1.0)
            assert y * step.css_height / height == pytest.approx(step.point[1], abs=1.0)
        sizes = "[...document.images].map(image => [image.naturalWidth, image.naturalHeight])"
        await page.evaluate("Promise.all([...document.images].map(i => { i.loading = 'eager'; return i.decode(); }))")
        assert all(size == [160, 160] for size in await page.evaluate(sizes))
