"""The command line as a user meets it: help, version, doctor, exit codes and the wording of failures."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holotron import __version__, doctor
from holotron.cli import app, main
from holotron.computer.computer import ComputerError
from holotron.contract.policy import ContractError, PolicyError
from holotron.failures import explain

HEAVY = ("torch", "transformers", "playwright", "matplotlib", "numpy", "pydantic")


def holotron(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holotron.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
        timeout=120,
    )


def test_version() -> None:
    done = holotron("--version")
    assert (done.returncode, done.stdout) == (0, f"holotron {__version__}\n")


def test_help_names_every_command() -> None:
    done = holotron("--help")
    assert done.returncode == 0
    names = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    assert "doctor" in names
    for name in names:
        assert name in done.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from holotron.cli import main; main(['--help']); "
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("loaded: []\n")


@pytest.mark.parametrize("arguments", [["docter"], ["doctor", "--jsn"], ["doctor", "extra"], []])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_doctor_json_agrees_with_the_exit_code() -> None:
    done = holotron("doctor", "--json")
    answer = json.loads(done.stdout)
    checks = {check["name"]: check for check in answer["checks"]}
    assert {"python", "torch", "transformers", "playwright", "miniwob", "llguidance", "chromium"} <= set(checks)
    assert checks["torch"]["ok"] and checks["torch"]["found"]
    lacking = [check for check in answer["checks"] if check["needed"] and not check["ok"]]
    assert answer["ok"] == (not lacking)
    assert done.returncode == (1 if lacking else 0)
    assert all(check["fix"] for check in lacking)


def test_doctor_says_what_is_wrong_with_a_named_chromium(tmp_path: Path) -> None:
    done = holotron("doctor", "--json", HOLOTRON_CHROMIUM=str(tmp_path / "chrome"))
    assert done.returncode == 1
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "chromium"]
    assert not check["ok"] and str(tmp_path / "chrome") in check["found"] and "HOLOTRON_CHROMIUM" in check["fix"]


def test_doctor_sees_a_damaged_pilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weights" / "pilot"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert "no .safetensors" in doctor._pilot().found
    import numpy
    from safetensors.numpy import save_file

    save_file({"a": numpy.zeros(1000, numpy.float32)}, folder / "model.safetensors")
    assert doctor._pilot().ok
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-8])  # an interrupted download
    damaged = doctor._pilot()
    assert not damaged.ok and "is damaged" in damaged.found and damaged.fix


def test_doctor_table_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = doctor.Check("chromium", False, True, "none", "apt-get install chromium")
    doctor.show([wrong])
    assert capsys.readouterr().out.endswith(
        "Needed:\n  apt-get install chromium  # chromium\n\nSomething needed is missing.\n"
    )
    doctor.show([doctor.Check("gpu", False, False, "none")])
    assert capsys.readouterr().out.endswith("\nAll that is needed is here.\n")


def _raised(failure: BaseException) -> BaseException:
    """As `main` would catch it: with the traceback of where it was raised (here: outside holotron)."""
    try:
        raise failure
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("failure", "text", "code"),
    [
        (ComputerError("Chromium went away"), "holotron: Chromium went away", 1),
        (PolicyError("no answer from the endpoint"), "holotron: no answer from the endpoint", 1),
        (ContractError("x is not an integer"), "holotron: x is not an integer", 1),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.json"), "holotron: x.json: No such file", 1),
        (OSError(errno.ENOSPC, "No space", "runs/a"), "holotron: the disk is full while writing runs/a", 1),
        (ConnectionRefusedError("endpoint refused"), "holotron: endpoint refused", 1),
        (KeyboardInterrupt(), "holotron: interrupted", 130),
        (ExceptionGroup("workers", [PolicyError("down"), PolicyError("down")]), "holotron: down", 1),
        (BaseExceptionGroup("w", [PolicyError("x"), KeyboardInterrupt()]), "holotron: interrupted", 130),
        (ModuleNotFoundError("No module named 'ray'", name="ray"), "holotron: ray is not installed", 1),
    ],
)  # fmt: skip
def test_an_expected_failure_is_one_line(
    failure: BaseException, text: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLOTRON_DEBUG", raising=False)
    message, given = explain(_raised(failure))
    assert message.startswith(text) and "\n" not in message and given == code
    monkeypatch.setenv("HOLOTRON_DEBUG", "1")
    message, given = explain(_raised(failure))
    assert message.startswith(("Traceback", "  + Exception Group Traceback")) and given == code
    assert message.splitlines()[-1].startswith(text)


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLOTRON_DEBUG", raising=False)
    for failure in (ValueError("from a library"), KeyError("k"), ZeroDivisionError("oops")):
        message, code = explain(_raised(failure))
        assert message.startswith("Traceback") and "a defect of holotron" in message and code == 1


def test_a_value_error_of_our_own_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLOTRON_DEBUG", raising=False)
    own = {"__name__": "holotron.tasks.registry"}
    with pytest.raises(ValueError) as caught:
        exec("raise ValueError('unknown task clik-test')", own)  # the module's name is what decides
    assert explain(caught.value) == ("holotron: unknown task clik-test", 1)


def test_main_prints_failures_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[doctor.Check]:
        raise ComputerError("the screen is dark")

    monkeypatch.setattr(doctor, "examine", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr() == ("", "holotron: the screen is dark\n")


def test_ctrl_c_ends_with_one_line_and_130() -> None:
    code = (
        "import sys, time\n"
        "from holotron import cli, doctor\n"
        "def wait(): print('waiting', flush=True); time.sleep(60)\n"
        "doctor.examine = wait\n"
        "sys.exit(cli.main(['doctor']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=20)
    assert (child.returncode, said) == (130, "holotron: interrupted\n")
