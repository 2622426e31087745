"""Reads a checkpoint folder: config.json, *.safetensors, tokenizer files. Never runs code from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from holotron.engine.errors import ModelLoadError
from holotron.model.config import HolotronConfig
from holotron.model.images import ImageProcessor, image_processor
from holotron.model.modeling import HolotronForConditionalGeneration

_MOST_NAMES_SHOWN = 3


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> HolotronForConditionalGeneration:
    """The model in evaluation mode, weights converted to `dtype`. Raises ModelLoadError."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder with config.json and weights")
    values = _read_json(folder, "config.json")
    if values.get("model_type") != HolotronConfig.model_type:
        kind = values.get("model_type")
        raise ModelLoadError(f"{folder}/config.json has model_type {kind!r}, not {HolotronConfig.model_type!r}")
    try:
        model = HolotronForConditionalGeneration(HolotronConfig.from_dict(values))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{folder}/config.json describes no model: {error!r}") from error
    _load_weights(model, folder)
    torch.nn.Module.to(model, dtype)
    torch.nn.Module.eval(model)
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Raises ModelLoadError."""
    _read_json(folder, "tokenizer.json")
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return tokenizer
    except Exception as error:  # the tokenizers library raises bare Exception for what it cannot read
        raise ModelLoadError(f"{folder}/tokenizer.json cannot be used: {error}") from error


def build_image_processor(model: HolotronForConditionalGeneration) -> ImageProcessor | None:
    """What the config says about images; None without a vision tower. Raises ModelLoadError."""
    config = model.config
    if model.vision_model is None:
        return None
    values: dict[str, Any] = {
        "kind": config.image_processor,
        "norm_mean": config.norm_mean,
        "norm_std": config.norm_std,
    }
    if config.norm_mean is None or config.norm_std is None:
        raise ModelLoadError("config.json has a vision tower but no norm_mean and norm_std for its images")
    if config.image_processor == "native":
        values["multiple"] = round(model.vision_model.patch_size / config.downsample_ratio)
    else:
        values |= {
            "size": config.force_image_size,
            "max_num_tiles": config.max_num_tiles,
            "use_thumbnail": config.use_thumbnail,
            "patch_size": config.patch_size,
            "downsample_ratio": config.downsample_ratio,
            "resize": config.image_resize,
        }
    try:
        return image_processor(values)
    except ValueError as error:
        raise ModelLoadError(f"config.json: {error}") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / name).read_text("utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{folder} has no {name}; the checkpoint is incomplete") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder}/{name} is unreadable: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{folder}/{name} is unreadable: not a JSON object")
    return values


def _load_weights(model: HolotronForConditionalGeneration, folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no model.safetensors; the checkpoint is incomplete")
    wanted = model.state_dict()
    missing = set(wanted)
    for file in files:
        try:
            tensors: dict[str, Tensor] = load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(f"{file} is corrupt or cut short: {error}") from error
        unknown = sorted(set(tensors) - set(wanted))
        if unknown:
            raise ModelLoadError(f"{file} has tensors that config.json has no place for: {_names(unknown)}")
        for name, tensor in tensors.items():
            if tensor.shape != wanted[name].shape:
                raise ModelLoadError(
                    f"{file}: {name} is {list(tensor.shape)}, config.json asks for {list(wanted[name].shape)}"
                )
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ModelLoadError(f"{file}: {name} holds values that are not finite numbers")
        model.load_state_dict(tensors, strict=False)
        missing -= set(tensors)
    if missing:
        raise ModelLoadError(f"{folder}: the safetensors files lack {_names(sorted(missing))}")


def _names(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES_SHOWN
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
