"""MiniWoB++ in a real browser: every task starts, repeats by seed, and tells success from failure."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from holotron.computer.browser import Browser, BrowserComputer
from holotron.computer.computer import Outcome
from holotron.contract.step import Answer, Click, Navigate, Wait, Write
from holotron.tasks.miniwob import EASY20, TASKS, MiniWobTask, UnknownTask, viewport

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

CLICK = Click(element="it", x=0, y=0)

# Moved by a timer from the first moment on, so equal seeds give equal goals, but pixels that depend on the moment.
MOVING = {"chase-circle", "hover-shape", "moving-items", "simon-says", "stock-market"}


async def test_the_lists() -> None:
    assert len(TASKS) == 130 and len(set(TASKS)) == 130
    assert len(EASY20) == 20 and set(EASY20) <= set(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
async def test_every_task_repeats_by_seed(computer: BrowserComputer, part: int) -> None:
    """The second reset follows another episode, in which something was clicked and typed."""
    differ = []
    for name in TASKS[part::5]:
        task = MiniWobTask(computer, name)
        goal, first = await task.reset(7), await task.screenshot()
        assert goal and (first.width, first.height) == viewport(), name
        await task.reset(8)
        await task.step(CLICK, (40.0, 30.0))
        await task.step(Write(content="ab"), None)
        again, second = await task.reset(7), await task.screenshot()
        assert again == goal, name
        if second.png != first.png and name not in MOVING:
            differ.append(name)
    assert not differ


async def test_seeds_differ(computer: BrowserComputer) -> None:
    task = MiniWobTask(computer, "enter-text")
    seen = set()
    for seed in range(5):
        goal = await task.reset(seed)
        seen.add((goal, (await task.screenshot()).png))
    assert len(seen) == 5


@pytest.mark.parametrize("name", EASY20)
async def test_a_kept_page_looks_like_a_new_one(browser: Browser, computer: BrowserComputer, name: str) -> None:
    kept = MiniWobTask(computer, name)
    for seed in (1, 2):
        await kept.reset(seed)
        for point in ((30.0, 10.0), (80.0, 60.0), (30.0, 110.0)):
            await kept.step(CLICK, point)
            await kept.step(Write(content="ab"), None)
    goal, shot = await kept.reset(3), await kept.screenshot()
    fresh = await browser.new_computer(*viewport())
    other = MiniWobTask(fresh, name)
    assert await other.reset(3) == goal
    assert (await other.screenshot()).png == shot.png
    await fresh.close()


async def test_the_query_bar_is_seen_only_on_request(browser: Browser, computer: BrowserComputer) -> None:
    def yellow(png: bytes) -> bool:
        colors = Image.open(io.BytesIO(png)).convert("RGB").getcolors(maxcolors=160 * 210) or []
        return (255, 255, 0) in [color for _, color in colors]

    task = MiniWobTask(computer, "click-test-2")
    await task.reset(1)
    assert not yellow((await task.screenshot()).png)
    whole = await browser.new_computer(*viewport(show_query=True))
    with_query = MiniWobTask(whole, "click-test-2", show_query=True)
    await with_query.reset(1)
    shot = await with_query.screenshot()
    assert yellow(shot.png) and (shot.width, shot.height) == (160, 210)
    area = Image.open(io.BytesIO(shot.png)).convert("RGB").crop((0, 50, 160, 210))
    seen = Image.open(io.BytesIO((await task.screenshot()).png)).convert("RGB")
    assert area.tobytes() == seen.tobytes()
    await whole.close()


async def test_the_query_bar_cannot_be_scrolled_into_view(computer: BrowserComputer) -> None:
    task = MiniWobTask(computer, "click-test-2")
    await task.reset(1)
    before = await task.screenshot()
    await computer.page.mouse.move(100, 100)
    await computer.page.mouse.wheel(0, -500)
    await task.step(Wait(seconds=0), None)
    await computer.park_cursor()
    assert (await task.screenshot()).png == before.png


@pytest.mark.parametrize(("wanted", "reward"), [("ONE", 1.0), ("TWO", -1.0)])
async def test_reward_and_success(computer: BrowserComputer, wanted: str, reward: float) -> None:
    task = MiniWobTask(computer, "click-test-2")
    assert await task.reset(4) == "Click button ONE."
    nothing = await task.step(CLICK, (1.0, 159.0))
    assert (nothing.terminated, nothing.success, nothing.reward) == (False, None, 0.0)
    x, y = await computer.evaluate(
        """text => { const b = [...document.querySelectorAll('button')].find(b => b.textContent === text);
                     const r = b.getBoundingClientRect(); return [r.x + 3, r.y + 3] }""",
        wanted,
    )
    done = await task.step(CLICK, (x, y))
    assert (done.terminated, done.success, done.reward) == (True, reward == 1.0, reward)
    assert done.outcome == Outcome(True, "ok")
    assert await task.step(CLICK, (1.0, 1.0)) == done


async def test_a_part_of_the_reward_is_no_success(computer: BrowserComputer) -> None:
    task = MiniWobTask(computer, "click-checkboxes")
    for seed in range(20):
        goal = await task.reset(seed)
        if "nothing" in goal or goal.count(",") < 1:
            continue
        names = goal.removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
        boxes = await computer.evaluate("() => document.querySelectorAll('#area input').length")
        if boxes > 3:
            break
    await computer.evaluate(
        """names => [...document.querySelectorAll('#area label')].forEach(l => {
             l.control.checked = names.slice(1).includes(l.textContent) })""",
        names,
    )
    submit = await computer.evaluate(
        "() => { const r = subbtn.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] }"
    )
    done = await task.step(CLICK, tuple(submit))
    assert done.terminated and done.success is False and 0 < done.reward < 1


async def test_an_answer_ends_without_success(computer: BrowserComputer) -> None:
    task = MiniWobTask(computer, "click-test")
    await task.reset(0)
    done = await task.step(Answer(content="done"), None)
    assert (done.terminated, done.success) == (True, False)


async def test_leaving_the_page_is_no_success_and_reset_returns(computer: BrowserComputer) -> None:
    task = MiniWobTask(computer, "click-test")
    await task.reset(0)
    before = await task.screenshot()
    gone = await task.step(Navigate(url="about:blank"), None)
    assert not gone.terminated and gone.info["left_page"] == "about:blank"
    await task.reset(0)
    assert (await task.screenshot()).png == before.png


async def test_a_reloaded_page_is_a_lost_episode(computer: BrowserComputer) -> None:
    task = MiniWobTask(computer, "click-test")
    await task.reset(0)
    done = await task.step(Navigate(url=computer.page.url), None)
    assert (done.terminated, done.success) == (True, False)


async def test_unknown_tasks_and_wrong_viewports_are_named(browser: Browser, computer: BrowserComputer) -> None:
    with pytest.raises(UnknownTask, match="click-checkboxes"):
        MiniWobTask(computer, "click-checkbox")
    with pytest.raises(UnknownTask, match="flight"):
        MiniWobTask(computer, "../flight/AA/wrapper")
    with pytest.raises(ValueError, match=r"viewport of \(160, 210\)"):
        MiniWobTask(computer, "click-test", show_query=True)
