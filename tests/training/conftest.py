"""A few real records: episodes and practice pages collected once in Chromium."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holotron.data.collect import FIRST_SEED, Job, collect

NAMES = ("click-button", "click-option", "enter-text", "practice")


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("records")
    asyncio.run(collect([Job(name, FIRST_SEED, 4) for name in NAMES], folder))
    return sorted(folder.glob("*.jsonl"))
