"""What `holotron inspect` finds out about a model: its sizes, what its files hold, and what nobody has verified.

Weights are never read: sizes come from the config, files are judged by the headers of their tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from holotron.model.checkpoint import KeyReport, StoredTensor, compare_keys, fit_to_weights, stored_tensors
from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.hub import read_json, resolve
from holotron.model.presets import PRESETS, find_preset
from holotron.model.processing import read_preprocessor
from holotron.model.screens import Screen, measure_screens
from holotron.model.sizes import Sizes, expected_tensors, measure, read_any_config

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}  # all others take one


@dataclass(frozen=True, slots=True)
class Files:
    """What a folder holds: bytes by file name, and bytes of tensors by dtype."""

    folder: Path
    sizes: Mapping[str, int]
    tensor_bytes: Mapping[str, int]


@dataclass(slots=True)
class Inspection:
    """All findings. `fit` is None where there are no weights to compare with the config."""

    name: str
    kind: str  # preset, folder or hub
    description: str
    architecture: str
    sizes: Sizes
    screens: list[Screen]
    source: str = ""
    contract: str | None = None
    template: str | None = None  # the file that holds it
    files: Files | None = None
    fit: KeyReport | None = None
    unverified: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.fit is None or self.fit.fits


def inspect(name: str, revision: str | None = None) -> Inspection:
    """Everything about a preset, a checkpoint folder or a hub id (its small files are downloaded).

    Raises ConfigError for a name that is none of these, for a config that describes no model, and for weights that
    are corrupt or incomplete. Weights that do not fit the config are a finding, not an error.
    """
    is_folder = Path(name).expanduser().exists()
    if revision is not None and (is_folder or name in PRESETS):
        raise ConfigError(f"a revision only goes with a hub id; {name} is a {'folder' if is_folder else 'preset'}")
    if name in PRESETS:
        return _inspect_preset(name)
    if not is_folder and "/" not in name:
        raise ConfigError(
            f"{name!r} is neither a checkpoint folder nor a hub id (organisation/name) nor a preset; presets: "
            f"{', '.join(PRESETS)}"
        )
    folder = resolve(name, revision, weights=False)
    config, expected, stored, notes = _open(folder, needs_weights=is_folder)
    found = Inspection(
        name=name,
        kind="folder" if is_folder else "hub",
        description="",
        architecture=_architecture(read_json(folder, "config.json")),
        sizes=measure(config, expected),
        screens=measure_screens(config, _optional_json(folder, "preprocessor_config.json")),
        source=str(folder.resolve()) if is_folder else f"{name} @ {folder.name}",
        unverified=notes,
    )
    _compare_weights(found, folder, expected, stored)
    _read_side_files(found, folder, config)
    return found


def _inspect_preset(name: str) -> Inspection:
    preset = find_preset(name)
    config = read_any_config(preset.values)
    return Inspection(
        name=name,
        kind="preset",
        description=preset.description,
        architecture=_architecture(preset.values),
        sizes=measure(config),
        screens=measure_screens(config),
        source=f"{preset.source} ({preset.licence})",
        unverified=list(preset.inferred),
    )


def _open(
    folder: Path, needs_weights: bool
) -> tuple[PretrainedConfig, dict[str, Tensor], dict[str, StoredTensor], list[str]]:
    """Config, tensors it asks for, tensors the files have, and what preprocessor and weights corrected, as in loading.

    Of a hub id the weights are not downloaded; then no tensors are found, which for a folder is an error.
    """
    values = read_json(folder, "config.json")
    released = values.get("model_type") != HolotronConfig.model_type
    notes, stored = [], {}
    try:
        config = read_any_config(values)
        if needs_weights or any(folder.glob("*.safetensors")):
            stored = stored_tensors(folder)
        if not isinstance(config, HolotronConfig):
            stored = {tensor.key: tensor for tensor in stored.values()}  # without the hybrid's renaming
        elif released:
            read_preprocessor(config, _optional_json(folder, "preprocessor_config.json"))
            changes = fit_to_weights(config, stored)
            notes = [f"{change}: the weights' value, not the config's" for change in changes]
        return config, expected_tensors(config), stored, notes
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}/config.json describes no model: {error!r}") from error


def _architecture(values: Mapping[str, Any]) -> str:
    labels = values.get("architectures")
    label = labels[0] if isinstance(labels, list) and labels else values.get("model_type", "no label")
    return str(label)


def _compare_weights(
    found: Inspection, folder: Path, expected: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> None:
    """Fills in `files` and `fit`."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    found.files = Files(folder, files, _bytes_by_dtype(stored))
    if not stored:
        found.unverified.append("the weights: they were not downloaded, so nothing was compared with the config")
        return
    found.fit = compare_keys(expected, stored)
    skipped = found.fit.skipped.items()
    found.unverified += [f"{why}: {count} tensor(s) recognised and skipped" for why, count in skipped]
    found.unverified.append("the values of the weights: only the headers of the files were read")


