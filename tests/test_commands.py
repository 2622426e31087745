"""The commands on bad input and good: one clear message, the right exit code, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holotron.cli import main
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.training.pilot.preset import pilot_config, write_agent_file
from holotron.training.pilot.vocabulary import build_pilot_tokenizer
from tests.pages.server import serve_pages
from tests.serving.endpoint import Answer, completion, serve

PAGE = "data:text/html,<button>Ok</button>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = build_pilot_tokenizer()
    HolotronForConditionalGeneration(pilot_config(tokenizer, hidden=32, channels=4)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_agent_file(folder)
    return folder


def one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    assert lines, "nothing was said"
    return lines[-1]


def test_a_folder_without_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(tmp_path), "--tasks", "click-test", "--seeds", "1"]) == 1
    assert str(tmp_path) in one_line(capfd.readouterr().err)


def test_a_name_that_is_no_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", "no-such-thing", "--tasks", "click-test"]) == 1
    assert "neither a checkpoint folder nor" in one_line(capfd.readouterr().err)


@pytest.mark.parametrize("damage", ["cut", "gone", "nonsense"])
def test_corrupt_weights(damage: str, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    if damage == "gone":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:1000] if damage == "cut" else b"these are no weights")
    assert main(["eval", "--model", str(tmp_path), "--tasks", "click-test", "--seeds", "1"]) == 1
    said = one_line(capfd.readouterr().err)
    assert str(tmp_path) in said and "Traceback" not in said


def test_an_unknown_task_names_near_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", "random", "--tasks", "click-tset"]) == 1
    assert "did you mean click-test" in one_line(capfd.readouterr().err)


@pytest.mark.browser
def test_an_unreachable_page(tmp_path: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:9/"
    command = ["run", "look", "--url", url, "--model", str(checkpoint), "--out", str(tmp_path / "run")]
    assert main(command) == 1
    assert url in one_line(capfd.readouterr().err)
    assert (tmp_path / "run" / "report.html").exists()


def test_an_unreachable_endpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["run", "look", "--url", PAGE, "--model", "http://127.0.0.1:9/v1", "--out", str(tmp_path / "run")]
    assert main(command) == 1
    assert "127.0.0.1:9" in one_line(capfd.readouterr().err)


def test_the_oracle_cannot_do_a_persons_task(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "look", "--url", PAGE, "--model", "oracle", "--out", str(tmp_path / "run")]) == 1
    assert "oracle only solves" in one_line(capfd.readouterr().err)


@pytest.mark.browser
def test_an_endpoint_that_returns_nonsense_is_the_models_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve(completion("I would rather not.")) as endpoint, serve_pages() as pages:
        command = ["run", "look", "--url", pages.url("second.html"), "--model", endpoint.url]
        assert main([*command, "--out", str(tmp_path / "run"), "--json"]) == 0
    out = capfd.readouterr().out
    summary = json.loads(out.strip().splitlines()[-1])
    assert summary["total"]["statuses"] == {"contract_error": 1}
    assert summary["total"]["infra_errors"] == 0


@pytest.mark.browser
def test_any_endpoint_can_drive_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer = json.dumps({"note": None, "thought": "Done.", "tool_call": {"tool_name": "answer", "content": "42"}})
    with serve(completion(), completion(answer)) as endpoint, serve_pages() as pages:
        command = ["run", "what is it?", "--url", pages.url("second.html"), "--model", endpoint.url]
        assert main([*command, "--out", str(tmp_path / "run")]) == 0
    assert "42" in capfd.readouterr().out
    assert (tmp_path / "run" / "report.html").read_text().count("<img") >= 2


def test_a_broken_endpoint_is_infrastructure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serve(Answer(b"<html>not an API</html>")) as endpoint:
        endpoint.models = "nothing"
        command = ["run", "look", "--url", PAGE, "--model", endpoint.url, "--out", str(tmp_path / "run")]
        assert main(command) == 1
    assert endpoint.url in one_line(capfd.readouterr().err)


@pytest.mark.browser
def test_ctrl_c_keeps_every_step_and_resume_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    command = ["eval", "--model", "oracle", "--tasks", "click-button-sequence,login-user", "--seeds", "12"]
    process = subprocess.Popen(
        [sys.executable, "-m", "holotron.cli", *command, "--out", str(folder), "--workers", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.time() + 90
    while time.time() < deadline and len(list(folder.glob("episodes/*/episode.json"))) < 3:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the browser driver as well
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in said and "Traceback" not in said and "never retrieved" not in said
    kept = {path: path.read_bytes() for path in folder.glob("episodes/*/episode.json")}
    assert 3 <= len(kept) < 24
    assert main([*command, "--resume", str(folder), "--json"]) == 0
    summary = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert summary["total"]["n"] == summary["total"]["successes"] == 24
    assert all(path.read_bytes() == before for path, before in kept.items())


@pytest.mark.browser
def test_the_demo_runs_and_reports(tmp_path: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the oracle's steps, so that the outcome is known; the pilot's own figures are measured elsewhere."""
    assert main(["demo", "--model", "oracle", "--seeds", "1", "--out", str(tmp_path / "run"), "--json"]) == 0
    summary = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert len(summary["tasks"]) == 20 and summary["mean_rate"] == 1.0
    assert (tmp_path / "run" / "summary.json").exists()
    assert "click-shades" in (tmp_path / "run" / "report.html").read_text()


def test_a_bad_viewport_is_named(tmp_path: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["run", "look", "--url", PAGE, "--model", str(checkpoint), "--viewport", "huge"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 1
    assert "1280x720" in one_line(capfd.readouterr().err)
