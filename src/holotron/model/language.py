"""The NemotronH language model: a stack of pre-norm residual layers of mixed kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holotron.model.cache import HybridCache
from holotron.model.config import LanguageConfig
from holotron.model.layers import MIXERS, RMSNorm


class Layer(nn.Module):
    """h + mixer(norm(h)); the residual stream keeps its dtype."""

    def __init__(self, config: LanguageConfig, index: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MIXERS[config.hybrid_override_pattern[index]](config, index)

    def forward(self, h: Tensor, valid: Tensor | None, cache: HybridCache | None) -> Tensor:
        mixed: Tensor = self.mixer(self.norm(h), valid, cache)
        return h + mixed


class Backbone(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(len(config.hybrid_override_pattern)))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, h: Tensor, valid: Tensor | None, cache: HybridCache | None) -> Tensor:
        for layer in self.layers:
            h = layer(h, valid, cache)
        normed: Tensor = self.norm_f(h)
        return normed


class LanguageModel(nn.Module):
    """Key layout `backbone.*` and `lm_head.weight`, as in released text checkpoints."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, embeddings: Tensor, lengths: Tensor | None = None, cache: HybridCache | None = None) -> Tensor:
        """Final hidden states (B, T, hidden) of `embeddings` (B, T, hidden).

        `lengths` (B,) says how many tokens of each row are real, the rest being right padding; None means
        all. With a cache the tokens continue its sequences and the cache is advanced in place.
        """
        valid = None
        if lengths is not None and int(lengths.min()) < embeddings.shape[1]:
            valid = torch.arange(embeddings.shape[1], device=embeddings.device) < lengths[:, None]
        if cache is not None:
            cache.reserve(embeddings.shape[1])
        hidden: Tensor = self.backbone(embeddings, valid, cache)
        if cache is not None:
            cache.lengths = cache.lengths + (embeddings.shape[1] if lengths is None else lengths)
        return hidden
