"""Many episodes side by side: workers share one policy and one run folder, and a stopped run can go on.

Every worker holds one task (hence one computer) and keeps it while there are seeds of that task left.
Decisions are asked for concurrently, so a policy that batches gets its batch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from holotron.agent.loop import Limits, PolicyFor, TaskSource, run_episode, shared
from holotron.agent.records import INFRA, EpisodeResult, RunInfo, StepRecord, machine_name, package_versions
from holotron.agent.summary import RunSummary, Session, read_summary, session, summarize, write_summary
from holotron.agent.trajectory import (
    TrajectoryError,
    TrajectoryWriter,
    episode_folder,
    read_episode,
    read_info,
    read_result,
    write_run,
)
from holotron.contract.contract import Contract
from holotron.contract.conversation import Settings
from holotron.contract.policy import Policy
from holotron.tasks.task import Task

MakeTask = Callable[[str], Awaitable[Task]]
INFRA_STREAK = 3


class FleetError(RuntimeError):
    """The run was stopped because nothing works outside the model; what was done is on disk."""


@dataclass(frozen=True, slots=True)
class Job:
    task: str
    seed: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something to show. `text` is for people; `record` comes with a step, `result` with an episode's end."""

    kind: Literal["start", "skip", "episode_start", "step", "retry", "episode_end", "stopped", "end"]
    worker: int = 0
    job: Job | None = None
    record: StepRecord | None = None
    result: EpisodeResult | None = None
    text: str = ""


OnEvent = Callable[[Event], None]


class JobQueue:
    """Jobs by task. Who asks gets another seed of the task it holds, else of the one with most seeds left."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._by_task: dict[str, deque[Job]] = {}
        for job in jobs:
            self._by_task.setdefault(job.task, deque()).append(job)
        self._held: dict[str, int] = {}

    def take(self, held: str | None) -> Job | None:
        if held is not None:
            self._held[held] -= 1
        waiting = {task: jobs for task, jobs in self._by_task.items() if jobs}
        if not waiting:
            return None
        task = held if held in waiting else self._longest(waiting)
        self._held[task] = self._held.get(task, 0) + 1
        return waiting[task].popleft()

    def _longest(self, waiting: dict[str, deque[Job]]) -> str:
        # A task that another worker is busy with counts for less, so that workers spread over tasks first.
        return max(waiting, key=lambda task: len(waiting[task]) / (1 + self._held.get(task, 0)))


async def run_fleet(
    jobs: Sequence[Job],
    make_task: MakeTask,
    policy: Policy | PolicyFor,
    contract: Contract,
    workers: int,
    run_dir: Path,
    *,
    resume: bool = False,
    on_event: OnEvent | None = None,
    limits: Limits | None = None,
    settings: Settings | None = None,
    model: str = "",
    browser: str = "",
    started: float | None = None,
) -> RunSummary:
    """Run all `jobs` and return, and write to `run_dir`, what they come to.

    `policy` is shared by all workers, or called with a worker's task to get the policy for it.
    `started` (time.monotonic) is when the clock for the first action began; now, if None. With `resume`
    finished episodes are kept, unfinished and `infra_error` ones are done again (their steps stay beside
    them), and the prompt settings are those the run was started with. `model` names the weights or endpoint,
    `browser` its version. Raises TrajectoryError if the folder cannot be used, FleetError after several
    infrastructure failures in a row. Whatever ends it, steps and summary are on disk.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    fleet = Fleet(make_task, policy, contract, run_dir, limits or Limits(), on_event, started)
    todo = fleet.open(list(dict.fromkeys(jobs)), settings or Settings(), workers, model, browser, resume)
    return await fleet.run(todo, workers)


