"""Reads a checkpoint folder: config.json, *.safetensors, tokenizer files. Never runs code from it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from holotron.engine.errors import ModelLoadError
from holotron.model.checkpoint import load
from holotron.model.config import ConfigError
from holotron.model.hub import read_json
from holotron.model.images import ImageProcessor
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.processing import processor_of


def load_model(
    name: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> HolotronForConditionalGeneration:
    """`holotron.model.checkpoint.load`, for callers that know only the engine's errors. Raises ModelLoadError."""
    try:
        return load(name, dtype=dtype, device=device, revision=revision)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Raises ModelLoadError."""
    try:
        read_json(folder, "tokenizer.json")
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return tokenizer
    except Exception as error:  # the tokenizers library raises bare Exception for what it cannot read
        raise ModelLoadError(f"{folder}/tokenizer.json cannot be used: {error}") from error


def build_image_processor(model: HolotronForConditionalGeneration) -> ImageProcessor | None:
    """What the config says about images; None without a vision tower. Raises ModelLoadError."""
    try:
        return processor_of(model.config)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
