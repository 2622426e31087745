"""Tiny checkpoints in the released formats: every member of the family, offline, from a seed.

A tiny checkpoint has the keys, config dialect, tokenizer, chat template and processor files of a release, and
random weights that make mistakes visible. It carries no code, so `auto_map` is left out.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from holotron.model.config import ConfigError
from holotron.model.tiny_checkpoints import configs
from holotron.model.tiny_checkpoints.configs import TOWERS, Tower, Values
from holotron.model.tiny_checkpoints.vocabulary import OMNI_V3, QWEN3, TEXT_V2, TEXT_V3, VL_V2, Vocabulary
from holotron.model.tiny_checkpoints.weights import cast, released_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WHOLE = 5_000_000_000  # bytes: everything in one file
_SHARD = 400_000


@dataclass(frozen=True, slots=True)
class _Family:
    description: str
    words: Vocabulary
    config: Callable[[Tower | None], Values]
    tower: bool = False  # whether it has a RADIO tower, whose size can be chosen
    shard_bytes: int = _WHOLE


_KNOWN = {
    "nemotron-h": _Family("dense text model like Nemotron Nano 9B v2 and 12B v2", TEXT_V2, configs.dense_text),
    "nemotron-h-moe": _Family(
        "mixture-of-experts text model like Nemotron 3 Nano", TEXT_V3, configs.moe_text, shard_bytes=_SHARD
    ),
    "nemotron-h-latent": _Family(
        "latent mixture-of-experts text model like Nemotron 3 Super, with its next-token head",
        TEXT_V3, configs.latent_text, shard_bytes=_SHARD,
    ),
    "vl-v2": _Family("tiled vision-language model like Holotron-12B", VL_V2, configs.tiled, tower=True),
    "omni": _Family(
        "mixture-of-experts model with images at their own resolution and a sound encoder, like Nemotron 3 Nano Omni",
        OMNI_V3, configs.omni, tower=True, shard_bytes=_SHARD,
    ),
    "omni-dense": _Family(
        "transformers' nemotron_h_omni with a dense language model, to compare the image path with",
        OMNI_V3, configs.omni_dense, tower=True,
    ),
    "holo2": _Family("attention baseline like Holo2-8B (Qwen3-VL)", QWEN3, configs.attention_baseline),
}  # fmt: skip

FAMILIES: dict[str, str] = {name: family.description for name, family in _KNOWN.items()}


def make_tiny(
    family: str,
    out: Path,
    seed: int = 0,
    overwrite: bool = False,
    *,
    dtype: str = "float32",
    tower: str = "tiny",
    max_shard_size: int | None = None,
) -> Path:
    """Writes a checkpoint of `family` (a key of FAMILIES) into the folder `out` and returns it.

    The same arguments give the same bytes. `dtype` is that of the stored weights, but for the recurrence's
    parameters and the router's correction, which stay float32. `tower` is "tiny" or "vit_small", the smallest
    RADIO other programs know (85 MB in float32). `max_shard_size` is in bytes; None means one file for some
    families, and several with an index for others. An existing checkpoint is replaced only with `overwrite`;
    until the new one is complete nothing is touched.

    Raises ConfigError for an unknown family, dtype or tower, and where `out` is in the way.
    """
    known, wanted = _choose(family, tower)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; dtypes: {', '.join(DTYPES)}")
    out = Path(out)
    _check_place(out, overwrite)
    values = known.config(wanted)
    with _replacing(out) as folder:
        weights = cast(released_weights(values, seed, folder / "raw"), DTYPES[dtype])
        written = json.loads((folder / "raw" / "config.json").read_text())
        shutil.rmtree(folder / "raw")
        shards = known.shard_bytes if max_shard_size is None else max_shard_size
        save_torch_state_dict(weights, folder, filename_pattern="model{suffix}.safetensors", max_shard_size=shards)
        config = written if values["model_type"] == "nemotron_h_omni" else values
        _write_json(folder / "config.json", _state_dtype(config, dtype))
        for name, content in _companions(values, known.words).items():
            _write_json(folder / name, content)
        known.words.tokenizer(_chat_template(known.words)).save_pretrained(folder)
        for file in folder.glob("*.safetensors"):  # written for the owner alone
            file.chmod((folder / "config.json").stat().st_mode)
    return out


def _choose(family: str, tower: str) -> tuple[_Family, Tower | None]:
    if family not in _KNOWN:
        raise ConfigError(f"family {family!r} is unknown; families: {', '.join(_KNOWN)}")
    if tower not in TOWERS:
        raise ConfigError(f"tower {tower!r} is unknown; towers: {', '.join(TOWERS)}")
    known = _KNOWN[family]
    if not known.tower and tower != "tiny":
        raise ConfigError(f"family {family!r} has no RADIO tower to choose; leave out tower {tower!r}")
    return known, TOWERS[tower] if known.tower else None


def _state_dtype(config: Values, dtype: str) -> Values:
    """Each part of the config says what its weights are stored in, under the name its dialect has for that."""
    name = "dtype" if "dtype" in config else "torch_dtype"
    parts = {key: {**part, name: dtype} for key, part in config.items() if key.endswith("_config") and part}
    return {**config, **parts, name: dtype}


def _chat_template(words: Vocabulary) -> str:
    text = resources.files("holotron.model").joinpath("templates", words.template).read_text()
    if words is QWEN3:  # the same turns, but another spelling of a picture
        return text.replace("'<' ~ part.type ~ '>'", "'<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>'")
    if words is VL_V2:  # released: the text model thinks unless told not to, this one the other way round
        return "{%- set default_thinking = false -%}\n" + text
    return text


def _companions(values: Values, words: Vocabulary) -> dict[str, Values]:
    """The files beside config.json, tokenizer and weights."""
    stops = ["</s>", words.eos] if words.bos else [words.eos, "<|endoftext|>"]
    generation: Values = {"eos_token_id": [words.id(stop) for stop in stops], "pad_token_id": 0}
    if words.bos:
        generation |= {"_from_model_config": True, "bos_token_id": words.id(words.bos)}
    else:
        generation["pad_token_id"] = words.id("<|endoftext|>")
    files = {"generation_config.json": generation}
    images = _image_processor(values)
    if images:
        files["preprocessor_config.json"] = images
    return files


def _image_processor(values: Values) -> Values:
    if values["model_type"] == "qwen3_vl":
        return {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_size": 2,
            "patch_size": configs.PATCH,
            "size": {"longest_edge": 256 * 256, "shortest_edge": 32 * 32},
            "temporal_patch_size": 2,
        }
    if "vision_config" not in values:
        return {}
    read: dict[str, Any] = {
        "norm_mean": configs.CLIP_MEAN,
        "norm_std": configs.CLIP_STD,
        "patch_size": configs.PATCH,
        "downsample_ratio": 0.5,
    }
    if values["model_type"] == "NemotronH_Nano_VL_V2":
        tiles = {"image_size": configs.TILE, "max_num_tiles": 12, "use_thumbnail": True}
        return {"image_processor_type": "NemotronNanoVLV2ImageProcessor", **read, **tiles}
    limits = {"min_num_patches": configs.LEAST_PATCHES, "max_num_patches": configs.MOST_PATCHES}
    return {"image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor", **read, **limits}


def _write_json(path: Path, content: Values) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")  # infinity as Infinity, like the releases


def _check_place(out: Path, overwrite: bool) -> None:
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise ConfigError(f"{out} exists and is no folder; choose another place")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{out} is not empty; choose another folder or ask to overwrite it")
    if not (out / "config.json").exists():
        raise ConfigError(f"{out} holds something other than a checkpoint (no config.json); it is not overwritten")


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place when the block ends well, and vanishes when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    fresh, old = (out.with_name(f".{out.name}.{kind}-{mark}") for kind in ("new", "old"))
    fresh.mkdir()
    try:
        yield fresh
        if out.exists():
            out.rename(old)
        try:
            fresh.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
