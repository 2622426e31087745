"""Checkpoint folders and hub ids to models: config.json and *.safetensors, streamed tensor by tensor.

Nothing here runs code that comes with a checkpoint, and pickled weights are refused.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.dialects import read_config
from holotron.model.hub import read_json, resolve
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.processing import read_preprocessor
from holotron.model.radio import InputConditioner, RadioConfig

logger = logging.getLogger(__name__)

# Read in fp32 whatever the dtype of the rest: what they hold is exponentiated, summed or ranked.
KEPT_IN_FP32 = ("A_log", "D", "dt_bias", "gate.weight", "e_score_correction_bias")

# What a file may hold beyond the model, and why that is no loss. Nothing else may be left over.
SKIPPED = {
    r"(^|\.)mtp\.": "multi-token prediction head",
    r"\.video_embedder\.": "video patch embedding",
    r"^sound_(encoder|projection)\.": "audio",
}
# Must be there with this value if it is there at all: RADIO stores layer scales of one.
LAYER_SCALE = re.compile(r"\.layer_scale[12]\.lambda1$")
# What a file may lack: never applied, and known without it.
OPTIONAL = re.compile(r"\.(input_conditioner\.norm_(mean|std)|summary_idxs)$")
# Text checkpoints start at the language model; transformers calls its backbone `model` in memory.
RENAMES = (
    (re.compile(r"^(backbone|model)\."), "language_model.backbone."),
    (re.compile(r"^lm_head\."), "language_model.lm_head."),
    (re.compile(r"^language_model\.model\."), "language_model.backbone."),
)
_LISTED = 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is and what a file says about it."""

    file: Path
    key: str  # as in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, F16, I64, ...


@dataclass(slots=True)
class KeyReport:
    """How a checkpoint's tensors fit a config. `skipped` counts allowed extras by their reason."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = []
        for name in ("missing", "unexpected", "mismatched"):
            if keys := getattr(self, name):
                rest = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
                parts.append(f"{name}: {', '.join(keys[:_LISTED])}{rest}")
        return "; ".join(parts) or "all keys fit"


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder's safetensors files by the model's name for them, from the headers alone.

    Raises ConfigError where there are none, a shard of the index is missing or cut short, or a key is in two files.
    """
    found: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(str(file), framework="pt") as weights:
                for key in weights.keys():
                    header = weights.get_slice(key)
                    name = _rename(key)
                    if name in found:
                        raise ConfigError(f"{key} is in both {found[name].file.name} and {file.name} of {folder}")
                    found[name] = StoredTensor(file, key, tuple(header.get_shape()), str(header.get_dtype()))
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{file} is corrupt or cut short: {error}") from error
    return found


