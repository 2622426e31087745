"""What is installed, found and missing on this machine, and the command that mends it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

from holotron import __version__
from holotron.computer.chromium import ChromiumMissing, find_chromium, install_command

ROOT = Path(__file__).resolve().parents[2]
PILOT = Path("weights/pilot")
GIB = 1024**3
# Imported, not only looked up: a broken wheel counts as missing.
IMPORTED = ("torch", "transformers", "playwright", "miniwob", "llguidance")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the examination. `fix` is a command to type, empty where nothing is to be done."""

    name: str
    ok: bool
    needed: bool
    found: str
    fix: str = ""


def examine() -> list[Check]:
    """All checks, in the order they are shown. Takes the seconds that importing torch takes."""
    return [
        Check("holotron", True, True, __version__),
        _python(),
        *(_imported(name) for name in IMPORTED),
        _other_packages(),
        _chromium(),
        _pilot(),
        _cores(),
        _memory(),
        _gpu(),
        _kernels(),
        *_extras(),
    ]


def is_healthy(checks: Sequence[Check]) -> bool:
    return all(check.ok for check in checks if check.needed)


def as_json(checks: Sequence[Check]) -> str:
    return json.dumps({"ok": is_healthy(checks), "checks": [asdict(check) for check in checks]}, indent=2)


def show(checks: Sequence[Check]) -> None:
    """Print the table, then every command worth typing, the needed ones first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        mark, style = ("ok", "green") if check.ok else ("missing", "bold red") if check.needed else ("-", "dim")
        table.add_row(Text(mark, style), check.name, Text(check.found))
    console.print(table)
    for title, needed in (("Needed", True), ("Optional", False)):
        fixes = [check for check in checks if check.fix and not check.ok and check.needed is needed]
        if fixes:
            console.print(f"\n{title}:")
        for check in fixes:
            console.print(Text(f"  {check.fix}  # {check.name}"), soft_wrap=True)
    console.print("\nAll that is needed is here." if is_healthy(checks) else "\nSomething needed is missing.")


def _pip(what: str, pinned: bool = True) -> str:
    constraints = ROOT / "constraints.txt"
    pins = f"-c {constraints} " if pinned and constraints.is_file() else ""
    return f"{sys.executable} -m pip install {pins}{what}"


def _pip_extra(extra: str) -> str:
    what = f"-e '{ROOT}[{extra}]'" if (ROOT / "pyproject.toml").is_file() else f"'holotron[{extra}]'"
    return _pip(what, pinned=extra != "vllm")  # vLLM brings a torch of its own choice


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    return Check("python", sys.version_info >= (3, 11), True, found, "make setup PYTHON=/path/to/python3.11-or-later")


def _imported(name: str) -> Check:
    try:
        importlib.import_module(name)
        return Check(name, True, True, importlib.metadata.version(name))
    except Exception as broken:  # a damaged wheel may fail with anything, and the doctor must go on
        return Check(name, False, True, f"{type(broken).__name__}: {broken}", _pip(name))


def _requirements() -> Iterator[tuple[str, Requirement]]:
    """(extra, or "" for what is always needed; the requirement)."""
    own = importlib.metadata.metadata("holotron")
    extras = own.get_all("Provides-Extra") or []
    for line in importlib.metadata.requires("holotron") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            yield "", requirement
        for extra in extras:
            if marker is not None and "extra" in str(marker) and marker.evaluate({"extra": extra}):
                yield extra, requirement


def _lacking(wanted: Callable[[str], bool]) -> list[str]:
    """Requirements, of the extras `wanted` accepts, that are not installed in a version that fits."""
    lacking = []
    for extra, requirement in _requirements():
        if not wanted(extra):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(requirement.name)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lacking.append(f"{requirement.name} {requirement.specifier} (found {version})")
    return lacking


def _other_packages() -> Check:
    lacking = [name for name in _lacking(lambda extra: extra == "") if name not in IMPORTED]
    found = f"missing: {', '.join(lacking)}" if lacking else "all installed"
    return Check("other packages", not lacking, True, found, "make setup")


def _extras() -> Iterator[Check]:
    for extra in importlib.metadata.metadata("holotron").get_all("Provides-Extra") or []:
        lacking = _lacking(lambda name, wanted=extra: name == wanted)  # type: ignore[misc]
        found = f"without {', '.join(lacking)}" if lacking else "all installed"
        yield Check(f"extra: {extra}", not lacking, False, found, _pip_extra(extra))


def _chromium() -> Check:
    try:
        chromium = find_chromium()
    except ChromiumMissing as missing:
        fix = "unset HOLOTRON_CHROMIUM" if os.environ.get("HOLOTRON_CHROMIUM") else install_command()
        return Check("chromium", False, True, str(missing), fix)
    return Check("chromium", True, True, f"{chromium.version} ({chromium.path}, {chromium.source})")


def _pilot() -> Check:
    """The checkpoint that ships: in the folder the command is typed in, else beside the sources."""
    name, fix = "pilot weights", f"git -C {ROOT} checkout -- {PILOT}"
    places = [folder / PILOT for folder in (Path.cwd(), ROOT)]
    folder = next((place for place in places if (place / "config.json").is_file()), None)
    if folder is None:
        return Check(name, False, True, f"no config.json in {places[-1]}", fix)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return Check(name, False, True, f"no .safetensors file in {folder}", fix)
    try:
        from safetensors import safe_open

        for file in files:
            with safe_open(file, framework="np") as tensors:  # reads the header and checks the length
                tensors.keys()
    except Exception as broken:
        return Check(name, False, True, f"{file} is damaged: {broken}", fix)
    size = sum(file.stat().st_size for file in files) / 1024**2
    return Check(name, True, True, f"{size:.1f} MiB ({folder})")


def _cores() -> Check:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cpu cores", True, True, f"{count} ({platform.machine()})")


def _memory() -> Check:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return Check("memory", True, False, "unknown on this system")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container may have less than its machine
    if limit.is_file() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return Check("memory", True, False, f"{total / GIB:.1f} GiB")


def _gpu() -> Check:
    try:
        import torch

        if torch.cuda.is_available():
            return Check("gpu", True, False, torch.cuda.get_device_name(0))
    except Exception as broken:
        return Check("gpu", False, False, f"{type(broken).__name__}: {broken}")
    return Check("gpu", False, False, "none; the pilot runs on the CPU")


def _kernels() -> Check:
    """Built C++ kernels (model/kernels): without them all works, training and many agents at half the speed."""
    name = "cpu kernels"
    try:
        from holotron.model import kernels

        if os.environ.get("HOLOTRON_KERNELS") == "0":
            return Check(name, False, False, "switched off (HOLOTRON_KERNELS=0)", "unset HOLOTRON_KERNELS")
        path = kernels.library()
        if not path.is_file():
            compiler = "" if kernels.command() else "; no C++ compiler found either (Debian: apt-get install g++)"
            return Check(name, False, False, f"not built{compiler}", kernels.COMMAND)
        if kernels.cpu() is None:
            return Check(name, False, False, f"{path} does not load", f"{kernels.COMMAND} --again")
        return Check(name, True, False, f"built ({path})")
    except Exception as broken:
        return Check(name, False, False, f"{type(broken).__name__}: {broken}")
