"""Size rules as transformers writes them, without its image processors around them, which need torchvision."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@cache
def from_transformers(file: str, function: str) -> Callable[..., Any]:
    """One pure function out of a module that cannot be imported without torchvision."""
    spec = find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "models" / file
    if not path.exists():
        pytest.skip(f"this transformers has no {file}")
    found = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == function]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(found, []), str(path), "exec"), names)
    call: Callable[..., Any] = names[function]
    return call
