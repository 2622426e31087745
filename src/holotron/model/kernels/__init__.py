"""CPU kernels in C++ (cpu.cpp): built on request, used where built, never needed.

    python -m holotron.model.kernels      # builds; takes seconds and a C++ compiler, no Python headers

Nothing is compiled at run time. A built library lies in the user's cache, in a folder named by what decides whether it
fits: source, torch, compiler flags and the features of this CPU. Where there is none, or HOLOTRON_KERNELS=0, `cpu()`
is None and callers take their plain torch code, which is also what the tests hold the kernels against.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("cpu.cpp")
COMMAND = f"{sys.executable} -m holotron.model.kernels"
# Infinities and NaN keep their meaning: no -ffast-math.
FLAGS = (
    "-std=c++20 -O3 -march=native -fopenmp -fPIC -shared -DNDEBUG "
    "-fno-math-errno -fno-trapping-math -fno-signed-zeros -ffp-contract=fast"
)
MOST_TAPS = 4  # of a convolution, as in conv.h
# Loaded and tried in a process of its own: a library that does not run here must not take its user down.
TRIAL = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.linspace(-3, 3, 77)
assert torch.allclose(torch.ops.holotron_cpu.squared_relu(x), torch.relu(x) ** 2)
"""


class BuildError(RuntimeError):
    """The kernels could not be built; the message says why and what to do."""


_state: dict[str, Any] = {}  # "ops" once looked for, "off" inside switched_off()


def cpu() -> Any | None:
    """The operators of cpu.cpp (`torch.ops.holotron_cpu`), or None where they are not built or are switched off."""
    if "ops" not in _state:
        _state["ops"] = find()
    return None if "off" in _state else _state["ops"]


@contextmanager
def switched_off() -> Iterator[None]:
    """Plain torch code inside, for all threads: for tests and measurements."""
    outer = "off" in _state
    _state["off"] = True
    try:
        yield
    finally:
        if not outer:
            del _state["off"]


def find() -> Any | None:
    """What `cpu()` keeps: looked for anew."""
    if os.environ.get("HOLOTRON_KERNELS") == "0":
        return None
    try:
        path = library()
        if not path.is_file():
            return None
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        return torch.ops.holotron_cpu
    except Exception as error:  # whatever is wrong with it, there is other code for the same work
        logging.getLogger(__name__).warning("CPU kernels do not load (%s); type: %s", error, COMMAND)
        return None


def library() -> Path:
    """Where the library for this source, torch, compiler flags and CPU is, or would be."""
    place = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    decides = "\n".join((torch.__version__, *command(), _cpu_features()))
    source = b"".join(file.read_bytes() for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))))
    key = hashlib.sha256(source + decides.encode()).hexdigest()[:16]
    return Path(place) / "holotron" / "kernels" / key / "cpu.so"


def command() -> list[str]:
    """The compiler ($CXX or the first that is found) with its flags, without files. Empty where there is none."""
    compiler = shlex.split(os.environ.get("CXX", ""))
    if not compiler:
        found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
        if found is None:
            return []
        compiler = [found]
    wide = ["-mprefer-vector-width=512"] if platform.machine().lower() in ("x86_64", "amd64") else []
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [*compiler, *FLAGS.split(), *wide, abi]


def _cpu_features() -> str:
    """What -march=native goes by: a home folder may be shared by unlike machines."""
    try:
        with open("/proc/cpuinfo") as lines:
            named = ("flags", "Features", "model name")
            first = [line for line, _ in zip(lines, range(40), strict=False) if line.startswith(named)]
            return "".join(first)
    except OSError:
        return platform.platform() + platform.processor()


def build(again: bool = False) -> Path:
    """Compile, try and store the library, unless it is there. Safe when several processes build at once: each makes
    a file of its own and moves it into place. Raises BuildError."""
    path, base = library(), Path(torch.__file__).parent
    if path.is_file() and not again:
        return path
    start = command()
    if not start:
        raise BuildError("no C++ compiler found; on Debian type: apt-get install g++, or name one in CXX")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        includes = [f"-I{base / 'include'}", f"-I{base / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{base / 'lib'}", "-lc10", "-ltorch_cpu"]
        _run([*start, *includes, str(SOURCE), "-o", str(made), *libraries], "compiling")
        _run([sys.executable, "-c", TRIAL, str(made)], "trying")
        made.replace(path)
    _state.pop("ops", None)
    return path


def _run(arguments: list[str], doing: str) -> None:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{doing} the CPU kernels: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:] or f"exit status {done.returncode}"
        raise BuildError(f"{doing} the CPU kernels failed: {shlex.join(arguments)}\n{said}")
