"""The loop on real pages: limits, repetition, unusable output, and trouble that is not the model's."""

from __future__ import annotations

import asyncio
import os
import signal
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from holotron.agent.loop import Limits, PolicyFor, TaskSource, run_episode
from holotron.agent.records import EpisodeResult
from holotron.agent.repetition import NUDGES
from holotron.agent.trajectory import TrajectoryWriter, read_episode
from holotron.computer.browser import Browser
from holotron.contract.conversation import Conversation, Settings
from holotron.contract.policy import ContractError, Decision, Policy, PolicyError, Usage
from holotron.contract.step import Click, Step, Wait
from holotron.serving.http_policy import HttpPolicy
from holotron.tasks.miniwob import MiniWobTask
from tests.agent.rig import (
    ANSWER,
    CONTRACT,
    CORNER,
    QuestionTask,
    Scripted,
    SlowOracle,
    browser_pid,
    open_in,
)
from tests.serving.endpoint import completion, serve

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
BAD = ContractError("tool_call.x: 1200 is outside 0..1000", raw_text='{"x": 1200}', attempts=3,
                    usage=Usage(output_tokens=7))  # fmt: skip


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with await Browser.launch() as browser:
        yield browser


async def play(
    browser: Browser, policy: Policy | PolicyFor, folder: Path, task: str = "click-test-2", **limits: Any
) -> EpisodeResult:
    source = TaskSource(lambda: open_in(browser)(task))
    try:
        return await run_episode(
            source, task, policy, CONTRACT, 3, Limits(**limits), TrajectoryWriter(folder), Settings()
        )
    finally:
        await source.discard()


async def test_an_oracle_succeeds_and_leaves_a_whole_trajectory(browser: Browser, tmp_path: Path) -> None:
    result = await play(browser, SlowOracle, tmp_path / "e", "enter-password")
    episode = read_episode(tmp_path / "e")
    assert episode.result == result and (result.status, result.success, result.reward) == (
        "success",
        True,
        1.0,
    )
    steps = episode.steps
    assert [step.index for step in steps] == list(range(len(steps))) and result.steps == len(steps) == 5
    assert steps[0].goal == result.goal and "password" in result.goal
    for step in steps:
        assert step.step is not None and not step.error and step.attempts == 1
        assert (step.width, step.height, step.css_width, step.css_height) == (160, 160, 160.0, 160.0)
        assert step.decide_s > 0 and step.act_s > 0 and step.screenshot_s > 0
        assert (step.point is not None) == isinstance(step.step.tool_call, Click)
    click = steps[0].step.tool_call
    assert isinstance(click, Click) and steps[0].point == (
        pytest.approx(click.x * 0.16, abs=0.51), pytest.approx(click.y * 0.16, abs=0.51))  # fmt: skip
    assert [step.terminated for step in steps] == [False] * 4 + [True]
    assert result.prompt_tokens == 500 and result.output_tokens == 50
    assert all(a.at <= b.at for a, b in zip(steps, steps[1:], strict=False))


async def test_the_same_action_on_the_same_pixels_is_answered_and_then_stopped(
    browser: Browser, tmp_path: Path
) -> None:
    policy = Scripted(CORNER)
    result = await play(browser, policy, tmp_path / "e", max_steps=30)
    assert (result.status, result.success, result.steps) == ("stuck", False, 9)
    said = {index + 1: text for index, text in enumerate(policy.observations) if text}
    assert said == {count + 1: text for count, text in NUDGES.items()}
    assert any(NUDGES[8] in part["text"] for part in policy.messages[-1][-1]["content"] if "text" in part)
    assert [step.observation for step in read_episode(tmp_path / "e").steps] == policy.observations


async def test_going_to_and_fro_is_repetition_as_well(browser: Browser, tmp_path: Path) -> None:
    other = Step(thought="And now there.", tool_call=Click(element="other corner", x=10, y=990))
    reworded = Step(thought="t", tool_call=Click(element="the same, in other words", x=990, y=990))
    policy = Scripted(CORNER, other, reworded, other, *([CORNER, other] * 10))
    result = await play(browser, policy, tmp_path / "e", max_steps=30)
    assert (result.status, result.steps) == ("stuck", 17)


async def test_acting_on_a_page_that_changes_is_no_repetition(browser: Browser, tmp_path: Path) -> None:
    """The page counts its clicks, so that ten equal clicks see ten different screens."""

    async def counting() -> QuestionTask:
        computer = await browser.new_computer(160, 160)
        script = "() => addEventListener('mouseup', () => document.body.append(' one more'))"
        await computer.evaluate(script)
        return QuestionTask(computer)

    source = TaskSource(counting)
    policy = Scripted(CORNER)
    result = await run_episode(source, "q", policy, CONTRACT, 0, Limits(max_steps=10), TrajectoryWriter(tmp_path / "e"))
    await source.discard()
    assert result.status == "step_limit" and policy.observations == [""] * 10
    assert len({step.sha256 for step in read_episode(tmp_path / "e").steps}) == 10


