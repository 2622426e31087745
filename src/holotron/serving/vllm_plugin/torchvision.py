"""vLLM's vision code imports torchvision where the family needs none of it; this lets the import pass."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

_NAMES = ("torchvision", "torchvision.transforms")


@contextmanager
def placeholder() -> Iterator[None]:
    """Inside, `import torchvision.transforms` succeeds; where torchvision is missing it finds an empty module.

    The empty modules are gone afterwards, so that nobody else takes them for torchvision. Whoever kept one gets an
    AttributeError from it at the first use.
    """
    if "torchvision" in sys.modules or find_spec("torchvision") is not None:
        yield
        return
    package, transforms = (ModuleType(name) for name in _NAMES)
    package.transforms = transforms  # type: ignore[attr-defined]
    sys.modules.update(zip(_NAMES, (package, transforms), strict=True))
    try:
        yield
    finally:
        for name in _NAMES:
            sys.modules.pop(name, None)