def _bytes_by_dtype(stored: Mapping[str, StoredTensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in stored.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 1)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _read_side_files(found: Inspection, folder: Path, config: PretrainedConfig) -> None:
    """Fills in contract and template, and checks the tokenizer against the config."""
    if found.screens and isinstance(config, HolotronConfig) and config.norm_mean is None:
        found.unverified.append("norm_mean, norm_std: neither config.json nor preprocessor_config.json has them")
    found.contract = _optional_json(folder, "agent.json").get("contract")
    found.template = next((name for name in _TEMPLATES if _holds_template(folder / name)), None)
    if found.contract is None:
        found.unverified.append("the contract: there is no agent.json that names one")
    if found.template is None:
        found.unverified.append("the chat template: the folder has none, so the one of this package is used")
    if isinstance(config, HolotronConfig):
        found.unverified += _check_tokenizer(folder, config)


def _holds_template(path: Path) -> bool:
    if path.suffix == ".jinja":
        return path.is_file()
    return bool(_optional_json(path.parent, path.name).get("chat_template"))


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder, name) if (folder / name).is_file() else {}


def _check_tokenizer(folder: Path, config: HolotronConfig) -> list[str]:
    """What does not agree between tokenizer.json and the config, in words."""
    if not (folder / "tokenizer.json").is_file():
        return ["the token ids: there is no tokenizer.json to check them against"]
    values = read_json(folder, "tokenizer.json")
    model = values.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(pieces) if isinstance(pieces, dict) else {}
    ids |= {token["content"]: token["id"] for token in values.get("added_tokens") or []}
    rows, doubts = config.language.vocab_size, []
    if ids and max(ids.values()) >= rows:
        doubts.append(f"vocab_size {rows}: the tokenizer has ids up to {max(ids.values())}")
    image, expected = ids.get(config.img_context_token), config.img_context_token_id
    if config.vision_config is not None and image != expected:
        doubts.append(f"img_context_token_id {expected}: the tokenizer gives {config.img_context_token} the id {image}")
    return doubts


def as_values(found: Inspection, baseline: Inspection | None) -> dict[str, Any]:
    """The findings as one JSON object."""
    sizes = found.sizes
    screens = {screen.name: screen.tokens for screen in found.screens}
    values: dict[str, Any] = {
        "name": found.name,
        "kind": found.kind,
        "description": found.description,
        "architecture": found.architecture,
        "source": found.source,
        "layers": sizes.layers,
        "layer_counts": sizes.layer_counts,
        "parameters": sizes.parameters,
        "parameters_by_part": dict(sizes.parts),
        "active_parameters": sizes.active_parameters,
        "weight_bytes_bf16": sizes.weight_bytes_bf16,
        "parameters_kept_fp32": sizes.kept_fp32,
        "kv_bytes_per_token": sizes.kv_bytes_per_token,
        "state_bytes_per_sequence": sizes.state_bytes_fp32,
        "state_bytes_per_sequence_16bit": sizes.state_bytes_16bit,
        "vllm_block_tokens": sizes.vllm_block_tokens(),
        "vllm_block_tokens_16bit": sizes.vllm_block_tokens(16),
        "tokens_1280x720": screens.get("1280x720"),
        "tokens_1920x1080": screens.get("1920x1080"),
        "screens": [asdict(screen) for screen in found.screens],
        "baseline": None,
        "contract": found.contract,
        "chat_template": found.template,
        "files": None,
        "keys": None if found.fit is None else {**asdict(found.fit), "fits": found.fit.fits},
        "unverified": found.unverified,
    }
    if baseline is not None:
        values["baseline"] = {
            "name": baseline.name,
            "kv_bytes_per_token": baseline.sizes.kv_bytes_per_token,
            "state_bytes_per_sequence": baseline.sizes.state_bytes_fp32,
            "break_even_tokens": sizes.break_even(baseline.sizes),
            "break_even_tokens_16bit": sizes.break_even(baseline.sizes, 16),
        }
    if found.files is not None:
        values["files"] = {
            "folder": str(found.files.folder),
            "bytes": dict(found.files.sizes),
            "tensor_bytes": dict(found.files.tensor_bytes),
        }
    return values


def as_json(found: Inspection, baseline: Inspection | None) -> str:
    return json.dumps(as_values(found, baseline), indent=2)
