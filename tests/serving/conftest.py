from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holotron.engine import LLM
from holotron.model.tiny_checkpoints import make_tiny
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.serving.running import Running, serving

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llm() -> LLM:
    """A vision model with random weights and the pilot's kind of tokenizer."""
    tokenizer = tiny_tokenizer()
    return LLM(tiny_model(tokenizer), tokenizer, max_batch=8, max_model_len=4096)


@pytest.fixture(scope="session")
def thinking_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A tiny checkpoint in the layout of Holotron-12B: tiles, and a template that can think and call tools."""
    folder: Path = make_tiny("vl-v2", tmp_path_factory.mktemp("tiny") / "vl-v2")
    return LLM(folder, max_batch=8, max_model_len=8192)


@pytest.fixture(scope="module")
def server(tiny_llm: LLM) -> Iterator[Running]:
    with serving(tiny_llm) as running:
        yield running


@pytest.fixture(scope="module")
def thinking_server(thinking_llm: LLM) -> Iterator[Running]:
    with serving(thinking_llm) as running:
        yield running
