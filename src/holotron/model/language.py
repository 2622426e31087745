"""The NemotronH language model: a stack of pre-norm residual layers of mixed kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from holotron.model.cache import HybridCache
from holotron.model.config import LanguageConfig
from holotron.model.layers import MIXERS, RMSNorm
from holotron.model.linear import Linear


class Layer(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    """h + mixer(norm(h)); the residual stream keeps its dtype.

    Recomputed in the backward pass where transformers' `gradient_checkpointing_enable()` asked for it, in training
    mode. All arguments are positional, so that the recompute sees every one of them.
    """

    def __init__(self, config: LanguageConfig, index: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MIXERS[config.hybrid_override_pattern[index]](config, index)

    def forward(self, h: Tensor, valid: Tensor | None, cache: HybridCache | None, segments: Tensor | None) -> Tensor:
        mixed: Tensor = self.mixer(self.norm(h), valid, cache, segments)
        return h + mixed


class Backbone(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(len(config.hybrid_override_pattern)))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(
        self, h: Tensor, valid: Tensor | None, cache: HybridCache | None, segments: Tensor | None = None
    ) -> Tensor:
        for layer in self.layers:
            h = layer(h, valid, cache, segments)
        normed: Tensor = self.norm_f(h)
        return normed


class LanguageModel(nn.Module):
    """Key layout `backbone.*` and `lm_head.weight`, as in released text checkpoints."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(
        self,
        embeddings: Tensor,
        lengths: Tensor | None = None,
        cache: HybridCache | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states (B, T, hidden) of `embeddings` (B, T, hidden).

        `lengths` (B,) says how many tokens of each row are real, the rest being right padding; None means
        all. With a cache the tokens continue its sequences and the cache is advanced in place.

        `segment_ids` (B, T) packs several documents into a row: the document of every token, never falling along
        the row, -1 on right padding. No layer carries anything over a border. Raises ValueError where the ids
        cannot be honoured: with a cache, or when they are not of this form.
        """
        if cache is not None and self._recomputes():
            raise ValueError(
                "gradient checkpointing runs layers twice and would advance the cache twice; pass no cache"
            )
        valid = None
        if lengths is not None and (segment_ids is not None or int(lengths.min()) < embeddings.shape[1]):
            valid = torch.arange(embeddings.shape[1], device=embeddings.device) < lengths[:, None]
        segments = None
        if segment_ids is not None:
            if cache is not None:
                raise ValueError("segment_ids together with a cache: a cache continues one document in each row")
            segments = check_segments(segment_ids, embeddings.shape[:2], valid)
            valid = None if bool((segments >= 0).all()) else segments >= 0
            if not bool(((segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] >= 0)).any()):
                segments = None  # one document in every row
        if cache is not None:
            cache.reserve(embeddings.shape[1])
        hidden: Tensor = self.backbone(embeddings, valid, cache, segments)
        if cache is not None:
            cache.lengths = cache.lengths + (embeddings.shape[1] if lengths is None else lengths)
        return hidden

    def _recomputes(self) -> bool:
        return (
            self.training
            and torch.is_grad_enabled()
            and any(layer.gradient_checkpointing for layer in self.backbone.layers)
        )


def check_segments(segment_ids: Tensor, shape: torch.Size, valid: Tensor | None) -> Tensor:
    """`segment_ids` as int64, -1 wherever `valid` (B, T) is False. Raises ValueError, naming the place, unless they
    are integers of `shape` (B, T) that never fall along a row and are negative (-1) only as right padding."""
    if segment_ids.shape != shape:
        raise ValueError(f"segment_ids have shape {tuple(segment_ids.shape)}, the tokens {tuple(shape)}")
    if segment_ids.is_floating_point() or segment_ids.is_complex() or segment_ids.dtype == torch.bool:
        raise ValueError(f"segment_ids must be integers, one per token, not {segment_ids.dtype}")
    segments = segment_ids.long()
    if valid is not None:
        if bool((valid & (segments < 0)).any()):
            raise ValueError("segment_ids are -1 (padding) at tokens that `lengths` counts as real")
        segments = segments.masked_fill(~valid, -1)
    real = segments >= 0
    gap = (~real[:, :-1] & real[:, 1:]).nonzero()
    if len(gap):
        row, place = gap[0].tolist()
        raise ValueError(f"segment_ids of row {row}: a document after padding at {place + 1}; pad on the right")
    falls = (real[:, 1:] & (segments[:, 1:] < segments[:, :-1])).nonzero()
    if len(falls):
        row, place = falls[0].tolist()
        before, after = segments[row, place : place + 2].tolist()
        raise ValueError(
            f"segment_ids of row {row} fall from {before} to {after} at position {place + 1}: number the documents of "
            "a row in order, all tokens of one document next to each other"
        )
    return segments.masked_fill(~real, -1)
