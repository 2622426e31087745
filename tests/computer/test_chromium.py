"""Which Chromium is chosen. Programs that answer `--version` stand on the search path of each test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holotron.computer.chromium import ChromiumMissing, find_chromium


def program(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Some Browser {version} built somewhere'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any browser: an empty search path and an empty Playwright folder."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "playwright"))
    monkeypatch.delenv("HOLOTRON_CHROMIUM", raising=False)
    monkeypatch.setattr("holotron.computer.chromium.MAC_APPS", ())
    return tmp_path


def test_order(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = program(machine / "playwright/chromium-999/chrome-linux/chrome", "1.0.0.1")
    assert find_chromium().path == old
    new = program(machine / "playwright/chromium-1255/chrome-linux64/chrome", "2.0.0.2")
    assert (find_chromium().path, find_chromium().source) == (new, "playwright")
    chrome = program(machine / "bin/google-chrome", "3.0.0.3")
    assert (find_chromium().path, find_chromium().source) == (chrome, "system")
    chromium = program(machine / "bin/chromium", "4.0.0.4")
    assert (find_chromium().path, find_chromium().version) == (chromium, "4.0.0.4")
    own = program(machine / "own/browser", "5.0.0.5")
    monkeypatch.setenv("HOLOTRON_CHROMIUM", str(own))
    assert (find_chromium().path, find_chromium().source) == (own, "HOLOTRON_CHROMIUM")


def test_one_that_does_not_start_is_passed_over(machine: Path) -> None:
    stub = machine / "bin/chromium"
    stub.write_text("#!/bin/sh\necho 'requires the chromium snap to be installed' >&2\nexit 1\n")
    stub.chmod(0o755)
    with pytest.raises(ChromiumMissing, match="type: .*install"):
        find_chromium()
    chrome = program(machine / "bin/google-chrome", "3.0.0.3")
    assert find_chromium().path == chrome


def test_a_named_one_is_never_passed_over(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine / "bin/chromium", "4.0.0.4")
    broken = machine / "broken"
    broken.write_text("not a program")
    for named in (machine / "absent", broken):
        monkeypatch.setenv("HOLOTRON_CHROMIUM", str(named))
        with pytest.raises(ChromiumMissing, match=f"HOLOTRON_CHROMIUM={named} is not"):
            find_chromium()


def test_set_up_gets_the_path_or_one_line(machine: Path) -> None:
    command = [sys.executable, "-m", "holotron.computer.chromium"]
    none = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert none.returncode == 1 and not none.stdout
    assert none.stderr.startswith("no Chromium that starts") and none.stderr.count("\n") == 1
    chromium = program(machine / "bin/chromium", "4.0.0.4")
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == f"{chromium}\n"
