"""Fleets: side by side, resumed after kill and Ctrl-C, stopped when nothing works, summed up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holotron.agent.fleet import Event, FleetError, Job, JobQueue, resume_hint, run_fleet
from holotron.agent.limits import Limits
from holotron.agent.records import EpisodeResult
from holotron.agent.summary import RunSummary, read_summary, score, wilson
from holotron.agent.trajectory import TrajectoryError, episode_folder, episode_folders, read_episode, read_run
from holotron.computer.browser import Browser
from holotron.contract.conversation import Conversation, Settings
from holotron.contract.policy import Decision, PolicyError
from tests.agent.rig import CONTRACT, CORNER, ROOT, Scripted, SlowOracle, lines_of, open_in
from tests.agent.session import JOBS

pytestmark = pytest.mark.browser
PATIENCE = 60.0  # seconds; a process under test that takes longer is broken


def test_workers_spread_over_tasks_and_keep_theirs() -> None:
    queue = JobQueue([Job(task, seed) for task in "ab" for seed in range(3)])
    first, second = queue.take(None), queue.take(None)
    assert first and second and {first.task, second.task} == {"a", "b"}
    mine = [first]
    while (job := queue.take(first.task)) is not None and job.task == first.task:
        mine.append(job)
    assert [job.seed for job in mine] == [0, 1, 2]
    assert job is not None and job.task == second.task  # its own are done, so it helps the other
    assert queue.take(job.task) == Job(second.task, 2) and queue.take(second.task) is None


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 3), (1, 3), (57, 100)])
def test_wilson_bounds_solve_their_equation(k: int, n: int) -> None:
    low, high = wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1
    for bound in (low, high):  # |k/n - p| = z sqrt(p (1 - p) / n), the definition of the interval
        assert abs(k / n - bound) == pytest.approx(1.959964 * (bound * (1 - bound) / n) ** 0.5, abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)


async def run(chromium: Browser, run_dir: Path, policy: Any, jobs: list[Job], **options: Any) -> RunSummary:
    return await run_fleet(jobs, open_in(chromium), policy, CONTRACT, options.pop("workers", 2), run_dir, **options)


async def test_two_workers_in_one_browser(tmp_path: Path) -> None:
    jobs = [Job(task, seed) for task in ("click-test", "enter-text", "click-dialog-2") for seed in range(2)]
    events: list[Event] = []
    async with await Browser.launch() as browser:
        summary = await run(browser, tmp_path, SlowOracle, jobs, on_event=events.append, browser=browser.version)
        again = await run(browser, tmp_path, SlowOracle, jobs, resume=True)
    assert again == summary == read_summary(tmp_path)
    assert (summary.total.n, summary.total.successes, summary.mean_rate) == (6, 6, 1.0)
    assert list(summary.tasks) == ["click-test", "enter-text", "click-dialog-2"]
    for s in summary.tasks.values():
        assert (s.n, s.successes, s.raw_positive, s.infra_errors) == (2, 2, 2, 0)
    stored = read_run(tmp_path)
    steps = [step for episode in stored.episodes for step in episode.steps]
    assert summary.speed.actions == len(steps) == sum(event.kind == "step" for event in events)
    assert summary.speed.tokens_per_s == pytest.approx(110 * len(steps) / summary.speed.seconds)
    assert 0 < (summary.speed.first_action_s or 0) < summary.speed.seconds
    assert summary.state_bytes_step_1 == summary.state_bytes_max_step == 4096
    assert summary.max_step == max(step.index for step in steps) + 1 and summary.unfinished == 0
    assert {event.worker for event in events if event.kind == "step"} == {0, 1}
    info = stored.info
    assert (info.contract, info.policy) == ("holotron3", "SlowOracle")
    assert info.prompt_hash == CONTRACT.prompt_hash and info.browser and info.jobs[0] == ("click-test", 0)


async def test_decisions_are_asked_for_together(tmp_path: Path) -> None:
    """A policy that answers only once all three workers have asked, as an engine filling a batch would."""

    class Meeting(Scripted):
        meeting = asyncio.Barrier(3)

        async def decide(self, conversation: Conversation) -> Decision:
            await asyncio.wait_for(self.meeting.wait(), 20)
            return await super().decide(conversation)

    jobs = [Job(task, 0) for task in ("click-test-2", "click-dialog-2", "click-option")]
    async with await Browser.launch() as browser:
        summary = await run(browser, tmp_path, Meeting(CORNER), jobs, workers=3, limits=Limits(max_steps=3))
    assert summary.total.statuses == {"step_limit": 3}


async def test_a_run_that_cannot_work_is_stopped_and_resumes(tmp_path: Path) -> None:
    jobs = [Job("click-test-2", seed) for seed in range(8)]
    limits, down = Limits(max_steps=2, infra_retries=0), Scripted(PolicyError("nobody listens at http://x"))
    events: list[Event] = []
    async with await Browser.launch() as browser:
        with pytest.raises(FleetError, match="3 episodes in a row .* nobody listens at http://x"):
            await run(browser, tmp_path, down, jobs, limits=limits, model="m", workers=1, on_event=events.append)
        stopped = read_summary(tmp_path)
        assert stopped and stopped.interrupted and stopped.total.infra_errors == 3 and stopped.total.n == 0
        assert resume_hint(tmp_path) in events[-1].text and events[-1].kind == "stopped"
        with pytest.raises(TrajectoryError, match="already holds a run: resume it"):
            await run(browser, tmp_path, down, jobs, limits=limits, model="m")
        with pytest.raises(TrajectoryError, match="model was 'm', now 'n'; .*max_steps was 2, now 5"):
            await run(browser, tmp_path, down, jobs, limits=Limits(max_steps=5), model="n", resume=True)
        up = Scripted(CORNER)
        up.name = down.name
        later = {"limits": Limits(max_steps=2), "model": "m", "settings": Settings(date="2031-05-05")}
        summary = await run(browser, tmp_path, up, jobs[:4], resume=True, **later)
    # Those that failed outside the model were done again; their failed attempts stay beside them.
    assert (summary.total.n, summary.total.infra_errors, summary.unfinished) == (4, 0, 0)
    partial = [folder.name for folder in episode_folders(tmp_path, partial=True) if "partial" in folder.name]
    assert partial == [f"click-test-2-{seed}.partial-1" for seed in range(3)]
    assert "2026-01-01" in up.messages[0][0]["content"]  # the date the run was started with, not today's


def test_infrastructure_never_counts_against_the_model() -> None:
    def ended(status: Any, **fields: Any) -> EpisodeResult:
        return EpisodeResult(task="t", seed=0, status=status, **fields)

    results = [
        ended("success", success=True, reward=1.0, steps=4),
        ended("failure", success=False, reward=0.5, steps=2),
        ended("infra_error", steps=9),
        ended("contract_error", success=False),
    ]
    summed = score(results)
    assert (summed.n, summed.successes, summed.infra_errors, summed.raw_positive) == (3, 1, 1, 2)
    assert summed.rate == pytest.approx(1 / 3) and summed.mean_steps == 2.0
    assert (summed.low, summed.high) == wilson(1, 3)


@contextmanager
def session(run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.agent.session", str(run_dir), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_steps(run_dir: Path, count: int) -> None:
    """Until so many steps lie on disk in unfinished episodes."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if sum(lines_of(folder) for folder in episode_folders(run_dir)) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{count} steps were not written in {PATIENCE} s")


