"""Random weights under the released names: built and named by transformers' own classes, drawn from a seed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers import RadioConfig as ReferenceRadioConfig
from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config
from transformers.utils import logging

from holotron.model.tiny_checkpoints.configs import CLIP_MEAN, CLIP_STD, TOWERS, Values

Weights = dict[str, Tensor]


def released_weights(values: Values, seed: int, folder: Path) -> Weights:
    """The tensors (float32, but for integer buffers) of the release `values` describes, sorted by name.

    transformers writes its config.json and its weights into `folder`, which must be empty and may be deleted.
    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        model = _build(copy.deepcopy(values))
    draw = torch.Generator().manual_seed(seed)
    _randomise(model, draw)
    with _quiet():
        model.save_pretrained(folder)
    weights: Weights = load_file(folder / "model.safetensors")
    if values["model_type"] == "nemotron_h" and values.get("num_nextn_predict_layers"):
        weights |= _next_token_head(values, draw)
    if values["model_type"].startswith("NemotronH_"):
        # transformers gives RADIO layer scales and always an embedder for pairs of frames, and drops the conditioner
        for name, numbers in (("norm_mean", CLIP_MEAN), ("norm_std", CLIP_STD)):
            weights[f"vision_model.radio_model.input_conditioner.{name}"] = torch.tensor(numbers).view(3, 1, 1)
        weights = {key: value for key, value in weights.items() if ".layer_scale" not in key}
        if "sound_config" in values:
            weights |= _mel_filters(values["sound_config"], draw)
        else:
            weights = {key: value for key, value in weights.items() if ".video_embedder." not in key}
    return dict(sorted(weights.items()))


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for a file of a megabyte."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _build(values: Values) -> Any:
    kind = values["model_type"]
    if kind == "nemotron_h":
        return NemotronHForCausalLM(NemotronHConfig(**values))
    if kind == "qwen3_vl":
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**values))
    vision = values["vision_config"]
    args = vision.pop("args", None)
    if args is not None:
        vision |= next(tower.sizes() for tower in TOWERS.values() if tower.name == args["model"])
        names = len(args["teachers"])
        vision["num_cls_tokens"] = names
        vision["num_registers"] = args["register_multiple"] - names
        vision["summary_idxs"] = [i for i, teacher in enumerate(args["teachers"]) if teacher["use_summary"]]
    vision["video_temporal_patch_size"] = 2
    sound = values.get("sound_config")
    config = NemotronH_Omni_Reasoning_V3_Config(
        text_config=NemotronHConfig(**values["llm_config"]),
        vision_config=ReferenceRadioConfig(**vision),
        audio_config=sound and {"model_type": "parakeet_encoder", **sound},
        vision_hidden_size=values["vit_hidden_size"],
        projector_hidden_size=values["projector_hidden_size"],
        force_image_size=values["force_image_size"],
        image_token_id=values["img_context_token_id"],
    )
    return NemotronH_Omni_Reasoning_V3(config)


@torch.no_grad()
def _randomise(model: nn.Module, draw: torch.Generator) -> None:
    """Fills every parameter and float buffer that a mistake should show in, in the order of names."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name in sorted(tensors):
        _fill(name, tensors[name], draw)


def _fill(name: str, tensor: Tensor, draw: torch.Generator) -> None:
    """Unlike the defaults, yet sane: activations stay around 1 and time steps are small enough for a clamp to show."""
    last = name.rsplit(".", 1)[-1]
    if last == "A_log":
        tensor.uniform_(0, 2.7, generator=draw)
    elif last == "dt_bias":
        tensor.uniform_(-9, -1, generator=draw)
    elif last == "lambda1":
        tensor.fill_(1.0)
    elif last == "running_var":
        tensor.uniform_(0.5, 1.5, generator=draw)
    elif last in ("e_score_correction_bias", "bias", "running_mean"):
        tensor.normal_(0, 0.3, generator=draw)
    elif not name.endswith(_KEPT) and tensor.is_floating_point():
        if tensor.ndim == 1:
            tensor.normal_(1.0, 0.3, generator=draw)
        elif last in ("position_embedding", "cls_register_token") or "embed" in name.rsplit(".", 2)[-2]:
            tensor.normal_(0, 1.0 if tensor.ndim == 2 else 0.5, generator=draw)
        else:
            tensor.normal_(0, _fan_in(name, tensor) ** -0.5, generator=draw)


_KEPT = ("norm_mean", "norm_std", "inv_freq", "original_inv_freq")


def _fan_in(name: str, tensor: Tensor) -> int:
    """Inputs of one output. Experts are stacked (experts, out, in); everything else is (out, in, ...)."""
    return tensor.shape[-1] if ".experts." in name else tensor[0].numel()


def _next_token_head(values: Values, draw: torch.Generator) -> Weights:
    """`mtp.*`: an attention and an expert layer behind a fusion of embedding and hidden state."""
    hidden, latent = values["hidden_size"], values["moe_latent_size"]
    heads, kv_heads = (values[name] * values["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shared, ffn = values["moe_shared_expert_intermediate_size"], values["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {f"layers.0.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
    shapes |= {f"layers.1.{name}.weight": (hidden,) for name in ("norm", "final_layernorm")}
    shapes["layers.0.eh_proj.weight"] = (hidden, 2 * hidden)
    mixer = {"q_proj": (heads, hidden), "k_proj": (kv_heads, hidden), "v_proj": (kv_heads, hidden)}
    shapes |= {f"layers.0.mixer.{name}.weight": shape for name, shape in mixer.items()}
    shapes["layers.0.mixer.o_proj.weight"] = (hidden, heads)
    experts: dict[str, tuple[int, ...]] = {
        "gate.weight": (values["n_routed_experts"], hidden),
        "gate.e_score_correction_bias": (values["n_routed_experts"],),
        "fc1_latent_proj.weight": (latent, hidden),
        "fc2_latent_proj.weight": (hidden, latent),
        "shared_experts.up_proj.weight": (shared, hidden),
        "shared_experts.down_proj.weight": (hidden, shared),
    }
    for expert in range(values["n_routed_experts"]):
        experts[f"experts.{expert}.up_proj.weight"] = (ffn, latent)
        experts[f"experts.{expert}.down_proj.weight"] = (latent, ffn)
    shapes |= {f"layers.1.mixer.{name}": shape for name, shape in experts.items()}
    weights = {f"mtp.{name}": torch.empty(shape) for name, shape in sorted(shapes.items())}
    for name, tensor in weights.items():
        _fill(name, tensor, draw)
    return weights


def _mel_filters(sound: Values, draw: torch.Generator) -> Weights:
    """Buffers of the feature extractor, which a release stores beside the sound encoder."""
    prefix = "sound_encoder.encoder.feature_extractor.featurizer"
    return {
        f"{prefix}.fb": torch.rand(1, sound["num_mel_bins"], 257, generator=draw),
        f"{prefix}.window": torch.hann_window(400, periodic=False),
    }


# What stays in float32 in a 16-bit checkpoint: the recurrence and the router's correction lose too much otherwise.
_FULL = ("A_log", ".D", "dt_bias", "e_score_correction_bias")


def cast(weights: Weights, dtype: torch.dtype) -> Weights:
    """Floating-point tensors in `dtype`, but for the few that a release should keep in float32."""
    return {
        key: value if key.endswith(_FULL) or not value.is_floating_point() else value.to(dtype)
        for key, value in weights.items()
    }
