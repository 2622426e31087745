"""The RADIO tower against transformers' own, through the released key names, and its numeric traps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import RadioConfig as ReferenceConfig
from transformers import RadioModel as ReferenceModel

from holotron.model.radio import RadioConfig, RadioTower


def reference(prefix_tokens: int) -> ReferenceModel:
    model = ReferenceModel(
        ReferenceConfig(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            mlp_ratio=3.0,
            patch_size=4,
            max_img_size=32,
            num_cls_tokens=3,
            num_registers=prefix_tokens - 3,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for layer in model.encoder.layer:
            layer.layer_scale1.lambda1.fill_(1.0)
            layer.layer_scale2.lambda1.fill_(1.0)
    # The image processor normalises; the conditioner must not do it again.
    model.make_preprocessor_external()
    return model


def released_weights(model: ReferenceModel, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers writes to disk: the released key names, plus layer scales fixed at one."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    return {key: value for key, value in weights.items() if "layer_scale" not in key}


def ours(weights: dict[str, torch.Tensor], **sizes: int) -> RadioTower:
    shapes = {key: tuple(value.shape) for key, value in weights.items()}
    tower = RadioTower(RadioConfig(hidden=48, **sizes).with_shapes(shapes)).eval()
    missing, unexpected = tower.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {
        "radio_model.input_conditioner.norm_mean",
        "radio_model.input_conditioner.norm_std",
    }
    return tower


@pytest.mark.parametrize("prefix_tokens", [8, 10, 16])
@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 6), (6, 4), (3, 11), (1, 1), (12, 5)])
@torch.no_grad()
def test_equals_transformers(seed: int, tmp_path: Path, prefix_tokens: int, rows: int, columns: int) -> None:
    """Traps 10 and 11: any R, square and oblong grids, smaller and larger than the stored 8 x 8 positions."""
    model = reference(prefix_tokens)
    tower = ours(released_weights(model, tmp_path), heads=4)
    assert tower.radio_model.config.prefix_tokens == prefix_tokens
    assert (tower.out_features, tower.patch_size) == (48, 4)
    pixels = torch.randn(2, 3, rows * 4, columns * 4)
    expected = model(pixels).features
    features = tower(pixels)
    assert features.shape == (2, rows * columns, 48)
    # Weights of this size give features around 10, so the bound is relative to them.
    scale = expected.abs().max().clamp(min=1)
    assert ((features - expected).abs().max() / scale).item() < 1e-5


@torch.no_grad()
def test_corner_alignment_matters(seed: int) -> None:
    """Trap 10: the usual slip gives other positions by far more than the tolerance of the test above."""
    generator = RadioTower(RadioConfig(48, 1, 4, 96, 4, 8, 8)).radio_model.model.patch_generator
    generator.pos_embed.normal_()
    grid = generator.pos_embed.view(1, 8, 8, 48).permute(0, 3, 1, 2)
    right = F.interpolate(grid, size=(6, 6), mode="bilinear", align_corners=False)[:, :, :4]
    wrong = F.interpolate(grid, size=(6, 6), mode="bilinear", align_corners=True)[:, :, :4]
    found = generator.position_embedding(4, 6)
    assert torch.equal(found, right.flatten(2).transpose(1, 2))
    assert (found - wrong.flatten(2).transpose(1, 2)).abs().max() > 0.1


@torch.no_grad()
def test_position_embedding_is_interpolated_in_float32(seed: int) -> None:
    generator = RadioTower(RadioConfig(48, 1, 4, 96, 4, 8, 8)).radio_model.model.patch_generator
    generator.pos_embed.normal_()
    generator.to(torch.bfloat16)
    wide = F.interpolate(
        generator.pos_embed.view(1, 8, 8, 48).permute(0, 3, 1, 2).float(), size=(5, 5), mode="bilinear"
    )
    found = generator.position_embedding(3, 5)
    assert torch.equal(found, wide[:, :, :3].bfloat16().flatten(2).transpose(1, 2))


@torch.no_grad()
def test_patch_order_on_an_oblong_grid() -> None:
    """Trap 13: one bright pixel, placed by row, column and channel, lands in the right patch and position."""
    generator = RadioTower(RadioConfig(48, 1, 4, 96, 4, 8, 8)).radio_model.model.patch_generator
    for row, column, channel, y, x in [(0, 5, 0, 1, 2), (2, 1, 2, 3, 0), (1, 4, 1, 0, 3)]:
        pixels = torch.zeros(1, 3, 3 * 4, 6 * 4)
        pixels[0, channel, row * 4 + y, column * 4 + x] = 1
        patches = generator.patches(pixels)
        assert patches.nonzero().tolist() == [[0, row * 6 + column, channel * 16 + y * 4 + x]]


@torch.no_grad()
def test_conditioner_is_never_applied(seed: int) -> None:
    """Trap 12: the stored statistics change nothing, however wrong they are."""
    tower = RadioTower(RadioConfig(48, 2, 4, 96, 4, 8, 8)).eval()
    pixels = torch.randn(1, 3, 16, 24)
    before = tower(pixels)
    tower.radio_model.input_conditioner.norm_mean.fill_(9.0)
    tower.radio_model.input_conditioner.norm_std.fill_(0.1)
    assert torch.equal(tower(pixels), before)


@torch.no_grad()
def test_images_of_a_batch_do_not_mix(seed: int) -> None:
    tower = RadioTower(RadioConfig(48, 2, 4, 96, 4, 8, 8)).eval()
    pixels = torch.randn(3, 3, 16, 24)
    together = tower(pixels)
    for i in range(3):
        torch.testing.assert_close(tower(pixels[i : i + 1])[0], together[i], atol=1e-6, rtol=1e-5)


def test_released_keys() -> None:
    """Exactly the names of the released checkpoints below `vision_model.`, with RADIO-H shapes."""
    with torch.device("meta"):
        state = RadioTower(RadioConfig(prefix_tokens=16)).state_dict()
    expected = {
        "input_conditioner.norm_mean": (3, 1, 1),
        "input_conditioner.norm_std": (3, 1, 1),
        "summary_idxs": (2,),
        "model.patch_generator.embedder.weight": (1280, 768),
        "model.patch_generator.pos_embed": (1, 16384, 1280),
        "model.patch_generator.cls_token.token": (16, 1280),
    }
    for i in range(32):
        block = f"model.blocks.{i}."
        for norm in ("norm1", "norm2"):
            expected |= {f"{block}{norm}.weight": (1280,), f"{block}{norm}.bias": (1280,)}
        for linear, rows, columns in [
            ("attn.qkv", 3840, 1280),
            ("attn.proj", 1280, 1280),
            ("mlp.fc1", 5120, 1280),
            ("mlp.fc2", 1280, 5120),
        ]:
            expected |= {f"{block}{linear}.weight": (rows, columns), f"{block}{linear}.bias": (rows,)}
    found = {key: tuple(value.shape) for key, value in state.items()}
    assert found == {f"radio_model.{key}": shape for key, shape in expected.items()}
    assert RadioConfig(1, 1, 1, 1).with_shapes(found) == RadioConfig(heads=1)


def test_config_dialects() -> None:
    theirs = ReferenceConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=6, num_registers=5)
    assert RadioConfig.from_dict(theirs.to_dict()) == RadioConfig(96, 2, 6, 384, 16, 128, 8)
    small = RadioConfig(48, 2, 4, 96, 4, 8, 10, summary_idxs=(0, 1, 2))
    assert RadioConfig.from_dict({**asdict(small), "summary_idxs": [0, 1, 2]}) == small
    assert RadioConfig.from_dict({"architectures": ["RADIOModel"], "args": {}}) == RadioConfig()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"use_swiglu_ffn": True}, "use_swiglu_ffn"),
        ({"layerscale_value": 0.1}, "layerscale_value"),
        ({"hidden": 50, "heads": 4}, "heads"),
        ({"depth": 0}, "depth"),
    ],
)
def test_config_errors_name_the_field(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RadioConfig.from_dict(values)


def test_missing_key_is_named(tmp_path: Path) -> None:
    """Trap 19."""
    weights = released_weights(reference(8), tmp_path)
    shapes = {key: tuple(value.shape) for key, value in weights.items()}
    del shapes["radio_model.model.patch_generator.cls_token.token"]
    with pytest.raises(ValueError, match="radio_model.model.patch_generator.cls_token.token"):
        RadioConfig().with_shapes(shapes)


@pytest.mark.parametrize("shape", [(1, 3, 15, 16), (1, 3, 16, 17), (1, 1, 16, 16), (1, 3, 0, 16)])
def test_bad_pixel_shapes(shape: tuple[int, ...]) -> None:
    tower = RadioTower(RadioConfig(48, 1, 4, 96, 4, 8, 8))
    with pytest.raises(ValueError, match="patch size 4"):
        tower(torch.zeros(shape))
