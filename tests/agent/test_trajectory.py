"""What is on disk after crashes, torn lines and full disks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holotron.agent.records import EpisodeResult, RunInfo, StepRecord, package_versions, without_credentials
from holotron.agent.trajectory import (
    TrajectoryError,
    TrajectoryWriter,
    append_line,
    episode_folder,
    episode_folders,
    read_episode,
    read_info,
    read_run,
    read_steps,
    write_run,
)
from tests.agent.rig import ROOT, picture, record

RESULT = EpisodeResult(task="t", seed=0, status="success", success=True, reward=1.0, steps=3)
INFO = RunInfo(
    model="pilot", policy="pilot", contract="holotron3", prompt_hash="ab",
    started_at="2026-01-01T00:00:00+00:00", jobs=[("t", 0)], limits={"max_steps": 10},
)  # fmt: skip


def written(folder: Path, steps: int = 3) -> list[StepRecord]:
    writer = TrajectoryWriter(folder)
    writer.begin()
    records = []
    for index in range(steps):
        file, digest = writer.screenshot(index, picture(index))
        records.append(record(index, file, sha256=digest))
        writer.step(records[-1])
    return records


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_run(tmp_path, INFO)
    folder = episode_folder(tmp_path, "t", 0)
    records = written(folder)
    assert not read_episode(folder).finished
    TrajectoryWriter(folder).finish(RESULT)
    run = read_run(tmp_path)
    assert run.info == INFO and len(run.episodes) == 1
    episode = run.episodes[0]
    assert list(episode.steps) == records and episode.result == RESULT and not episode.torn
    for step in episode.steps:
        assert hashlib.sha256((folder / step.screenshot).read_bytes()).hexdigest() == step.sha256
    assert sorted(path.name for path in folder.iterdir()) == [
        "episode.json", "step-000.png", "step-001.png", "step-002.png", "steps.jsonl"]  # fmt: skip


def test_every_cut_of_the_file_leaves_the_steps_before_it(tmp_path: Path) -> None:
    records = written(tmp_path / "e")
    path = tmp_path / "e" / "steps.jsonl"
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    cuts = {*range(0, len(content), 97), *ends, *(end - 1 for end in ends)}
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        steps, torn = read_steps(path)
        complete = sum(end <= cut for end in ends)
        assert list(steps) == records[:complete] and torn == (cut not in (0, *ends))


def test_a_last_line_of_zeros_is_torn_but_damage_inside_is_named(tmp_path: Path) -> None:
    records = written(tmp_path / "e")
    path = tmp_path / "e" / "steps.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 40 + b"\n")  # what some file systems leave after a power cut
    assert read_steps(path) == (tuple(records), True)
    path.write_bytes(content.replace(b'"index":1', b'"index":x'))
    with pytest.raises(TrajectoryError, match=r"steps\.jsonl line 2 is damaged"):
        read_steps(path)


text = st.text(st.characters(codec=None), max_size=30)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    goal=text,
    outcome=text,
    raw=st.none() | text,
    extra=st.dictionaries(st.text(max_size=5), text, max_size=3),
)
def test_no_text_breaks_a_line(tmp_path: Path, goal: str, outcome: str, raw: str | None, extra: dict[str, str]) -> None:
    folder = tmp_path / "any"
    writer = TrajectoryWriter(folder)
    writer.begin()
    sent = record(0, goal=goal, outcome=outcome, raw_text=raw, extra=extra)
    writer.step(sent)
    writer.step(record(1))
    steps, torn = read_steps(folder / "steps.jsonl")
    assert len(steps) == 2 and not torn
    assert steps[0].goal == goal.encode("utf-8", "replace").decode()
    assert (steps[0].raw_text is None) == (raw is None)


def test_objects_in_extra_become_text(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path / "e")
    writer.begin()
    writer.step(record(0, extra={"where": Path("x"), "odd": "\ud800"}))
    assert read_steps(tmp_path / "e" / "steps.jsonl")[0][0].extra == {"where": "x", "odd": "?"}


def test_an_unfinished_attempt_is_moved_aside_whole(tmp_path: Path) -> None:
    write_run(tmp_path, INFO)
    folder = episode_folder(tmp_path, "t", 0)
    first = written(folder, 2)
    second = written(folder, 3)
    writer = TrajectoryWriter(folder)
    kept = writer.set_aside("the browser went away")
    assert kept == folder.with_name("t-0.partial-2") and not folder.exists()
    assert list(read_episode(folder.with_name("t-0.partial-1")).steps) == first
    assert list(read_episode(kept).steps) == second
    assert json.loads((kept / "partial.json").read_bytes())["reason"] == "the browser went away"
    assert list(episode_folders(tmp_path)) == [] and len(read_run(tmp_path, partial=True).episodes) == 2
    assert writer.set_aside("nothing there") is None


@pytest.mark.parametrize(
    "task",
    [
        "../../etc/passwd",
        "https://a.example/?q=1",
        "Find a\nshirt",
        "",
        ".",
        "t.partial-1",
        "x" * 300,
        "日本語",
    ],
)
def test_any_task_name_gives_a_folder_of_its_own_inside_the_run(tmp_path: Path, task: str) -> None:
    folder = episode_folder(tmp_path, task, 0)
    assert folder.parent == tmp_path / "episodes" and folder.resolve() == folder and len(folder.name) < 120
    written(folder, 1)
    write_run(tmp_path, INFO)
    assert list(episode_folders(tmp_path)) == [folder]
    assert folder != episode_folder(tmp_path, task + "!", 0)


def test_names_alike_in_a_file_system_stay_apart(tmp_path: Path) -> None:
    names = ["a b", "a-b", "a/b", "a  b"]
    assert len({episode_folder(tmp_path, name, 1) for name in names}) == len(names)
    assert episode_folder(tmp_path, "click-test", 7).name == "click-test-7"


def test_what_is_no_run_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError, match="is not a run folder"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(TrajectoryError, match=r"run\.json cannot be read"):
        read_run(tmp_path)
    write_run(tmp_path, INFO.model_copy(update={"format": 99}))
    with pytest.raises(TrajectoryError, match="format 99"):
        read_info(tmp_path)
    with pytest.raises(TrajectoryError, match="no episode folder"):
        read_episode(tmp_path / "none")


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "episodes").write_text("")
    with pytest.raises(TrajectoryError, match="could not create the run folder"):
        write_run(tmp_path, INFO)
    with pytest.raises(TrajectoryError, match="Not a directory"):
        TrajectoryWriter(episode_folder(tmp_path, "t", 0)).begin()


FULL = """
import resource, sys
from pathlib import Path
from holotron.agent.trajectory import TrajectoryError, TrajectoryWriter
from tests.agent.rig import picture, record