def _weight_files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors.index.json").is_file():
        index = read_json(folder, "model.safetensors.index.json").get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ConfigError(f"{folder}/model.safetensors.index.json has no weight_map")
        names = sorted({str(name) for name in index.values()})
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ConfigError(f"{folder} lacks {len(absent)} of {len(names)} shards: {', '.join(absent[:_LISTED])}")
        if outside := [name for name in names if Path(name).name != name]:
            raise ConfigError(f"{folder}/model.safetensors.index.json points outside the folder: {outside[0]}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in folder.glob(pattern)]
        more = f"; {pickles[0]} is a pickle, which may run code and is never read" if pickles else ""
        raise ConfigError(f"{folder} has no model.safetensors; the checkpoint is incomplete{more}")
    return files


def _rename(key: str) -> str:
    for pattern, ours in RENAMES:
        if pattern.match(key):
            return pattern.sub(ours, key, count=1)
    return key


def fit_to_weights(config: HolotronConfig, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Correct, in place, sizes that released configs leave open or state wrongly; says what was changed.

    These are the prefix tokens of the tower, the projector's width, the rows of the vocabulary and the length of
    `summary_idxs`; everything else that disagrees stays an error.
    """
    changed = []
    if config.vision_config is not None and config.vision_config.get("tower", "radio") == "radio":
        prefix = "vision_model."
        token = stored.get(f"{prefix}radio_model.model.patch_generator.cls_token.token")
        summaries = stored.get(f"{prefix}radio_model.summary_idxs")
        known = RadioConfig.from_dict(config.vision_config)
        vision = dict(config.vision_config)
        if token is not None and len(token.shape) == 2 and token.shape[0] != known.prefix_tokens:
            changed.append(f"prefix tokens {known.prefix_tokens} -> {token.shape[0]}")
            vision["prefix_tokens"] = token.shape[0]
        if summaries is not None and summaries.shape != (len(known.summary_idxs),):
            vision["summary_idxs"] = list(range(math.prod(summaries.shape)))
        config.vision_config = vision
    width = stored.get("mlp1.1.weight")
    if width is not None and width.shape[0] != config.projector_hidden_size:
        changed.append(f"projector_hidden_size {config.projector_hidden_size} -> {width.shape[0]}")
        config.projector_hidden_size = width.shape[0]
    rows = stored.get("language_model.backbone.embeddings.weight")
    if rows is not None and config.llm_config is not None and rows.shape[0] != config.llm_config["vocab_size"]:
        changed.append(f"vocab_size {config.llm_config['vocab_size']} -> {rows.shape[0]}")
        config.llm_config = {**config.llm_config, "vocab_size": rows.shape[0]}
    return changed


def compare_keys(wanted: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> KeyReport:
    """`wanted` is the state dict of the model as the config has it; the meta device will do."""
    report = KeyReport(missing=sorted(k for k in set(wanted) - set(stored) if not OPTIONAL.search(k)))
    for key in sorted(set(stored) - set(wanted)):
        reason = "layer scales of one" if LAYER_SCALE.search(key) else _reason_to_skip(key)
        if reason is None:
            report.unexpected.append(key)
        else:
            report.skipped[reason] = report.skipped.get(reason, 0) + 1
    for key in sorted(set(stored) & set(wanted)):
        if stored[key].shape != tuple(wanted[key].shape):
            has, needs = stored[key].shape, tuple(wanted[key].shape)
            report.mismatched.append(f"{key} is {has} in the file and {needs} by the config")
    return report


def _reason_to_skip(key: str) -> str | None:
    return next((reason for pattern, reason in SKIPPED.items() if re.search(pattern, key)), None)


def open_checkpoint(folder: Path) -> tuple[HolotronConfig, dict[str, StoredTensor], list[str]]:
    """Config and tensors of a folder, without reading a weight; the list says what the weights corrected."""
    values = read_json(folder, "config.json")
    released = values.get("model_type") != HolotronConfig.model_type
    try:
        config = read_config(values)
        if released and (folder / "preprocessor_config.json").is_file():
            read_preprocessor(config, read_json(folder, "preprocessor_config.json"))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json describes no model: {error}") from error
    stored = stored_tensors(folder)
    changed = fit_to_weights(config, stored) if released else []
    return config, stored, changed


def on_meta(config: HolotronConfig) -> HolotronForConditionalGeneration:
    """The model without memory: shapes, dtypes and keys only."""
    with torch.device("meta"):
        return HolotronForConditionalGeneration(config)


def load(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HolotronForConditionalGeneration:
    """A model in evaluation mode from a folder or a hub id, every weight accounted for.

    Floating-point weights become `dtype`, but for the few of `KEPT_IN_FP32`. Tensors are read one at a time
    into their place, so that memory holds the model and one tensor. `progress` is told bytes read and bytes in
    all. Raises ConfigError naming what is missing, unexpected, of another shape, or not a finite number.
    """
    folder = resolve(name, revision)
    config, stored, changed = open_checkpoint(folder)
    for change in changed:
        logger.info("%s: taken from the weights: %s", folder, change)
    try:
        model = on_meta(config)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}/config.json describes no model: {error!r}") from error
    report = compare_keys(model.state_dict(), stored)
    if not report.fits:
        raise ConfigError(f"the weights in {folder} do not fit its config: {report}")
    for reason, count in report.skipped.items():
        logger.info("%s: %d tensors skipped: %s", folder, count, reason)
    _materialise(model, dtype, torch.device(device))
    _fill(model, stored, progress)
    model.name_or_path = str(name)
    model.config.dtype = dtype
    torch.nn.Module.eval(model)
    return model


def kept_in_fp32(name: str) -> bool:
    return any(name == kept or name.endswith(f".{kept}") for kept in KEPT_IN_FP32)


def _materialise(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Memory for every parameter and buffer, uninitialised but for what a file may leave out."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                chosen = torch.float32 if kept_in_fp32(f"{prefix}.{name}") else dtype
                empty = torch.empty(parameter.shape, dtype=chosen, device=device)
                module._parameters[name] = torch.nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                kept = not buffer.is_floating_point() or kept_in_fp32(f"{prefix}.{name}")
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype if kept else dtype, device=device)
        if isinstance(module, InputConditioner):
            module.reset_buffers()


@torch.no_grad()
def _fill(
    model: HolotronForConditionalGeneration,
    stored: Mapping[str, StoredTensor],
    progress: Callable[[int, int], None] | None,
) -> None:
    places = model.state_dict()
    by_file: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        if name in places or LAYER_SCALE.search(name):
            by_file.setdefault(tensor.file, []).append(name)
    total = sum(file.stat().st_size for file in by_file)
    done = 0
    for file, names in by_file.items():
        with safe_open(str(file), framework="pt") as weights:
            for name in names:
                tensor = weights.get_tensor(stored[name].key)
                if name not in places:
                    if not bool((tensor == 1).all()):
                        raise ConfigError(f"{file}: {name} is not 1; scaled vision blocks are not supported")
                    continue
                if tensor.is_floating_point() and not _is_finite(tensor):
                    raise ConfigError(f"{file}: {name} holds values that are not finite numbers")
                places[name].copy_(tensor)
                done += tensor.numel() * tensor.element_size()
                if progress is not None:
                    progress(done, total)


def _is_finite(tensor: Tensor) -> bool:
    """By its extremes, which NaN and infinity both reach, so that no second tensor is made."""
    return tensor.numel() == 0 or all(math.isfinite(float(end)) for end in torch.aminmax(tensor))
