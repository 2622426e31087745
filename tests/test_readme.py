"""README.md and README.es.md: they name only what exists, say the same, and carry the measured figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from holotron.cli import app

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", ROOT / "README.es.md"]
sys.path.insert(0, str(ROOT / "benchmarks"))

import tables  # noqa: E402


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_every_command_that_is_named_exists(readme: Path) -> None:
    named = set(re.findall(r"(?:`|\.venv/bin/)holotron ([a-z-]+)\b", readme.read_text()))
    registered = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    registered |= {group.name or "" for group in app.registered_groups}
    assert "doctor" in named
    assert named <= registered


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(readme: Path) -> None:
    text = tables.BLOCK.sub("", readme.read_text())
    named = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    named += re.findall(r"`((?:tests|benchmarks|weights|docs)/[^` ]+)`", text)
    assert "docs/demo.png" in named and "weights/pilot" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_both_languages_have_the_same_shape() -> None:
    def shape(text: str) -> list[str]:
        text = tables.BLOCK.sub("(figures)", text)
        marks = re.findall(r"^(#+ |\||- |```|!\[|\(figures\))", text, re.M)
        return [*marks, *sorted(re.findall(r"`((?:tests|weights|benchmarks|make|holotron)[^`]*)`", text))]

    english, spanish = (readme.read_text() for readme in READMES)
    assert shape(english) == shape(spanish)


def test_figures_are_up_to_date() -> None:
    for document in tables.documents():
        text = document.read_text()
        language = "es" if document.name.endswith(".es.md") else "en"
        assert tables.refreshed(text, language) == text, "type: python benchmarks/tables.py"


def test_tables_are_written_from_results(tmp_path: Path) -> None:
    result = {
        "figures": {"miniwob_easy20_mean": 0.4567, "state_bytes_step_1": 2_097_152, "demo_seconds": 61.25},
        "machine": {"cpu": "some CPU", "cores": 2}, "date": "2026-01-02", "commit": "0123456789abcdef",
        "command": "python benchmarks/pilot.py",
    }  # fmt: skip
    (tmp_path / "pilot.json").write_text(json.dumps(result))
    text = "before\n<!-- figures:pilot -->\nold\n<!-- /figures -->\nafter\n"
    english = tables.refreshed(text, "en", tmp_path)
    assert english.startswith("before\n<!-- figures:pilot -->\n| figure | value |")
    assert english.endswith("<!-- /figures -->\nafter\n") and "old" not in english
    for part in ("| 45.7 % |", "| 2,048.0 KiB |", "| 61.2 s |", "some CPU, 2, 2026-01-02, commit 0123456789"):
        assert part in english
    assert tables.refreshed(english, "en", tmp_path) == english
    spanish = tables.refreshed(text, "es", tmp_path)
    assert "| 45,7 % |" in spanish and "| 2.048,0 KiB |" in spanish and "Medido con" in spanish
    picked = tables.refreshed(text.replace("figures:pilot", "figures:pilot demo_seconds"), "en", tmp_path)
    assert "61.2 s" in picked and "KiB" not in picked
    with pytest.raises(ValueError, match="no figure 'speed'"):
        tables.refreshed(text.replace("figures:pilot", "figures:pilot speed"), "en", tmp_path)
    assert "Not measured yet." in tables.refreshed(text.replace("figures:pilot", "figures:absent"), "en", tmp_path)
