"""What every test shares: tests marked `gpu` need a CUDA device, those marked `browser` a Chromium."""

from __future__ import annotations

import signal
from collections.abc import Iterable

import pytest

from holotron.computer.chromium import ChromiumMissing, find_chromium

# What a shell starts in the background ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("browser"):
        try:
            find_chromium()
        except ChromiumMissing as missing:  # set-up promised one: that is a failure, not a skip
            pytest.fail(str(missing), pytrace=False)
