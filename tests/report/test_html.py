"""The page as a file: complete, escaped, small, and honest about runs that were cut short."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from holotron.agent.trajectory import TrajectoryError, episode_folder, write_run
from holotron.report.html import write_report
from tests.report.run_folder import page, run_info, small_run, write_episode, write_step


def report_text(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def test_header_names_what_the_run_was_made_with(tmp_path: Path) -> None:
    write_run(tmp_path, run_info([("a", 0), ("a", 1)], model="weights/pilot"))
    text = report_text(tmp_path)
    assert "<h1>pilot on a</h1>" in text
    for fact in (
        "weights/pilot",
        "Chromium 156.0",
        "2026-05-28 20:26 UTC",
        "0–1",
        "max steps 10",
        "holotron3",
    ):
        assert fact in text
    assert run_info([]).prompt_hash[:12] in text and run_info([]).prompt_hash in text


def test_a_run_without_episodes_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, run_info([("a", 0)]))
    text = report_text(tmp_path)
    assert "No episode has been recorded in this run." in text
    assert "0 of 1 planned episodes ended" in text


def test_model_output_stays_text(tmp_path: Path) -> None:
    text = report_text(small_run(tmp_path))
    assert "&lt;script&gt;document.title" in text
    assert len(re.findall("<script", text)) == 1  # ours
    assert "<img src=x" not in text and 'onerror="' not in text


def test_nothing_is_asked_of_the_network(tmp_path: Path) -> None:
    text = report_text(small_run(tmp_path))
    addresses = set(re.findall(r"https?://[^\"'\s<>)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in text.replace("&#39;", "'")


def test_failures_come_first(tmp_path: Path) -> None:
    text = report_text(small_run(tmp_path))
    outcomes = re.findall(r'class="episode (\w+)"', text)
    assert outcomes == [
        "failure",
        "failure",
        "infrastructure",
        "unfinished",
        "unchecked",
        "success",
        "success",
    ]


def test_a_torn_line_and_a_missing_screenshot_leave_the_rest(tmp_path: Path) -> None:
    write_run(tmp_path, run_info([("a-b", 3)]))
    writer = write_episode(tmp_path, "a-b", 3, steps=2, status=None)
    (writer.folder / "step-001.png").unlink()
    with (writer.folder / "steps.jsonl").open("a") as file:
        file.write('{"index": 2, "goa')
    text = report_text(tmp_path)
    assert "its last line was cut off" in text and "step-001.png is missing" in text
    assert "seed 3" in text and text.count('<li class="step') == 2


def test_one_damaged_episode_is_named_and_the_others_shown(tmp_path: Path) -> None:
    write_run(tmp_path, run_info([("a", 0), ("b", 0)]))
    write_episode(tmp_path, "a", 0, steps=2)
    folder = write_episode(tmp_path, "b", 0, steps=2).folder
    lines = (folder / "steps.jsonl").read_text().splitlines()
    (folder / "steps.jsonl").write_text("\n".join(["{]", *lines]) + "\n")
    text = report_text(tmp_path)
    assert "Episode b-0 is left out" in text and "line 1 is damaged" in text
    assert text.count('class="episode success"') == 1


def test_half_a_surrogate_pair_can_be_written(tmp_path: Path) -> None:
    write_run(tmp_path, run_info([("a", 0)]))
    writer = write_episode(tmp_path, "a", 0, steps=0, status=None)
    write_step(writer, 0, page(160, 160, 1), outcome="\ud83d broken")
    assert " broken" in report_text(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError, match=r"no run\.json"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_sixty_episodes_stay_small(tmp_path: Path) -> None:
    jobs = [(f"task-{number}", seed) for number in range(20) for seed in range(3)]
    write_run(tmp_path, run_info(jobs))
    first = write_episode(tmp_path, *jobs[0], steps=8).folder
    for job in jobs[1:]:  # writing them step by step would take ten seconds
        shutil.copytree(first, episode_folder(tmp_path, *job))
    report = write_report(tmp_path)
    assert report.read_text(encoding="utf-8").count('<li class="step') == 480
    assert report.stat().st_size < 4_000_000


def test_large_noisy_screenshots_stay_bearable(tmp_path: Path) -> None:
    write_run(tmp_path, run_info([("web", 0)]))
    write_episode(tmp_path, "web", 0, steps=3, size=(1280, 800), noise=True)
    stored = sum(path.stat().st_size for path in episode_folder(tmp_path, "web", 0).glob("*.png"))
    assert write_report(tmp_path, tmp_path / "out" / "r.html").stat().st_size < stored / 3
