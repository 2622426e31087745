"""One attempt at an episode: look, decide, act, remember, until it ends or a limit is met."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from holotron.agent.limits import Limits, bounded
from holotron.agent.records import INFRA, EpisodeResult, Status, StepRecord
from holotron.agent.repetition import Repetition
from holotron.computer.computer import Point
from holotron.contract.contract import Contract
from holotron.contract.conversation import Conversation, Screenshot, Settings, Turn
from holotron.contract.policy import ContractError, Decision, Policy, Usage
from holotron.contract.step import Answer
from holotron.tasks.task import Task, Transition

OnStep = Callable[[StepRecord], None]
REFUSED = "Your last output could not be used and nothing was done. Keep to the format. Problem: {problem}"


class Writer(Protocol):
    """What the loop needs of a TrajectoryWriter."""

    def screenshot(self, index: int, shot: Screenshot) -> tuple[str, str]: ...

    def step(self, record: StepRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """A screenshot, where it was stored, and how long it took."""

    shot: Screenshot
    file: str
    sha256: str
    seconds: float


class Attempt:
    """One try at an episode: the conversation so far and the records of its steps."""

    def __init__(
        self,
        task_name: str,
        seed: int,
        policy: Policy,
        contract: Contract,
        limits: Limits,
        writer: Writer,
        settings: Settings,
        on_step: OnStep | None,
    ) -> None:
        self.task_name, self.seed = task_name, seed
        self.policy, self.contract, self.limits = policy, contract, limits
        self.writer, self.on_step = writer, on_step
        self.conversation = Conversation(goal="", settings=settings)
        self.records: list[StepRecord] = []
        self.repetition = Repetition()
        self.notice = ""  # what the next observation says beside the screenshot
        self.failures_in_a_row = 0
        self.started = time.monotonic()

    async def run(self, task: Task) -> EpisodeResult:
        reset = task.reset(self.seed)
        goal = await bounded(reset, self.limits.act_seconds, f"resetting task {self.task_name} to seed {self.seed}")
        self.conversation.goal = _sendable(goal)
        self.started = time.monotonic()
        for index in range(self.limits.max_steps):
            limit = self._limit_before(index)
            if limit and not self.limits.answer_at_limit:
                return self.result(limit)
            self.conversation.answer_now = limit is not None
            record = await self._step(index, task)
            status = self._ended(record) or limit
            if status:
                return self.result(status)
        return self.result("step_limit")

    def _limit_before(self, index: int) -> Status | None:
        """The limit that makes the coming decision one too many, or the last where an answer is owed."""
        if time.monotonic() - self.started >= self.limits.max_seconds:
            return "time_limit"
        if self.limits.answer_at_limit and index == self.limits.max_steps - 1:
            return "step_limit"
        return None

    def _ended(self, record: StepRecord) -> Status | None:
        if record.terminated:
            return {True: "success", False: "failure", None: "done"}[record.success]  # type: ignore[return-value]
        if self.failures_in_a_row >= self.limits.contract_failures:
            return "contract_error"
        if record.step is not None and self.repetition.stuck:
            return "stuck"
        return None

    async def _step(self, index: int, task: Task) -> StepRecord:
        seen = await self._look(index, task)
        turn = Turn(seen.shot, observation=self.notice)
        self.conversation.turns.append(turn)
        started = time.monotonic()
        try:
            decision, point = await self._decide(seen.shot)
        except ContractError as error:
            record = self._refused(index, seen, turn, error, time.monotonic() - started)
        else:
            decided = time.monotonic()
            what = f"{decision.step.tool_call.tool_name} in task {self.task_name}"
            act = task.step(decision.step.tool_call, point)
            transition = await bounded(act, self.limits.act_seconds, what)
            now = time.monotonic()
            record = self._acted(index, seen, turn, decision, point, transition, decided - started, now - decided)
        await asyncio.to_thread(self.writer.step, record)
        self.records.append(record)
        if self.on_step:
            self.on_step(record)
        return record

    async def _look(self, index: int, task: Task) -> Seen:
        started = time.monotonic()
        shot = await bounded(task.screenshot(), self.limits.act_seconds, "taking a screenshot")
        seconds = time.monotonic() - started
        file, sha256 = await asyncio.to_thread(self.writer.screenshot, index, shot)
        return Seen(shot, file, sha256, seconds)

    async def _decide(self, shot: Screenshot) -> tuple[Decision, Point | None]:
        what = f"policy {self.policy.name}"
        decision = await bounded(self.policy.decide(self.conversation), self.limits.decide_seconds, what)
        call = decision.step.tool_call
        if self.conversation.answer_now and not isinstance(call, Answer):
            raise ContractError(
                f"the limit is reached and only answer is allowed, not {call.tool_name}.",
                raw_text=decision.raw_text, attempts=decision.attempts, usage=decision.usage,
            )  # fmt: skip
        written = self.contract.dump(decision.step)
        if _sendable(written) != written:
            raise ContractError(
                "the output holds half a surrogate pair (\\ud800 to \\udfff); write whole characters.",
                raw_text=_sendable(decision.raw_text), attempts=decision.attempts, usage=decision.usage,
            )  # fmt: skip
        return decision, self.contract.point(call, shot)

    def _acted(
        self,
        index: int,
        seen: Seen,
        turn: Turn,
        decision: Decision,
        point: Point | None,
        transition: Transition,
        decide_s: float,
        act_s: float,
    ) -> StepRecord:
        self.failures_in_a_row = 0
        self.repetition.note(decision.step.tool_call, seen.sha256)
        self.notice = self.repetition.nudge
        turn.step = decision.step
        turn.result, turn.is_error = _sendable(transition.outcome.text), not transition.outcome.ok
        return self._record(
            index, seen, turn, decision.usage,
            step=decision.step, point=point, reward=transition.reward, terminated=transition.terminated,
            success=transition.success, attempts=decision.attempts, decide_s=decide_s, act_s=act_s,
            extra=decision.extra,
        )  # fmt: skip

    def _refused(self, index: int, seen: Seen, turn: Turn, error: ContractError, decide_s: float) -> StepRecord:
        self.failures_in_a_row += 1
        turn.result, turn.is_error = REFUSED.format(problem=error), True
        # History holds no failed output; what was wrong with it stands beside the next screenshot.
        self.conversation.turns.pop()
        self.notice = turn.result
        last = self.records[-1] if self.records else None
        return self._record(
            index, seen, turn, error.usage or Usage(),
            reward=last.reward if last else 0.0, success=last.success if last else None,
            attempts=error.attempts, raw_text=error.raw_text, decide_s=decide_s,
        )  # fmt: skip

    def _record(self, index: int, seen: Seen, turn: Turn, usage: Usage, **fields: Any) -> StepRecord:
        return StepRecord(
            index=index, goal=self.conversation.goal, observation=turn.observation,
            screenshot=seen.file, width=seen.shot.width, height=seen.shot.height,
            css_width=seen.shot.css_width, css_height=seen.shot.css_height, sha256=seen.sha256,
            screenshot_s=seen.seconds, contract=self.contract.name, outcome=turn.result or "",
            error=turn.is_error, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens, image_tokens=usage.image_tokens, state_bytes=usage.state_bytes,
            kv_bytes=usage.kv_bytes, prefill_s=usage.prefill_s, decode_s=usage.decode_s, at=time.time(),
            **fields,
        )  # fmt: skip

    def result(self, status: Status) -> EpisodeResult:
        """Sum up. A limit met while the check already says success is a success: the state is what counts."""
        last = self.records[-1] if self.records else None
        if last and last.success and status != INFRA:
            status = "success"
        success = {"success": True, "done": None, INFRA: None}.get(status, False)
        calls = [record.step.tool_call for record in self.records if record.step]
        answers = [call.content for call in calls if isinstance(call, Answer)]
        names = ("prompt_tokens", "cached_tokens", "output_tokens", "image_tokens",
                 "screenshot_s", "decide_s", "act_s")  # fmt: skip
        sums = {name: sum(getattr(record, name) for record in self.records) for name in names}
        return EpisodeResult(
            task=self.task_name, seed=self.seed, goal=self.conversation.goal, status=status, success=success,
            reward=last.reward if last else 0.0, steps=len(self.records),
            seconds=time.monotonic() - self.started, answer=answers[-1] if answers else None,
            contract_failures=sum(record.step is None for record in self.records), ended_at=time.time(),
            **sums,
        )  # fmt: skip


def _sendable(text: str) -> str:
    """Without what UTF-8 cannot carry; pages and models can make up half a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")
