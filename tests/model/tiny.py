"""A hybrid language model small enough for exact comparisons, with weights that would show a slip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holotron.model.config import HolotronConfig
from holotron.model.modeling import HolotronForConditionalGeneration

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "hybrid_override_pattern": "M-M*-M-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights unlike their defaults, yet numerically sane; time steps so small that a clamp would show."""
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.uniform_(0, 2.7)
        elif name.endswith("dt_bias"):
            p.uniform_(-9, -1)
        elif name.endswith("embeddings.weight"):
            p.normal_()
        elif p.ndim == 1:
            p.normal_(1.0, 0.3)
        else:
            p.normal_(std=p[0].numel() ** -0.5)


def build(**changes: Any) -> HolotronForConditionalGeneration:
    model = HolotronForConditionalGeneration(HolotronConfig(llm_config={**TINY, **changes})).eval()
    randomise(model)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, TINY["vocab_size"], shape)
