"""One episode, tried again where the trouble lies outside the model.

Two kinds of trouble never mix. What the model does wrong (unusable output, acting in circles, running out of
steps) ends the episode with a status that counts against it. What the browser or the endpoint does wrong
makes the episode start anew, and if that does not help it ends as `infra_error`, which is counted apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from holotron.agent.attempt import Attempt, OnStep
from holotron.agent.limits import HangError, Limits, bounded
from holotron.agent.records import INFRA, EpisodeResult
from holotron.agent.trajectory import TrajectoryWriter
from holotron.computer.computer import ComputerError
from holotron.contract.contract import Contract
from holotron.contract.conversation import Settings
from holotron.contract.policy import Policy, PolicyError
from holotron.tasks.task import Task

__all__ = ["INFRA_ERRORS", "Limits", "PolicyFor", "TaskSource", "run_episode", "shared"]

CLOSE_SECONDS = 10.0
INFRA_ERRORS = (ComputerError, PolicyError, HangError)
OnRetry = Callable[[int, str], None]
PolicyFor = Callable[[Any], Policy]


class TaskSource:
    """Holds a task open between episodes and makes it anew, computer and all, after a failure."""

    def __init__(self, make: Callable[[], Awaitable[Task]]) -> None:
        self._make = make
        self._task: Task | None = None

    async def get(self) -> Task:
        if self._task is None:
            self._task = await self._make()
        return self._task

    async def discard(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            # A browser that died cannot close in good order, and must not keep the next one waiting.
            with suppress(TimeoutError, *INFRA_ERRORS):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await task.close()


def shared(policy: Policy | PolicyFor) -> bool:
    """Whether this is one policy for all tasks, not a maker of policies (such as a class of them)."""
    return hasattr(policy, "decide") and not isinstance(policy, type)


def policy_of(policy: Policy | PolicyFor, task: Task) -> Policy:
    return cast(Policy, policy) if shared(policy) else cast(PolicyFor, policy)(task)


async def run_episode(
    source: TaskSource,
    task_name: str,
    policy: Policy | PolicyFor,
    contract: Contract,
    seed: int,
    limits: Limits,
    writer: TrajectoryWriter,
    settings: Settings | None = None,
    on_step: OnStep | None = None,
    on_retry: OnRetry | None = None,
) -> EpisodeResult:
    """Run one episode to its end and write its trajectory.

    `policy` decides for any task, or is called with the task to get the policy for it (scripted oracles).
    Infrastructure failures restart it up to `limits.infra_retries` times; each attempt lost is kept beside it
    as a partial one. Raises TrajectoryError if the disk fails.
    """
    settings = replace(settings or Settings(), max_steps=limits.max_steps, max_seconds=limits.max_seconds)
    for failures in range(limits.infra_retries + 1):
        attempt: Attempt | None = None
        await asyncio.to_thread(writer.begin)
        try:
            task = await bounded(source.get(), limits.act_seconds, f"opening task {task_name}")
            decider = policy_of(policy, task)
            attempt = Attempt(task_name, seed, decider, contract, limits, writer, settings, on_step)
            result = await attempt.run(task)
        except INFRA_ERRORS as error:
            await source.discard()
            problem = str(error)
            if failures < limits.infra_retries:
                await asyncio.to_thread(writer.set_aside, problem)
                if on_retry:
                    on_retry(failures + 1, problem)
                await asyncio.sleep(0.2 * 2**failures)
                continue
            if attempt is None:  # no task could be opened
                result = EpisodeResult(task=task_name, seed=seed, status=INFRA)
            else:
                result = attempt.result(INFRA)
            result = result.model_copy(update={"error": problem})
        result = result.model_copy(update={"infra_failures": failures + (result.status == INFRA)})
        await asyncio.to_thread(writer.finish, result)
        return result
    raise ValueError(f"infra_retries must not be negative, got {limits.infra_retries}")
