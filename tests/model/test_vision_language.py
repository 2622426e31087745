"""Image and text together against transformers' dense `nemotron_h_omni`, through files on disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import NemotronHConfig
from transformers import RadioConfig as ReferenceRadioConfig
from transformers.models.nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3,
    NemotronH_Omni_Reasoning_V3_Config,
)

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.images import TileConfig, TileProcessor
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.radio import RadioConfig
from tests.model.tiny import TINY, randomise, tokens

IMAGE = 5  # placeholder id
SIDE, PATCH, GRID = 32, 4, 8  # a tile of 32 x 32 pixels is 8 x 8 patches and 4 x 4 tokens


def reference(prefix_tokens: int = 8) -> NemotronH_Omni_Reasoning_V3:
    vision = ReferenceRadioConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        patch_size=PATCH,
        max_img_size=64,
        num_cls_tokens=3,
        num_registers=prefix_tokens - 3,
        video_temporal_patch_size=2,
    )
    config = NemotronH_Omni_Reasoning_V3_Config(
        text_config=NemotronHConfig(**TINY),
        vision_config=vision,
        audio_config=None,
        vision_hidden_size=32,
        projector_hidden_size=48,
        image_token_id=IMAGE,
    )
    model = NemotronH_Omni_Reasoning_V3(config).eval()
    randomise(model)
    lift_clamp(model)
    with torch.no_grad():
        for layer in model.vision_model.encoder.layer:
            layer.layer_scale1.lambda1.fill_(1.0)
            layer.layer_scale2.lambda1.fill_(1.0)
    return model


def lift_clamp(model: NemotronH_Omni_Reasoning_V3) -> None:
    """Trap 1: transformers clamps the time step in prefill though the config has no limit."""
    for layer in model.language_model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))


def prompt() -> Tensor:
    """Two sequences with the 16 placeholders of each of two one-tile images, in different places."""
    rows = []
    for lengths in ((3, 9, 2), (7, 1, 6)):
        image = torch.full((16,), IMAGE)
        first, second, last = (tokens(n) for n in lengths)
        text = [part.masked_fill(part == IMAGE, IMAGE + 1) for part in (first, second, last)]
        rows.append(torch.cat([text[0], image, text[1], image, text[2]]))
    return torch.stack(rows)


def reference_logits(model: NemotronH_Omni_Reasoning_V3, ids: Tensor, pixels: Tensor) -> Tensor:
    """Every tile its own image, patches flattened in the order c, y, x."""
    n = len(pixels)
    patches = pixels.view(n, 3, GRID, PATCH, GRID, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(n * GRID**2, -1)
    grid = torch.tensor([[GRID, GRID]] * n)
    out: Tensor = model(input_ids=ids, pixel_values=patches, image_grid_hw=grid, use_cache=False).logits
    return out


@pytest.mark.parametrize("prefix_tokens", [8, 10, 16])
@torch.no_grad()
def test_logits_equal_transformers(seed: int, tmp_path: Path, prefix_tokens: int) -> None:
    """Their files, config and weights, load as they are; allowed extras are skipped (traps 10 to 14, 19)."""
    theirs = reference(prefix_tokens)
    theirs.save_pretrained(tmp_path)
    ours = HolotronForConditionalGeneration.from_pretrained(tmp_path).eval()
    ids, pixels = prompt(), torch.randn(4, 3, SIDE, SIDE)
    expected = reference_logits(theirs, ids, pixels)
    found = ours(ids, pixel_values=pixels).logits
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < 1e-4
    # the pictures matter, and so does their order
    assert (ours(ids, pixel_values=pixels.flip(0)).logits - expected).abs().max() > 1e-2


@torch.no_grad()
def test_transformers_reads_what_we_write(seed: int, tmp_path: Path) -> None:
    """The reverse: our files hold exactly the released keys, and transformers reads the same model."""
    theirs = reference()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = HolotronForConditionalGeneration.from_pretrained(tmp_path / "theirs").eval()
    randomise(ours)
    ours.save_pretrained(tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    released = load_file(tmp_path / "theirs" / "model.safetensors")
    extras = {key for key in released if ".layer_scale" in key or ".video_embedder." in key}
    conditioner = {f"vision_model.radio_model.input_conditioner.norm_{name}" for name in ("mean", "std")}
    assert set(written) == set(released) - extras | conditioner
    assert {key: written[key].shape for key in set(released) - extras} == {
        key: released[key].shape for key in set(released) - extras
    }
    (tmp_path / "ours" / "config.json").write_text((tmp_path / "theirs" / "config.json").read_text())
    back = NemotronH_Omni_Reasoning_V3.from_pretrained(tmp_path / "ours").eval()
    lift_clamp(back)
    ids, pixels = prompt(), torch.randn(4, 3, SIDE, SIDE)
    expected = ours(ids, pixel_values=pixels).logits
    assert (reference_logits(back, ids, pixels) - expected).abs().max() < 1e-4


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """One of ours on disk; returns its weights."""
    reference().save_pretrained(folder)
    model = HolotronForConditionalGeneration.from_pretrained(folder)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def test_round_trip_is_exact(seed: int, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    first = HolotronForConditionalGeneration.from_pretrained(tmp_path / "a")
    first.save_pretrained(tmp_path / "b")
    second = HolotronForConditionalGeneration.from_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()
    assert first.state_dict().keys() == second.state_dict().keys()
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    assert HolotronConfig.from_pretrained(tmp_path / "b").language == first.config.language


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recurrence_parameters_stay_fp32(seed: int, tmp_path: Path, dtype: torch.dtype) -> None:
    """Trap 8."""
    weights = checkpoint(tmp_path)
    model = HolotronForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    for key, value in model.state_dict().items():
        if key.rsplit(".", 1)[-1] in ("A_log", "D", "dt_bias"):
            assert torch.equal(value, weights[key]), key
        elif value.is_floating_point():
            assert value.dtype == dtype, key


@pytest.mark.parametrize(
    "key",
    [
        "language_model.backbone.embeddings.weight",
        "language_model.backbone.layers.2.mixer.dt_bias",
        "language_model.lm_head.weight",
        "mlp1.1.weight",
        "vision_model.radio_model.model.blocks.1.attn.qkv.weight",
        "vision_model.radio_model.model.patch_generator.cls_token.token",
    ],
)
def test_missing_key_is_named(seed: int, tmp_path: Path, key: str) -> None:
    """Trap 19: nothing is silently initialised at random, or dropped."""
    weights = checkpoint(tmp_path)
    value = weights.pop(key)
    rewrite(tmp_path, weights)
    with pytest.raises(ConfigError, match=f"missing: {key}"):
        HolotronForConditionalGeneration.from_pretrained(tmp_path)
    rewrite(tmp_path, {**weights, key: value, f"{key}_too": value.clone()})
    with pytest.raises(ConfigError, match=f"unexpected: {key}_too"):
        HolotronForConditionalGeneration.from_pretrained(tmp_path)


@pytest.mark.parametrize("key", ["mlp1.1.weight", "vision_model.radio_model.model.patch_generator.cls_token.token"])
def test_wrong_shape_is_an_error(seed: int, tmp_path: Path, key: str) -> None:
    """Traps 11 and 14: the file decides, and a config that says otherwise is not obeyed in silence."""
    weights = checkpoint(tmp_path)
    rewrite(tmp_path, {**weights, key: weights[key][:-1].clone()})
    with pytest.raises(ConfigError, match=f"mismatched: {key} is"):
        HolotronForConditionalGeneration.from_pretrained(tmp_path)


def test_allowed_extras(seed: int, tmp_path: Path) -> None:
    """Trap 19: MTP heads and layer scales of one may be there, the conditioner may be absent."""
    weights = checkpoint(tmp_path)
    scale = "vision_model.radio_model.model.blocks.0.layer_scale1.lambda1"
    kept = {key: value for key, value in weights.items() if ".input_conditioner." not in key}
    rewrite(tmp_path, {**kept, scale: torch.ones(32), "mtp.layers.0.norm.weight": torch.ones(3)})
    model = HolotronForConditionalGeneration.from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key
    rewrite(tmp_path, {**weights, scale: torch.full((32,), 1.01)})
    with pytest.raises(ConfigError, match=scale):
        HolotronForConditionalGeneration.from_pretrained(tmp_path)


def small_model(**changes: Any) -> HolotronForConditionalGeneration:
    vision = asdict(RadioConfig(32, 1, 4, 64, PATCH, pos_grid=8, prefix_tokens=8))
    values = {"vision_config": vision, "projector_hidden_size": 48, "img_context_token_id": IMAGE, **changes}
    model = HolotronForConditionalGeneration(HolotronConfig(llm_config=TINY, **values)).eval()
    randomise(model)
    return model


@torch.no_grad()
def test_placeholders_equal_feature_rows(seed: int) -> None:
    """Trap 17: several pictures of different grids, counted per picture before any pixel is processed."""
    model = small_model()
    processor = TileProcessor(TileConfig((0.5, 0.5, 0.5), (0.2, 0.2, 0.2), size=SIDE, patch_size=PATCH))
    sizes = [(70, 40), (32, 32), (31, 90)]
    images = [processor(torch.randint(0, 256, (h, w, 3), dtype=torch.uint8).numpy()) for w, h in sizes]
    assert len({image.grid for image in images}) == 3
    features = []
    for image, size in zip(images, sizes, strict=True):
        rows = model.encode_images(image.pixel_values).tokens.flatten(0, 1)
        assert len(rows) == image.num_tokens == processor.num_tokens(*size)
        features.append(rows)
    ids = torch.full((1, sum(image.num_tokens for image in images)), IMAGE)
    pixels = torch.cat([image.pixel_values for image in images])
    embedded = model.embed(ids, torch.cat(features))
    assert torch.equal(embedded[0], torch.cat(features))
    assert model(ids, pixel_values=pixels).logits.shape == (1, ids.shape[1], TINY["vocab_size"])
    rows = len(embedded[0])
    with pytest.raises(ValueError, match=f"{rows - 1} image placeholders .* {rows} image features"):
        model(ids[:, 1:], pixel_values=pixels)


def test_other_shuffles_are_refused() -> None:
    """Trap 13."""
    with pytest.raises(ConfigError, match="ps_version 'v1'"):
        small_model(ps_version="v1")
