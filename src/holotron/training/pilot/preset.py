"""The pilot's size and shape."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from holotron.model.config import HolotronConfig
from holotron.model.tokenizer import BOS, EOS, IMAGE, PAD, coordinate_tokens, token_id

VIEWPORT = (160, 160)
AGENT = {"contract": "holotron3", "images_kept": 1, "viewport": list(VIEWPORT), "max_tokens": 192}


def pilot_config(tokenizer: PreTrainedTokenizerFast, hidden: int = 192, channels: int = 48) -> HolotronConfig:
    """Two of six mixers are attention, one of them last; one MLP after every mixer."""
    heads = hidden // 32
    return HolotronConfig(
        llm_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "hybrid_override_pattern": "M-M-*-M-M-*-",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "intermediate_size": hidden * 10 // 3,
            "mamba_num_heads": heads,
            "mamba_head_dim": 64,
            "ssm_state_size": 32,
            "n_groups": 1,
            "chunk_size": 32,
        },
        vision_config={"tower": "conv", "channels": [channels, 2 * channels, 4 * channels], "blocks": [2, 3]},
        grounding_config={"size": 128, "cells": 2},
        image_processor="native",
        patch_size=8,
        projector_hidden_size=2 * hidden,
        vit_hidden_size=4 * channels,
        norm_mean=[0.5, 0.5, 0.5],
        norm_std=[0.5, 0.5, 0.5],
        img_context_token_id=token_id(tokenizer, IMAGE),
        coordinate_tokens=coordinate_tokens(tokenizer),
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, EOS),
        pad_token_id=token_id(tokenizer, PAD),
    )


def write_agent_file(folder: Path) -> None:
    """`agent.json` beside the weights says how the checkpoint wants to be used."""
    (folder / "agent.json").write_text(json.dumps(AGENT, indent=2) + "\n")
