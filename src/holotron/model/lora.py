"""LoRA adapters (Hu et al., arXiv 2106.09685) on the language model, through peft.

Mamba's `out_proj` may be adapted here because our forward always calls the module; kernels that read
`out_proj.weight` themselves would pass by the adapter without a word. `save_lora` writes that down beside the adapter.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from holotron.model.config import LAYER_KINDS
from holotron.model.modeling import HolotronForConditionalGeneration

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "in_proj", "out_proj")
LAYERS = r"language_model\.backbone\.layers\.\d+\.mixer\."
METADATA = "holotron_adapter.json"


def add_lora(
    model: HolotronForConditionalGeneration,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] = TARGETS,
    dropout: float = 0.0,
) -> PeftModel:
    """`model` with trainable low-rank adapters of scale alpha / rank; everything else is frozen.

    A target that is a plain name stands for all linear layers of that name inside the language model's mixers, those
    of shared experts included. Any other target is a regular expression matched against the whole module name, which
    may also name other parts: `vision_model\\..*`, `mlp1\\.[13]`, `language_model\\.lm_head`. Only linear layers and
    embeddings can be adapted. The convolution cannot: its weight is read, not called. Routed experts cannot either:
    they are fused 3-D parameters, not layers, and a warning says so if the model has any.

    Raises ValueError for a target that matches nothing, with what could match.
    """
    if not targets or rank < 1:
        raise ValueError(f"LoRA needs at least one target and a rank of 1 or more, not {list(targets)} and {rank}")
    candidates = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    chosen: set[str] = set()
    for target in targets:
        pattern = expand(target)
        matched = {name for name in candidates if re.fullmatch(pattern, name)}
        if not matched:
            raise ValueError(f"LoRA target {target!r} matches no linear layer; {what_could(candidates)}")
        chosen |= matched
    if any(re.fullmatch(r".*\.experts", name) for name, _ in model.named_modules()):
        warnings.warn("routed experts are fused parameters and get no LoRA adapter", stacklevel=2)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft only divides by the rank
        lora_dropout=dropout,
        target_modules=sorted(chosen),
    )
    adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    return adapted


def expand(target: str) -> str:
    """The regular expression, for whole module names, that a target stands for. Raises ValueError if it is none."""
    if re.fullmatch(r"\w+", target):
        return rf"{LAYERS}(?:\w+\.)*{target}"
    try:
        re.compile(target)
    except re.error as error:
        raise ValueError(f"LoRA target {target!r} is neither a name nor a regular expression: {error}") from None
    return target


def what_could(candidates: Sequence[str]) -> str:
    """A sentence naming the plain names and, layer numbers left out, the modules that patterns can match."""
    inside = sorted({name.rsplit(".", 1)[-1] for name in candidates if re.match(LAYERS, name)})
    outside = sorted({re.sub(r"\b\d+\b", "N", name) for name in candidates if not re.match(LAYERS, name)})
    return f"names that match: {', '.join(inside)}; by pattern: {', '.join(outside)}"


def lora_coverage(model: PeftModel) -> dict[str, tuple[int, int]]:
    """For each kind of layer that the language model has: how many have an adapter, and how many there are."""
    base: Any = model.get_base_model()
    pattern = base.config.language.hybrid_override_pattern
    found: dict[str, tuple[int, int]] = {}
    for kind, layer in zip(pattern, base.language_model.backbone.layers, strict=True):
        adapted, total = found.get(LAYER_KINDS[kind], (0, 0))
        has = any("lora_" in name for name, _ in layer.named_parameters())
        found[LAYER_KINDS[kind]] = (adapted + has, total + 1)
    return found


def save_lora(model: PeftModel, folder: Path | str) -> None:
    """peft's adapter files, and `holotron_adapter.json` with what they adapt."""
    folder = Path(folder)
    model.save_pretrained(str(folder))
    modules = sorted(
        {name.split(".lora_")[0] for name, _ in model.get_base_model().named_parameters() if ".lora_" in name}
    )
    values: dict[str, Any] = {
        "modules": modules,
        "layers": {kind: {"adapted": some, "of": total} for kind, (some, total) in lora_coverage(model).items()},
        "adapts_mamba_out_proj": any(name.endswith("mixer.out_proj") for name in modules),
        "routed_experts_adapted": False,
    }
    if values["adapts_mamba_out_proj"]:
        values["note"] = "Merge before use with kernels that read out_proj.weight: they would pass by its adapter."
    (folder / METADATA).write_text(json.dumps(values, indent=2) + "\n")


def load_lora(model: HolotronForConditionalGeneration, folder: Path | str, trainable: bool = False) -> PeftModel:
    """`model` with the adapter that `save_lora` wrote. Raises ValueError where it does not fit the model."""
    stored = json.loads((Path(folder) / METADATA).read_text())
    missing = sorted(set(stored["modules"]) - {name for name, _ in model.named_modules()})
    if missing:
        raise ValueError(f"the adapter in {folder} adapts modules that this model lacks: {', '.join(missing[:8])}")
    return PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
