"""Reads a checkpoint folder: config.json, *.safetensors, tokenizer files. Never runs code from it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from holotron.engine.errors import ModelLoadError
from holotron.model.checkpoint import load
from holotron.model.config import ConfigError
from holotron.model.hub import read_json, resolve
from holotron.model.images import ImageProcessor
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.processing import processor_of
from holotron.model.special_ids import SpecialIds
from holotron.model.tokenizer import load_tokenizer as read_tokenizer


def find_folder(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint, or of the local copy of a hub id. Raises ModelLoadError."""
    try:
        return resolve(name, revision)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> HolotronForConditionalGeneration:
    """`holotron.model.checkpoint.load`, for callers that know only the engine's errors. Raises ModelLoadError."""
    try:
        return load(folder, dtype=dtype, device=device)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Raises ModelLoadError."""
    try:
        return read_tokenizer(folder)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error


def special_ids(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path | None = None
) -> SpecialIds:
    """The ids that the tokenizer and the configs agree on; `folder` may add a generation_config.json.

    A config without an image placeholder's id gets the tokenizer's. Raises ModelLoadError.
    """
    generation = None
    try:
        if folder is not None and (folder / "generation_config.json").is_file():
            generation = read_json(folder, "generation_config.json")
        values = model.config.to_dict()
        if model.vision_model is None:  # the names of image tokens are defaults then, and nobody stated them
            values = {key: value for key, value in values.items() if not key.startswith("img_")}
        found = SpecialIds.resolve(tokenizer, values, generation)
    except ConfigError as error:
        raise ModelLoadError(str(error) if folder is None else f"{folder}: {error}") from error
    if model.config.img_context_token_id is None:
        model.config.img_context_token_id = found.image
    return found


def build_image_processor(model: HolotronForConditionalGeneration) -> ImageProcessor | None:
    """What the config says about images; None without a vision tower. Raises ModelLoadError."""
    try:
        return processor_of(model.config)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
