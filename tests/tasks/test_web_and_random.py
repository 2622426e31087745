"""Free tasks on any page, and the random policy."""

from __future__ import annotations

import pytest

from holotron.computer.browser import BrowserComputer
from holotron.computer.computer import ComputerError
from holotron.contract.conversation import Conversation
from holotron.contract.step import Answer, Click, Write
from holotron.tasks.random_policy import RandomPolicy
from holotron.tasks.web import WebTask
from tests.pages.server import Site

in_browser = pytest.mark.browser
pytestmark = pytest.mark.asyncio(loop_scope="session")


@in_browser
async def test_a_web_task_runs_and_stays_undecided(computer: BrowserComputer, site: Site) -> None:
    task = WebTask(computer, "Press the button.", site.url("controls.html"))
    assert await task.reset(0) == "Press the button."
    step = await task.step(Click(element="Target", x=0, y=0), (70.0, 30.0))
    assert (step.outcome.text, step.terminated, step.success) == ("ok", False, None)
    assert await computer.evaluate("() => log.some(e => e[0] === 'click')")
    done = await task.step(Answer(content="pressed"), None)
    assert (done.terminated, done.success) == (True, None)


@in_browser
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/lost", "file:///etc/hostname", "no such address"])
async def test_an_unreachable_url_is_named(computer: BrowserComputer, url: str) -> None:
    with pytest.raises(ComputerError) as failure:
        await WebTask(computer, "Look.", url).reset(0)
    assert url in str(failure.value) or url.split(":")[0] in str(failure.value)


async def test_random_is_repeatable_and_uniform() -> None:
    goal = Conversation(goal='Enter "Ann" into the text field.')

    async def steps(seed: int, conversation: Conversation) -> list[object]:
        policy = RandomPolicy(seed)
        return [(await policy.decide(conversation)).step.tool_call for _ in range(500)]

    calls = await steps(1, goal)
    assert calls == await steps(1, goal) and calls != await steps(2, goal)
    writes = [call for call in calls if isinstance(call, Write)]
    clicks = [call for call in calls if isinstance(call, Click)]
    assert 20 < len(writes) < 90 and {call.content for call in writes} == {"Ann"}
    for axis in ("x", "y"):
        values = [getattr(call, axis) for call in clicks]
        assert min(values) < 50 and max(values) > 950 and 440 < sum(values) / len(values) < 560
    assert all(isinstance(call, Click) for call in await steps(1, Conversation(goal="Click the button.")))
