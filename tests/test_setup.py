"""scripts/setup.sh where it cannot do its work, and where it has none to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def set_up(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in {"TORCH", "PIP_ARGS", "PYTHON"}}
    return subprocess.run(
        ["sh", str(clone / "scripts/setup.sh")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**inherited, **environment},
    )


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_no_usable_python_is_said_in_one_line(clone: Path) -> None:
    too_old = executable(clone / "python3.8", "exit 1")  # its answer to "are you 3.11 or later?"
    for python in (str(clone / "absent"), str(too_old)):
        done = set_up(clone, PYTHON=python)
        assert done.returncode == 1
        assert done.stderr.startswith(f"setup: no usable Python >= 3.11 with venv ({python})")
        assert done.stderr.count("\n") == 1 and "apt-get install" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_second_run_only_compares_the_stamp(clone: Path) -> None:
    # A .venv whose interpreter writes down what it was asked: the order of the work, without the downloads.
    log = clone / "asked"
    chromium = executable(clone / "chromium", "")
    answer = f'case "$*" in *chromium) echo {chromium};; esac'
    executable(clone / ".venv/bin/python", f'echo "$*" >>{log}\n{answer}')
    executable(clone / ".venv/bin/holotron", "")
    first = set_up(clone)
    assert first.returncode == 0 and first.stderr.endswith(f"ready: , {chromium}\n"), first.stderr
    asked = log.read_text()
    assert "-c .venv/constraints.txt -e .[dev,serve]" in asked
    again = set_up(clone)
    assert (again.returncode, again.stdout, again.stderr, log.read_text()) == (0, "", "", asked)

    with (clone / "constraints.txt").open("a") as constraints:
        constraints.write("# changed\n")
    assert set_up(clone).stderr and log.read_text() != asked
    assert not set_up(clone).stderr
    chromium.unlink()  # the browser went away: no quick exit
    assert set_up(clone).stderr


def test_another_torch_is_taken_in_place_of_the_pinned_one(clone: Path) -> None:
    log = clone / "asked"
    chromium = executable(clone / "chromium", "")
    executable(clone / ".venv/bin/python", f'echo "$*" >>{log}\ncase "$*" in *chromium) echo {chromium};; esac')
    executable(clone / ".venv/bin/holotron", "")
    assert set_up(clone, TORCH="torch==9.9+cpu", PIP_ARGS="--one --two").returncode == 0
    assert "-c .venv/constraints.txt --one --two torch==9.9+cpu" in log.read_text()
    pins = (clone / ".venv/constraints.txt").read_text().splitlines()
    pinned = (clone / "constraints.txt").read_text().splitlines()
    assert [line for line in pinned if line not in pins] == ["torch==2.13.0"]
