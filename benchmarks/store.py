"""Where every benchmark puts what it measured: benchmarks/results/NAME.json, always of the same shape."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holotron.agent.records import package_versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """The commit measured, with a mark where the working tree differs from it."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return asked.stdout.strip() or "unknown"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def store(
    name: str,
    figures: dict[str, float],
    rows: list[dict[str, Any]],
    command: str,
    *,
    browser: str = "",
    out: Path | None = None,
) -> dict[str, Any]:
    """Write the result and print its figures. `figures` is flat; `rows` what they were made from."""
    versions = package_versions() | {"python": platform.python_version()}
    result = {
        "figures": {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in figures.items()},
        "machine": {"cpu": processor(), "cores": f"{os.cpu_count()} cores", "system": platform.system()},
        "versions": versions | ({"chromium": browser} if browser else {}),
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "commit": commit(),
        "rows": rows,
    }
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["figures"], indent=1))
    return result