class Fleet:
    """The state that the workers of one session share."""

    def __init__(
        self,
        make_task: MakeTask,
        policy: Policy | PolicyFor,
        contract: Contract,
        run_dir: Path,
        limits: Limits,
        on_event: OnEvent | None,
        started: float | None,
    ) -> None:
        self.make_task, self.policy, self.contract = make_task, policy, contract
        self.run_dir, self.limits, self.settings = run_dir, limits, Settings()
        self.on_event = on_event or (lambda event: None)
        self.started = time.monotonic() if started is None else started
        # A maker of policies has no name of its own unless it is a class or a function.
        self.policy_name = str(getattr(policy, "name" if shared(policy) else "__name__", "made for each task"))
        self.folders: list[Path] = []
        self.records: list[StepRecord] = []
        self.first_action_s: float | None = None
        self.infra_streak = 0

    def open(
        self, jobs: list[Job], settings: Settings, workers: int, model: str, browser: str, resume: bool
    ) -> list[Job]:
        """Create the run folder, or check the one to resume; returns the jobs still to be done."""
        self.folders = [episode_folder(self.run_dir, job.task, job.seed) for job in jobs]
        old = read_info(self.run_dir) if (self.run_dir / "run.json").exists() else None
        if old is not None and not resume:
            raise TrajectoryError(f"{self.run_dir} already holds a run: resume it, or choose another folder.")
        limits = self.limits
        self.settings = replace(
            Settings(**old.settings) if old else settings,
            max_steps=limits.max_steps,
            max_seconds=limits.max_seconds,
        )
        info = RunInfo(
            model=model or self.policy_name,
            policy=self.policy_name,
            contract=self.contract.name,
            prompt_hash=self.contract.prompt_hash,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            browser=browser,
            machine=machine_name(),
            workers=workers,
            settings=asdict(self.settings),
            limits=asdict(self.limits),
            jobs=[(job.task, job.seed) for job in jobs],
            versions=package_versions(),
        )
        if old is None:
            write_run(self.run_dir, info)
            return jobs
        _refuse_changes(self.run_dir, old.identity(), info.identity())
        together = list(dict.fromkeys(old.jobs + info.jobs))
        if together != old.jobs:
            write_run(self.run_dir, old.model_copy(update={"jobs": together}))
        self.folders = [episode_folder(self.run_dir, task, seed) for task, seed in together]
        return [job for job in jobs if not self._finished(job)]

    def _finished(self, job: Job) -> bool:
        result = read_result(episode_folder(self.run_dir, job.task, job.seed))
        if result is None or result.status == INFRA:
            return False
        self.on_event(Event("skip", job=job, result=result, text="finished in an earlier session"))
        return True

    async def run(self, todo: list[Job], workers: int) -> RunSummary:
        if not todo and (summary := read_summary(self.run_dir)) and not summary.interrupted:
            return summary
        self.on_event(Event("start", text=f"{len(todo)} episodes to run, {workers} workers"))
        queue = JobQueue(todo)
        working = [asyncio.create_task(self._work(number, queue)) for number in range(min(workers, len(todo)))]
        try:
            await asyncio.gather(*working)
        except BaseException as error:
            await self._stop(working, error, workers)
            raise
        summary = summarize(map(read_episode, self._existing()), self._speed(workers))
        write_summary(self.run_dir, summary)
        self.on_event(Event("end", text=str(self.run_dir)))
        return summary

    async def _stop(self, working: list[asyncio.Task[None]], error: BaseException, workers: int) -> None:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        with suppress(TrajectoryError):  # `error` is what the caller has to hear of
            episodes = map(read_episode, self._existing())
            write_summary(self.run_dir, summarize(episodes, self._speed(workers), interrupted=True))
        why = "interrupted" if isinstance(error, asyncio.CancelledError) else f"stopped: {error}"
        self.on_event(Event("stopped", text=f"{why}\n{resume_hint(self.run_dir)}"))

    async def _work(self, number: int, queue: JobQueue) -> None:
        source: TaskSource | None = None
        held: str | None = None
        try:
            while (job := queue.take(held)) is not None:
                if source is None or job.task != held:
                    if source is not None:
                        await source.discard()
                    source = TaskSource(partial(self.make_task, job.task))
                held = job.task
                await self._episode(number, job, source)
        finally:
            if source is not None:
                await source.discard()

    async def _episode(self, number: int, job: Job, source: TaskSource) -> None:
        def tell(kind: Any, **fields: Any) -> None:
            self.on_event(Event(kind, number, job, **fields))

        def on_step(record: StepRecord) -> None:
            self.records.append(record)
            if self.first_action_s is None and record.step is not None:
                self.first_action_s = time.monotonic() - self.started
            tell("step", record=record)

        tell("episode_start")
        result = await run_episode(
            source, job.task, self.policy, self.contract, job.seed, self.limits,
            TrajectoryWriter(episode_folder(self.run_dir, job.task, job.seed)), self.settings, on_step,
            lambda attempt, problem: tell("retry", text=f"attempt {attempt} lost: {problem}"),
        )  # fmt: skip
        tell("episode_end", result=result, text=result.error or "")
        self.infra_streak = self.infra_streak + 1 if result.status == INFRA else 0
        if self.infra_streak >= INFRA_STREAK:
            raise FleetError(
                f"{INFRA_STREAK} episodes in a row failed outside the model, the last with: {result.error}"
            )

    def _speed(self, workers: int) -> Session:
        return session(self.records, time.monotonic() - self.started, self.first_action_s, workers)

    def _existing(self) -> list[Path]:
        return [folder for folder in self.folders if folder.is_dir()]


def resume_hint(run_dir: Path) -> str:
    """What to tell a person whose run stopped before its end."""
    return f"Every step taken is in {run_dir}. To go on: the same command with --resume {run_dir}"


def _refuse_changes(run_dir: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = [f"{name} was {old[name]!r}, now {new[name]!r}" for name in old if old[name] != new[name]]
    if changed:
        raise TrajectoryError(
            f"{run_dir} was started with other settings: {'; '.join(changed)}. Resume it with those, or "
            "start a new run in another folder."
        )