def finish(run_dir: Path) -> str:
    with session(run_dir, "resume", "0") as process:
        said, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, complaints
    assert f"summary {len(JOBS)} {len(JOBS)}" in said
    run = read_run(run_dir)
    assert [episode.finished for episode in run.episodes] == [True] * len(JOBS)
    assert all(episode.result and episode.result.success for episode in run.episodes)
    return said


def test_killed_at_any_moment_and_resumed(tmp_path: Path) -> None:
    with session(tmp_path, "0.15") as process:
        wait_for_steps(tmp_path, 4)  # of which the first is an episode of its own
        process.send_signal(signal.SIGKILL)
        said = process.communicate(timeout=PATIENCE)[0]
    shown = [line for line in said.splitlines() if line.startswith("step")]
    before = {folder.name: read_episode(folder) for folder in episode_folders(tmp_path)}
    # Whatever had been reported when it died is on disk; each worker may have written one step more.
    assert len(shown) >= 2 and sum(len(episode.steps) for episode in before.values()) >= len(shown)
    torn = next(folder for folder in episode_folders(tmp_path) if not (folder / "episode.json").exists())
    with (torn / "steps.jsonl").open("ab") as file:
        file.write(b'{"index":99,"goal":"cut o')
    assert read_episode(torn).torn and read_episode(torn).steps == before[torn.name].steps
    said = finish(tmp_path)
    finished = [name for name, episode in before.items() if episode.finished]
    assert finished and said.count("skip") == len(finished)
    for name, episode in before.items():
        if not episode.steps:
            continue  # it was killed before it took one
        kept = tmp_path / "episodes" / (name if episode.finished else f"{name}.partial-1")
        assert read_episode(kept).steps == episode.steps


def test_ctrl_c_keeps_everything_says_how_to_go_on_and_exits_130(tmp_path: Path) -> None:
    with session(tmp_path, "0.2") as process:
        wait_for_steps(tmp_path, 3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the browser's driver gets it as well
        said, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, complaints
    assert f"--resume {tmp_path}" in said and "interrupted" in said
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["interrupted"] and summary["unfinished"] >= 1
    shown = said.count("\nstep") + said.startswith("step")
    steps = sum(len(read_episode(folder).steps) for folder in episode_folders(tmp_path))
    assert steps >= shown >= 1
    finish(tmp_path)


@pytest.fixture
def little_room(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "little"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a small file system here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


async def test_a_disk_that_fills_up_stops_the_run_with_what_it_has(little_room: Path) -> None:
    jobs = [Job("enter-password", seed) for seed in range(20)]
    async with await Browser.launch() as browser:
        with pytest.raises(TrajectoryError, match="No space left on device.*Make room") as caught:
            await run(browser, little_room, partial(SlowOracle, seconds=0.0), jobs)
    assert str(little_room) in str(caught.value)
    episodes = [read_episode(folder) for folder in episode_folders(little_room)]
    assert episodes and sum(len(episode.steps) for episode in episodes) >= 3
    for episode in episodes:
        for step in episode.steps:
            assert (episode.folder / step.screenshot).read_bytes().endswith(b"IEND\xaeB`\x82")


async def test_another_run_of_the_same_jobs_starts_in_its_own_folder(tmp_path: Path) -> None:
    jobs = [Job("click-test", 1), Job("click-test", 1)]
    async with await Browser.launch() as browser:
        one = await run(browser, tmp_path / "1", SlowOracle, jobs)
        await run(browser, tmp_path / "2", SlowOracle, jobs)
    assert one.total.n == 1  # the same episode twice is one
    first, second = (read_episode(episode_folder(tmp_path / n, "click-test", 1)) for n in "12")
    assert first.steps[0].sha256 == second.steps[0].sha256
