from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from holotron.engine import LLM
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.engine.tiny import tiny_model, tiny_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> HolotronForConditionalGeneration:
    return tiny_model(tokenizer)


@pytest.fixture(scope="session")
def llm(model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> LLM:
    return LLM(model, tokenizer)
