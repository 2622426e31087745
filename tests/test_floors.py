"""The floors of docs/architecture.md, read from the imports themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "holotron"
TOP = 6
FLOORS = {
    "contract": 0, "model": 0,
    "engine": 1, "computer": 1,
    "serving": 2, "tasks": 2,
    "agent": 3,
    "data": 4, "report": 4,
    "training": 5, "evaluation": 5, "bench": 5,
    "cli": TOP, "demo": TOP, "web": TOP, "live": TOP, "doctor": TOP, "failures": TOP,
    "inspection": TOP, "inspection_view": TOP, "look": TOP,
}  # fmt: skip
# What a room must not know although it lies lower, or is not ours at all.
STRANGERS = {
    "agent": ("holotron.engine", "playwright"),
    "engine": ("holotron.contract",),
    "contract": ("torch", "transformers", "playwright"),
}


def module_of(file: Path, package: Path) -> list[str]:
    parts = ["holotron", *file.relative_to(package).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(source: str, file: Path, package: Path) -> Iterator[str]:
    """Dotted names that a source imports, relative ones resolved; `from a import b` gives a.b."""
    module = module_of(file, package)
    here = module if file.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else []
            stem = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value


def violations(package: Path) -> list[str]:
    found = []
    for file in sorted(package.rglob("*.py")):
        module = module_of(file, package)
        if len(module) == 1:  # holotron/__init__.py stands under everything
            room, floor = "holotron", -1
        elif module[1] in FLOORS:
            room, floor = module[1], FLOORS[module[1]]
        else:
            found.append(f"{file.relative_to(package)}: {module[1]} is no room of docs/architecture.md")
            continue
        for name in imported(file.read_text(), file, package):
            where = f"{file.relative_to(package)} imports {name}"
            if any(name == no or name.startswith(f"{no}.") for no in STRANGERS.get(room, ())):
                found.append(f"{where}: {room} must not know it")
            parts = name.split(".")
            target = parts[1] if parts[0] == "holotron" and len(parts) > 1 else None
            if target not in FLOORS or target == room:
                continue
            if FLOORS[target] >= floor and not (floor == FLOORS[target] == TOP):
                found.append(f"{where}: floor {floor} may only use floors below, {target} is on {FLOORS[target]}")
    return found


def test_rooms_import_only_from_lower_floors() -> None:
    assert len(list(PACKAGE.rglob("*.py"))) > 10
    assert not violations(PACKAGE)


@pytest.mark.parametrize(
    ("file", "source", "word"),
    [
        ("contract/bad.py", "from holotron.computer.computer import Point", "computer is on 1"),
        ("computer/bad.py", "import holotron.engine.llm", "engine is on 1"),
        ("computer/bad.py", "from holotron import engine", "engine is on 1"),
        ("model/bad.py", "def late():\n    from ..contract import step", "contract is on 0"),
        ("model/deep/bad.py", "from ...contract.step import Step", "contract is on 0"),
        ("model/__init__.py", "from ..contract import step", "contract is on 0"),
        ("tasks/bad.py", "import importlib\nimportlib.import_module('holotron.agent')", "agent is on 3"),
        ("training/bad.py", "from holotron.cli import main", "cli is on 6"),
        ("agent/bad.py", "from playwright.async_api import Page", "agent must not know it"),
        ("agent/bad.py", "from holotron.engine import llm", "agent must not know it"),
        ("engine/bad.py", "from holotron.contract import step", "engine must not know it"),
        ("__init__.py", "from holotron.contract import step", "contract is on 0"),
        ("attic/old.py", "", "attic is no room"),
    ],
)
def test_a_violation_is_caught(tmp_path: Path, file: str, source: str, word: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (found,) = violations(tmp_path)
    assert word in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("agent/good.py", "from holotron.contract.step import Step\nfrom holotron.tasks import task"),
        ("agent/good.py", "from .loop import run\nfrom holotron import __version__\nimport json"),
        ("cli.py", "from holotron import doctor\nfrom holotron.failures import explain"),
    ],
)
def test_what_the_floors_allow_is_not_caught(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert not violations(tmp_path)
