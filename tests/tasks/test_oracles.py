"""The oracles solve their tasks, from any state, and say what a small model can learn to say."""

from __future__ import annotations

import random

import pytest

from holotron.computer.browser import BrowserComputer
from holotron.contract.conversation import Conversation
from holotron.contract.policy import Decision
from holotron.contract.step import Click, Step, Write
from holotron.tasks.miniwob import EASY20, MiniWobTask
from holotron.tasks.oracles import ORACLES, THOUGHTS, NoTarget, OraclePolicy
from holotron.tasks.task import Transition

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

SEEDS = (0, 11, 222)
MOST_STEPS = 15


async def follow(task: MiniWobTask, step: Step) -> Transition:
    call = step.tool_call
    width, height = task.computer.width, task.computer.height
    point = (call.x * width / 1000, call.y * height / 1000) if hasattr(call, "x") else None
    return await task.step(call, point)


async def finish(task: MiniWobTask, goal: str) -> tuple[Transition, list[Decision]]:
    oracle = OraclePolicy(task)
    decisions: list[Decision] = []
    while True:
        assert len(decisions) < MOST_STEPS, decisions
        decisions.append(await oracle.decide(Conversation(goal=goal)))
        transition = await follow(task, decisions[-1].step)
        assert transition.outcome.text == "ok"
        if transition.terminated:
            return transition, decisions


async def test_there_is_one_for_each_easy_task() -> None:
    assert set(ORACLES) == set(EASY20)
    assert len(THOUGHTS) == len(set(THOUGHTS)) <= 15


@pytest.mark.parametrize("name", EASY20)
async def test_an_oracle_solves_its_task(computer: BrowserComputer, name: str) -> None:
    task = MiniWobTask(computer, name)
    for seed in SEEDS:
        transition, decisions = await finish(task, await task.reset(seed))
        assert transition.success, (seed, decisions)
        for decision in decisions:
            check_form(decision, task)


def check_form(decision: Decision, task: MiniWobTask) -> None:
    step, box = decision.step, decision.extra["box"]
    assert step.note is None and step.thought in THOUGHTS
    if isinstance(step.tool_call, Click):
        assert step.tool_call.element
        x0, y0, x1, y1 = box
        x, y = step.tool_call.x * 0.16, step.tool_call.y * 0.16
        assert 0 <= x0 < x < x1 <= 160 and 0 <= y0 < y < y1 <= 160
    else:
        assert isinstance(step.tool_call, Write) and box is None
        assert not step.tool_call.press_enter


@pytest.mark.parametrize("name", ["click-option", "click-checkboxes", "click-shades", "click-collapsible"])
async def test_an_oracle_repairs_what_was_done_wrong(computer: BrowserComputer, name: str) -> None:
    """Clicks at random, some of them wrong, none of them on the button that ends the episode."""
    task = MiniWobTask(computer, name)
    dice = random.Random(name)
    repaired = 0
    for seed in range(3):
        goal = await task.reset(seed)
        points = await computer.evaluate(
            """() => [...document.querySelectorAll('#area label, #area [data-color], #area h3')].map(e => {
                 const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })"""
        )
        for x, y in dice.sample(points, k=min(3, len(points))):
            await task.step(Click(element="any", x=0, y=0), (x, y))
        transition, _ = await finish(task, goal)
        repaired += transition.success is True
    assert repaired == 3


@pytest.mark.parametrize("name", ["enter-text", "enter-password", "login-user"])
async def test_an_oracle_replaces_wrong_text(computer: BrowserComputer, name: str) -> None:
    task = MiniWobTask(computer, name)
    goal = await task.reset(5)
    first = await OraclePolicy(task).decide(Conversation(goal=goal))
    await follow(task, first.step)
    await follow(task, Step(thought="Wrong.", tool_call=Write(content="wrong")))
    transition, decisions = await finish(task, goal)
    assert transition.success
    assert decisions[0].step.tool_call.model_dump()["overwrite"] is True


async def test_an_oracle_scrolls_to_what_is_out_of_sight(computer: BrowserComputer) -> None:
    task = MiniWobTask(computer, "click-test")
    goal = await task.reset(0)
    await computer.evaluate("() => { subbtn.style.marginTop = '700px' }")
    transition, decisions = await finish(task, goal)
    assert transition.success and len(decisions) > 1
    assert {d.step.tool_call.tool_name for d in decisions[:-1]} == {"scroll"}


async def test_a_finished_page_has_no_next_step(computer: BrowserComputer) -> None:
    task = MiniWobTask(computer, "click-dialog")
    goal = await task.reset(0)
    await finish(task, goal)
    with pytest.raises(NoTarget):
        await OraclePolicy(task).decide(Conversation(goal=goal))


async def test_a_task_without_an_oracle_is_named(computer: BrowserComputer) -> None:
    with pytest.raises(ValueError, match="no oracle solves book-flight"):
        OraclePolicy(MiniWobTask(computer, "book-flight"))
