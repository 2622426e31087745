"""How large a model is and what it costs in memory, counted on tensors without data.

Parameters are counted on the very modules that load a checkpoint, built on torch's meta device; nothing is
downloaded or allocated. Attention-only models of the Qwen3-VL kind are measured too, as the baseline to compare with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from holotron.model.checkpoint import OPTIONAL, kept_in_fp32, on_meta
from holotron.model.config import LAYER_KINDS, ConfigError, HolotronConfig
from holotron.model.dialects import read_config

SsmBits = Literal[16, 32]
BF16 = 2  # bytes
# Parts in the order they are shown; which tensors belong to which is `_part`'s business.
PARTS = (
    "embeddings", "lm_head", "mamba", "attention", "mlp", "experts_routed", "experts_shared", "experts_latent",
    "router", "norms", "vision", "projector", "grounding_head",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts are numbers of parameters, memory is in bytes, `layers` is the pattern of M, *, - and E.

    A decoder layer of an attention-only model is written as two, `*-`. `active_parameters` take part in every text
    token: the language model without its input table (a lookup), of the routed experts only those chosen.
    """

    layers: str
    parts: Mapping[str, int]
    active_parameters: int
    kept_fp32: int  # parameters that loading keeps in float32
    kv_bytes_per_token: int  # bf16
    state_bytes_fp32: int  # of one sequence: recurrent state in float32, convolution columns in bf16
    state_bytes_16bit: int

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def weight_bytes_bf16(self) -> int:
        """Two bytes per parameter; loading in bf16 takes `kept_fp32 * 2` more."""
        return self.parameters * BF16

    @property
    def layer_counts(self) -> dict[str, int]:
        return {kind: self.layers.count(letter) for letter, kind in LAYER_KINDS.items() if letter in self.layers}

    def state_bytes(self, ssm_bits: SsmBits = 32) -> int:
        return self.state_bytes_fp32 if ssm_bits == 32 else self.state_bytes_16bit

    def sequence_bytes(self, tokens: int, ssm_bits: SsmBits = 32) -> int:
        """Memory that one sequence of that many tokens holds: state and bf16 keys and values."""
        return self.state_bytes(ssm_bits) + tokens * self.kv_bytes_per_token

    def break_even(self, baseline: Sizes, ssm_bits: SsmBits = 32) -> int | None:
        """The fewest tokens from which on one sequence takes no more memory than at `baseline`; None if never."""
        gain = baseline.kv_bytes_per_token - self.kv_bytes_per_token
        extra = self.state_bytes(ssm_bits) - baseline.state_bytes(ssm_bits)
        if extra <= 0:
            return 0 if gain >= 0 else None
        return math.ceil(extra / gain) if gain > 0 else None

    def vllm_block_tokens(self, ssm_bits: SsmBits = 32) -> int | None:
        """Tokens of a vLLM cache block, which it makes as large as a Mamba layer's state; None for no hybrid."""
        mamba, attention = self.layers.count("M"), self.layers.count("*")
        if not mamba or not attention:
            return None
        page = self.state_bytes(ssm_bits) / mamba
        return 16 * math.ceil(page / (self.kv_bytes_per_token / attention) / 16)


def read_any_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """HolotronConfig for this family, transformers' Qwen3VLConfig for the baseline. Raises ConfigError."""
    if values.get("model_type") != "qwen3_vl":
        return read_config(values)
    from transformers import Qwen3VLConfig

    try:
        config: PretrainedConfig = Qwen3VLConfig.from_dict(dict(values))
    except Exception as error:  # its validation raises classes of its own
        raise ConfigError(f"config.json is no usable Qwen3-VL config: {error}") from error
    return config


def expected_tensors(config: PretrainedConfig) -> dict[str, Tensor]:
    """Everything a checkpoint of that config stores, on the meta device: shapes without data, by released key.

    The keys are those of vision-language releases, also where the model is text only. Raises ConfigError where the
    config describes no model.
    """
    if isinstance(config, HolotronConfig):
        return dict(on_meta(config).state_dict())
    from transformers import Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        tensors = dict(Qwen3VLForConditionalGeneration(config).state_dict())  # type: ignore[arg-type]
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return tensors


def measure(config: PretrainedConfig, tensors: Mapping[str, Tensor] | None = None) -> Sizes:
    """The sizes of a HolotronConfig or Qwen3VLConfig; `tensors` if `expected_tensors` has been called already.

    Raises ConfigError where the config describes no model.
    """
    tensors = expected_tensors(config) if tensors is None else tensors
    if not isinstance(config, HolotronConfig):
        return _measure_attention(config, tensors)
    language = config.language
    pattern = language.hybrid_override_pattern
    parts = _count(tensors, lambda key: _part(key, pattern))
    idle = parts.get("experts_routed", 0)
    if idle:
        idle -= idle * language.num_experts_per_tok // language.n_routed_experts
    outside = sum(parts.get(name, 0) for name in ("embeddings", "vision", "projector", "grounding_head"))
    return Sizes(
        layers=pattern,
        parts=parts,
        active_parameters=sum(parts.values()) - outside - idle,
        kept_fp32=sum(tensor.numel() for key, tensor in tensors.items() if kept_in_fp32(key)),
        kv_bytes_per_token=language.kv_bytes_per_token(BF16),
        state_bytes_fp32=language.state_bytes(4, BF16),
        state_bytes_16bit=language.state_bytes(2, BF16),
    )


def _measure_attention(config: Any, tensors: Mapping[str, Tensor]) -> Sizes:
    text = config.text_config
    parts = _count(tensors, _qwen_part)
    tied = parts["embeddings"] if config.tie_word_embeddings else 0
    outside = parts["embeddings"] - tied + sum(parts.get(name, 0) for name in ("vision", "projector"))
    return Sizes(
        layers="*-" * text.num_hidden_layers,
        parts=parts,
        active_parameters=sum(parts.values()) - outside,
        kept_fp32=0,
        kv_bytes_per_token=text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * BF16,
        state_bytes_fp32=0,
        state_bytes_16bit=0,
    )


def _count(tensors: Mapping[str, Tensor], part_of: Callable[[str], str]) -> dict[str, int]:
    counts = dict.fromkeys(PARTS, 0)
    for key, tensor in tensors.items():
        if not OPTIONAL.search(key):  # constants of the tower, not parameters
            counts[part_of(key)] += tensor.numel()
    return {name: count for name, count in counts.items() if count}


def _part(key: str, pattern: str) -> str:
    """Which part a tensor of the hybrid belongs to, from its released name."""
    top, _, rest = key.partition(".")
    if top != "language_model":
        return {"vision_model": "vision", "mlp1": "projector", "grounding_head": "grounding_head"}[top]
    if rest.startswith("lm_head."):
        return "lm_head"
    if rest.startswith("backbone.embeddings."):
        return "embeddings"
    layer = re.match(r"backbone\.layers\.(\d+)\.mixer\.(\w+)", rest)
    if layer is None:
        return "norms"
    kind, module = pattern[int(layer[1])], layer[2]
    if kind != "E":
        return LAYER_KINDS[kind]
    return {"experts": "experts_routed", "shared_experts": "experts_shared", "gate": "router"}.get(
        module, "experts_latent"
    )


def _qwen_part(key: str) -> str:
    if ".visual." in key:
        return "projector" if "merger" in key else "vision"
    for piece, part in ((".self_attn.", "attention"), (".mlp.", "mlp"), ("embed_tokens.", "embeddings")):
        if piece in key:
            return part
    return "lm_head" if key.startswith("lm_head.") else "norms"
