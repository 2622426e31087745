"""Tiny models with random weights, and pictures, for the engine's tests."""

from __future__ import annotations

import random
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from holotron.model.config import HolotronConfig
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.tokenizer import (
    EOS,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    ROLE,
    SYSTEM,
    build_tokenizer,
    coordinate_tokens,
)

TEMPLATE = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}" + SYSTEM + "{%- else -%}"
    "{{- '" + ROLE + "' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'text' -%}{{- part.text -}}{%- else -%}"
    "" + IMAGE_START + IMAGE + IMAGE_END + "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- if message.role == 'assistant' -%}" + EOS + "{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + ROLE + "assistant\\n' -}}{%- endif -%}"
)
_CALL = '","tool_call":{"tool_name":"'
PIECES = [
    '{"note":null,"thought":"',
    '{"note":"',
    '","thought":"',
    f'{_CALL}click","element":"',
    f'{_CALL}scroll","element":"',
    f'{_CALL}write","content":"',
    f'{_CALL}go_back"',
    ',"button":"left"}}',
    ',"button":"right"}}',
    '","press_enter":false,"overwrite":false}}',
    '"}}',
    "}}",
    "I click it.",
    "É il pulsante",
]


def tiny_tokenizer(pieces: list[str] = PIECES) -> PreTrainedTokenizerFast:
    return build_tokenizer(pieces, TEMPLATE)


def tiny_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, vision: bool = True, **changes: Any
) -> HolotronForConditionalGeneration:
    """About 0.2 M parameters. Output weights are scaled up so that greedy choices have a margin."""
    torch.manual_seed(seed)
    config = HolotronConfig(
        llm_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 48,
            "hybrid_override_pattern": "M-*-M",
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "intermediate_size": 64,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            **changes,
        },
        vision_config={"tower": "conv", "channels": [8, 12, 16], "blocks": [1, 1]} if vision else None,
        grounding_config={"size": 16} if vision else None,
        image_processor="native",
        norm_mean=[0.5, 0.5, 0.5],
        norm_std=[0.5, 0.5, 0.5],
        projector_hidden_size=32,
        img_context_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        coordinate_tokens=coordinate_tokens(tokenizer),
    )
    model = HolotronForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.language_model.backbone.embeddings.weight.mul_(2.0)
        model.language_model.lm_head.weight.mul_(20.0)
    return model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = random.Random(seed * 65536 + width * 256 + height)
    return Image.frombytes("RGB", (width, height), noise.randbytes(3 * width * height))
