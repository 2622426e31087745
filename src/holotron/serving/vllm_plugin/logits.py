"""Vocabularies are padded: the rows of the output layer that no token has must never be chosen."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def known_tokens(model_config: Any) -> int | None:
    """How many ids the checkpoint's tokenizer knows, from vLLM's ModelConfig; None where it is told to use none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    if model_config.skip_tokenizer_init:
        return None
    return len(cached_tokenizer_from_config(model_config))


def only_tokens(logits: Tensor | None, known: int | None) -> Tensor | None:
    """`logits` (n, rows), in place, minus infinity from id `known` on; None on ranks that make no logits."""
    if logits is not None and known is not None:
        logits[..., known:] = -float("inf")
    return logits
