"""Bytes of a hybrid model in vLLM: its weights, and what one sequence holds in vLLM's page layout (0.32).

One pool of equal blocks. A block holds as many tokens of all attention layers as make it as large as the recurrent
state of as many Mamba layers; a sequence takes a block for every such group of Mamba layers, two with prefix caching,
and one for every started block of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.hub import read_json, resolve
from holotron.model.presets import PRESETS
from holotron.model.processing import read_preprocessor
from holotron.model.sizes import measure, read_any_config

GIB = 2**30
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of one number


@dataclass(frozen=True, slots=True)
class Pages:
    """Bytes of vLLM's cache for one model. `block_tokens` is None where there are no attention layers."""

    weights: int
    block_tokens: int | None
    block_bytes: int
    state_blocks: int  # of one sequence

    def sequence_bytes(self, tokens: int) -> int:
        held = 0 if self.block_tokens is None else math.ceil(tokens / self.block_tokens)
        return (self.state_blocks + held) * self.block_bytes


def pages(config: HolotronConfig, dtype: str, *, prefix_caching: bool, granule: int = 16) -> Pages:
    """`granule` is the number of tokens a block is a multiple of: 16 on a GPU, 128 on a CPU."""
    itemsize, language, sizes = DTYPES[dtype], config.language, measure(config)
    mamba, attention = (language.hybrid_override_pattern.count(letter) for letter in "M*")
    weights = sizes.parameters * itemsize + sizes.kept_fp32 * (4 - itemsize)
    state = language.state_bytes(4, itemsize)  # the recurrence in float32, whatever the rest
    if not attention:
        return Pages(weights, None, state, 2 if prefix_caching else 1)
    token = language.kv_bytes_per_token(itemsize)
    tokens = granule if not mamba else granule * math.ceil(state / mamba / (token / attention) / granule)
    groups = math.ceil(mamba / attention)
    return Pages(weights, tokens, tokens * token, groups * (2 if prefix_caching else 1))


def read_model(name: str) -> tuple[str, HolotronConfig]:
    """What to call the model in vLLM, and its config; a preset or its hub id needs no file. Raises ConfigError."""
    preset = next((p for key, p in PRESETS.items() if name in (key, p.source)), None)
    if preset is not None and not Path(name).is_dir():
        name, config = preset.source, read_any_config(preset.values)
    else:
        folder = resolve(name, weights=False)
        config = read_any_config(read_json(folder, "config.json"))
        if isinstance(config, HolotronConfig) and (folder / "preprocessor_config.json").is_file():
            read_preprocessor(config, read_json(folder, "preprocessor_config.json"))
    if not isinstance(config, HolotronConfig):
        raise ConfigError(f"{name} is no hybrid model; vLLM serves it without our help: vllm serve {name}")
    return name, config