async def test_step_limit(browser: Browser, tmp_path: Path) -> None:
    policy = Scripted(CORNER)
    result = await play(browser, policy, tmp_path / "e", max_steps=4)
    assert (result.status, result.success, result.steps) == ("step_limit", False, 4)
    assert policy.answer_now == [False] * 4
    assert "4" in policy.messages[0][0]["content"]  # the budget that the prompt names is the real one


async def test_time_limit(browser: Browser, tmp_path: Path) -> None:
    wait = Step(thought="I wait.", tool_call=Wait(seconds=0.25))
    result = await play(browser, Scripted(wait), tmp_path / "e", max_steps=50, max_seconds=0.6)
    assert result.status == "time_limit" and 1 <= result.steps <= 3


async def ask(browser: Browser, policy: Policy, folder: Path, **limits: Any) -> EpisodeResult:
    async def question() -> QuestionTask:
        return QuestionTask(await browser.new_computer(160, 160))

    source = TaskSource(question)
    try:
        return await run_episode(
            source, "question", policy, CONTRACT, 5, Limits(answer_at_limit=True, **limits),
            TrajectoryWriter(folder),
        )  # fmt: skip
    finally:
        await source.discard()


async def test_an_answer_is_forced_at_the_step_limit(browser: Browser, tmp_path: Path) -> None:
    policy = Scripted(CORNER, CORNER, ANSWER)
    result = await ask(browser, policy, tmp_path / "e", max_steps=3)
    assert policy.answer_now == [False, False, True]
    assert (result.status, result.success, result.answer, result.steps) == ("done", None, "42", 3)
    assert result.goal == "What is on page 5?"


async def test_an_answer_is_forced_when_time_is_up(browser: Browser, tmp_path: Path) -> None:
    wait = Step(thought="I wait.", tool_call=Wait(seconds=0.3))
    result = await ask(browser, policy := Scripted(wait, ANSWER), tmp_path / "e", max_steps=9, max_seconds=0.2)
    assert policy.answer_now == [False, True] and result.answer == "42"


async def test_who_does_not_answer_when_it_must_has_met_the_limit(browser: Browser, tmp_path: Path) -> None:
    result = await ask(browser, Scripted(CORNER), tmp_path / "e", max_steps=2)
    assert (result.status, result.success, result.answer) == ("step_limit", False, None)
    last = read_episode(tmp_path / "e").steps[-1]
    assert last.error and last.step is None and "only answer is allowed" in last.outcome


async def test_an_episode_that_answers_early_is_done(browser: Browser, tmp_path: Path) -> None:
    result = await ask(browser, Scripted(ANSWER), tmp_path / "e", max_steps=5)
    assert (result.status, result.steps) == ("done", 1)


async def test_unusable_output_in_a_row_is_the_models_failure(browser: Browser, tmp_path: Path) -> None:
    policy = Scripted(BAD)
    result = await play(browser, policy, tmp_path / "e")
    assert (result.status, result.success, result.steps) == ("contract_error", False, 3)
    assert (result.infra_failures, result.contract_failures, result.output_tokens) == (0, 3, 21)
    steps = read_episode(tmp_path / "e").steps
    assert all(step.step is None and step.error and step.raw_text == '{"x": 1200}' for step in steps)
    assert steps[0].attempts == 3 and "1200 is outside" in steps[0].outcome


async def test_unusable_output_once_is_reported_and_forgotten(browser: Browser, tmp_path: Path) -> None:
    policy = Scripted(BAD, BAD, CORNER, BAD, BAD, CORNER)
    result = await play(browser, policy, tmp_path / "e", max_steps=6)
    assert result.status == "step_limit" and result.contract_failures == 4
    assert [bool(text) for text in policy.observations] == [False, True, True, False, True, True]
    assert "1200 is outside 0..1000" in policy.observations[1]
    # What the model said wrongly is in no later message; what was carried out is.
    roles = [message["role"] for message in policy.messages[-1]]
    assert roles.count("assistant") == 1 and '{"x": 1200}' not in str(policy.messages[-1])


async def test_half_a_surrogate_pair_is_the_models_failure(browser: Browser, tmp_path: Path) -> None:
    odd = Step(thought="\ud800", tool_call=CORNER.tool_call)
    result = await play(browser, lambda task: Constant(odd), tmp_path / "e")
    assert result.status == "contract_error" and "surrogate" in read_episode(tmp_path / "e").steps[0].outcome


