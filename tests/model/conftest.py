from __future__ import annotations

import secrets

import pytest
import torch


@pytest.fixture
def seed() -> int:
    """Fresh random inputs each run; pytest shows the printed seed when a test fails."""
    value = secrets.randbelow(2**31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value