folder = Path(sys.argv[1])
writer = TrajectoryWriter(folder)
writer.begin()
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # no file may grow further, as on a full disk
try:
    for index in range(100):
        file, digest = writer.screenshot(index, picture(index))
        writer.step(record(index, file, sha256=digest))
        print(index, flush=True)
except TrajectoryError as error:
    print(error, flush=True)
    sys.exit(3)
"""


def test_a_full_disk_is_said_and_takes_nothing_back(tmp_path: Path) -> None:
    folder = tmp_path / "t-0"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(folder)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 3, done.stderr
    *indices, message = done.stdout.splitlines()
    assert len(indices) >= 3
    assert f"could not append a step to steps.jsonl in {folder}: File too large" in message
    assert f"Kept there: {len(indices)} complete step(s)" in message and "Make room" in message
    steps, torn = read_steps(folder / "steps.jsonl")
    assert [step.index for step in steps] == [int(i) for i in indices] and not torn


def test_a_screenshot_that_does_not_fit_leaves_no_half_file(tmp_path: Path) -> None:
    folder = tmp_path / "t-0"
    small = FULL.replace("(5000, 5000)", "(20, 20)")
    done = subprocess.run(
        [sys.executable, "-c", small, str(folder)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 3 and "could not write step-000.png" in done.stdout, done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_no_space_left_is_an_os_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_line(Path("/dev/full"), b"x\n")


def test_credentials_do_not_reach_the_run_file(tmp_path: Path) -> None:
    info = RunInfo(**(INFO.model_dump() | {"model": "https://me:secret@host:8000/v1?key=secret#secret"}))
    write_run(tmp_path, info)
    assert "secret" not in (tmp_path / "run.json").read_text()
    assert info.model == "https://host:8000/v1"
    assert without_credentials("weights/pilot") == "weights/pilot"


def test_versions_name_what_is_installed() -> None:
    assert {"torch", "playwright", "miniwob"} <= set(package_versions())
    assert os.sep not in "".join(package_versions().values())