class Constant:
    name = "constant"

    def __init__(self, step: Step) -> None:
        self.step = step

    async def decide(self, conversation: Conversation) -> Decision:
        return Decision(self.step)

    async def close(self) -> None:
        return


async def test_an_endpoint_that_is_down_is_infrastructure(browser: Browser, tmp_path: Path) -> None:
    result = await play(browser, Scripted(CORNER, PolicyError("nobody listens at URL")), tmp_path / "e",
                        infra_retries=1)  # fmt: skip
    assert (result.status, result.success, result.infra_failures) == ("infra_error", None, 2)
    assert result.error == "nobody listens at URL"
    first = read_episode(tmp_path / "e.partial-1")
    assert len(first.steps) == 1 and not first.finished  # the step taken before the failure is kept


class Hanging(Constant):
    """Hangs in its first decision only."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.asked = 0

    async def decide(self, conversation: Conversation) -> Decision:
        self.asked += 1
        if self.asked == 1:
            await asyncio.sleep(60)
        return Decision(self.step)


async def test_a_decision_that_hangs_is_tried_again(browser: Browser, tmp_path: Path) -> None:
    result = await play(browser, Hanging(CORNER), tmp_path / "e", decide_seconds=0.3, max_steps=2)
    assert (result.status, result.infra_failures, result.steps) == ("step_limit", 1, 2)
    reason = (tmp_path / "e.partial-1" / "partial.json").read_text()
    assert "policy constant gave no result within 0.3 s" in reason


async def test_an_action_that_hangs_is_infrastructure(browser: Browser, tmp_path: Path) -> None:
    wait = Step(thought="I wait.", tool_call=Wait(seconds=8))
    result = await play(browser, Scripted(wait), tmp_path / "e", act_seconds=4, infra_retries=0)
    assert result.status == "infra_error" and "wait in task click-test-2 gave no result" in str(result.error)


async def test_a_browser_killed_in_mid_episode_is_started_again(tmp_path: Path) -> None:
    async with await Browser.launch() as browser:
        victim = await browser_pid(browser)
        killed: list[int] = []

        class Killer(SlowOracle):
            async def decide(self, conversation: Conversation) -> Decision:
                if len(conversation.turns) == 3 and not killed:
                    killed.append(victim)
                    os.kill(victim, signal.SIGKILL)
                return await super().decide(conversation)

        result = await play(browser, Killer, tmp_path / "e", "enter-password")
        assert killed and await browser_pid(browser) != victim
    assert (result.status, result.infra_failures, result.steps) == ("success", 1, 5)
    lost = read_episode(tmp_path / "e.partial-1")
    assert len(lost.steps) == 2 and not lost.finished
    assert (lost.folder / "step-002.png").exists()  # what was seen when it died


async def test_an_endpoint_is_sent_the_very_bytes_that_are_on_disk(browser: Browser, tmp_path: Path) -> None:
    with serve(completion(CONTRACT.dump(CORNER))) as endpoint:
        policy = HttpPolicy(endpoint.url, "pilot", CONTRACT, pause=0.0)
        result = await play(browser, policy, tmp_path / "e", max_steps=5)
        await policy.close()
    assert (result.status, result.steps, result.prompt_tokens) == ("step_limit", 5, 5 * 321)
    for index, body in enumerate(endpoint.bodies):
        parts = [part for message in body["messages"] for part in message["content"] if isinstance(part, dict)]
        sent = [part["image_url"]["url"].partition("base64,")[2] for part in parts if "image_url" in part]
        stored = [tmp_path / "e" / f"step-{i:03d}.png" for i in range(max(0, index - 2), index + 1)]
        assert [b64decode(image) for image in sent] == [path.read_bytes() for path in stored]


async def test_an_endpoint_that_talks_nonsense_fails_the_model(browser: Browser, tmp_path: Path) -> None:
    with serve(completion("I would click the button.")) as endpoint:
        policy: Policy = HttpPolicy(endpoint.url, "pilot", CONTRACT, pause=0.0)
        result = await play(browser, policy, tmp_path / "e")
        await policy.close()
    assert (result.status, len(endpoint.raw)) == ("contract_error", 9)
    assert read_episode(tmp_path / "e").steps[0].raw_text == "I would click the button."


async def test_a_task_that_cannot_be_opened_is_infrastructure(tmp_path: Path) -> None:
    async def never() -> MiniWobTask:
        raise PolicyError("no browser here")

    result = await run_episode(
        TaskSource(never), "t", Scripted(CORNER), CONTRACT, 0, Limits(infra_retries=1),
        TrajectoryWriter(tmp_path / "e"),
    )  # fmt: skip
    assert (result.status, result.infra_failures, result.error) == ("infra_error", 2, "no browser here")
    assert read_episode(tmp_path / "e").result == result
