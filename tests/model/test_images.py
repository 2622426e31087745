"""What all image processors have in common: the tokens of known screens, statistics, and reading a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holotron.model.config import ConfigError
from holotron.model.images import (
    DynamicConfig,
    DynamicProcessor,
    NativeConfig,
    NativeProcessor,
    TileConfig,
    TileProcessor,
    image_processor,
    qwen_tokens,
    tile_grid,
)
from tests.model.screens import MEAN, SCREENS, STD, dynamic, native, noise, tiles
from tests.oracles.transformers_rules import from_transformers

WHITE = (1.9303361, 2.0748837, 2.1458970)  # (1 - mean) / std, by hand
BLACK = (-1.7922626, -1.7520971, -1.4802198)  # -mean / std
TEAL = (-1.7922626, 0.1689067, 2.1458970)  # 0, 128, 255
STATS: dict[str, Any] = {"norm_mean": list(MEAN), "norm_std": list(STD)}


@pytest.mark.parametrize(("width", "height", "grid", "tokens", "scale", "qwen", "omni"), SCREENS)
def test_tokens_per_screenshot(
    width: int,
    height: int,
    grid: tuple[int, int],
    tokens: int,
    scale: tuple[float, float],
    qwen: int,
    omni: int,
) -> None:
    """The whole table of screens; counts equal the pixels that are really sent (trap 17)."""
    assert tile_grid(width, height, 12) == grid
    assert tiles().num_tokens(width, height) == tokens
    assert dynamic().num_tokens(width, height) == omni
    assert qwen_tokens(width, height) == qwen
    screenshot = np.zeros((height, width, 3), np.uint8)
    image = tiles(resize="uint8")(screenshot)
    assert (image.grid, image.num_tokens, len(image.pixel_values) * 256) == (grid, tokens, tokens)
    assert image.scale == pytest.approx(scale, abs=0.00501)
    whole = dynamic(resize="uint8")(screenshot)
    high, wide = whole.pixel_values.shape[-2:]
    assert whole.num_tokens == omni == high * wide // 32**2
    assert whole.scale == (wide / width, high / height)


@given(st.integers(1, 20_000), st.integers(1, 20_000))
@settings(max_examples=200, deadline=None)
@example(17, 5)
@example(3000, 15)  # a side that rounds to nothing is grown back
def test_qwen_tokens_equal_transformers(width: int, height: int) -> None:
    smart_resize = from_transformers("qwen2_vl/image_processing_qwen2_vl.py", "smart_resize")
    if max(width, height) > 200 * min(width, height):
        assert qwen_tokens(width, height) >= 1
        return
    high, wide = smart_resize(height, width, factor=32, min_pixels=65_536, max_pixels=16_777_216)
    assert qwen_tokens(width, height) * 32 * 32 == high * wide


@pytest.mark.parametrize(("colour", "expected"), [((255, 255, 255), WHITE), ((0, 0, 0), BLACK), ((0, 128, 255), TEAL)])
def test_constant_colour(colour: tuple[int, int, int], expected: tuple[float, ...]) -> None:
    """Trap 12: golden values after normalisation, whatever the processor and the resize."""
    picture = np.full((90, 140, 3), colour, np.uint8)
    small = {"patch_size": 2, "min_num_patches": 64}
    for processor in (
        tiles(size=64, patch_size=4),
        tiles(size=64, patch_size=4, resize="uint8"),
        dynamic(**small),
        dynamic(resize="uint8", **small),
        native(multiple=2),
    ):
        values = processor(picture).pixel_values
        want = torch.tensor(expected).view(1, 3, 1, 1).expand_as(values)
        torch.testing.assert_close(values, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("width", "height"), [(160, 210), (161, 209), (1, 1), (15, 33)])
def test_native_keeps_every_pixel(seed: int, width: int, height: int) -> None:
    picture = noise(width, height)
    processor = native(pad_value=-3.0)
    image = processor(picture)
    columns, rows = -(-width // 16), -(-height // 16)
    assert image.pixel_values.shape == (1, 3, rows * 16, columns * 16)
    assert (image.canvas_width, image.canvas_height) == (columns * 16, rows * 16)
    assert image.num_tokens == columns * rows == processor.num_tokens(width, height)
    assert image.tokens_per_tile == (columns, rows)
    want = (picture / 255 - np.array(MEAN)) / np.array(STD)
    got = image.pixel_values[0].permute(1, 2, 0).double().numpy()
    np.testing.assert_allclose(got[:height, :width], want, atol=1e-5)
    assert (got[height:] == -3).all() and (got[:, width:] == -3).all()
    boxes = image.token_boxes().tolist()
    for row in range(rows):
        for column in range(columns):
            box = [column * 16, row * 16, min(column * 16 + 16, width), min(row * 16 + 16, height)]
            assert boxes[row * columns + column] == box


RELEASED_TILES = {
    **STATS,
    "auto_map": {"AutoImageProcessor": "image_processing.Remote"},
    "image_processor_type": "Remote",
    "processor_class": "Remote",
    "image_size": 512,
    "max_num_tiles": 6,
    "use_thumbnail": False,
    "patch_size": 16,
    "downsample_ratio": 0.5,
    "torch_dtype": "bfloat16",
    "do_rescale": True,
    "rescale_factor": 0.00392156862745098,
    "do_resize": True,
    "resample": 3,
    "do_convert_rgb": True,
    "crop_size": None,
}
RELEASED_OMNI = {
    "auto_map": {"AutoVideoProcessor": "video_processing.Remote"},
    "image_processor_type": "Remote",
    "patch_size": 16,
    "downsample_ratio": 0.5,
    **STATS,
    "min_num_patches": 512,
    "max_num_patches": 13312,
    "max_model_len": 16384,
    "_downsample_factor": 2,
}


def test_released_configs() -> None:
    made = image_processor(RELEASED_TILES)
    assert isinstance(made, TileProcessor)
    assert made.config == TileConfig(MEAN, STD, max_num_tiles=6, use_thumbnail=False)
    omni = image_processor(RELEASED_OMNI)
    assert isinstance(omni, DynamicProcessor)
    assert omni.config == DynamicConfig(MEAN, STD, min_num_patches=512)
    named = {"image_mean": MEAN, "image_std": STD, "kind": "dynamic", "do_normalize": True, "resize": "uint8"}
    again = image_processor(named)
    assert isinstance(again, DynamicProcessor) and again.config == DynamicConfig(MEAN, STD, resize="uint8")
    small = image_processor({**STATS, "kind": "native", "multiple": 8, "pad_value": -1})
    assert isinstance(small, NativeProcessor) and small.config == NativeConfig(MEAN, STD, 8, -1)
    assert TileConfig.from_dict({**STATS, "size": {"height": 448, "width": 448}, "patch_size": 14}).size == 448
    both = {**STATS, "image_mean": MEAN, "image_size": 256, "force_image_size": 256}
    assert TileConfig.from_dict(both).size == 256


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm_mean": MEAN}, "norm_std"),
        ({}, "norm_mean, norm_std"),
        ({"image_std": STD, "norm_mean": None}, "norm_mean"),
        ({**STATS, "max_tiles": 3}, "max_tiles = 3"),
        ({**STATS, "resize": "lanczos"}, "lanczos"),
        ({**STATS, "kind": "other"}, "other"),
        ({**STATS, "size": 500}, "500"),
        ({**STATS, "size": {"height": 512, "width": 256}}, "size must be square"),
        ({**STATS, "size": {"shortest_edge": 512}}, "size must be of type int"),
        ({**STATS, "norm_std": (0.0, 1.0, 1.0)}, "positive"),
        ({**STATS, "norm_std": (1.0, 1.0)}, "three numbers"),
        ({**STATS, "norm_std": "0.5"}, "norm_std must be a list of numbers"),
        ({**STATS, "norm_std": ["0.5"] * 3}, "norm_std must be a list of numbers"),
        ({**STATS, "image_mean": (0.5, 0.5, 0.5)}, "norm_mean is .* but image_mean is"),
        ({**STATS, "image_size": 512, "force_image_size": 448}, "image_size is 512, but force_image_size is 448"),
        ({**STATS, "max_num_tiles": "12"}, "max_num_tiles must be of type int"),
        ({**STATS, "max_num_tiles": True}, "max_num_tiles must be of type int"),
        ({**STATS, "use_thumbnail": 1}, "use_thumbnail must be of type bool"),
        ({**STATS, "kind": "native", "multiple": 0}, "multiple"),
        ({**STATS, "kind": "native", "resample": 3}, "resample = 3"),
        ({**STATS, "kind": "native", "max_num_tiles": 3}, "max_num_tiles"),
        ({**STATS, "do_normalize": False}, "do_normalize = False"),
        ({**STATS, "do_rescale": False}, "do_rescale"),
        ({**STATS, "do_resize": False}, "do_resize"),
        ({**STATS, "do_convert_rgb": False}, "do_convert_rgb"),
        ({**STATS, "do_center_crop": True}, "do_center_crop"),
        ({**STATS, "rescale_factor": 1 / 127.5}, "rescale_factor"),
        ({**STATS, "resample": 2}, "resample = 2"),
        ({**STATS, "max_num_patches": 4096}, "max_num_patches = 4096"),
        ({**RELEASED_OMNI, "max_num_tiles": 12}, "max_num_tiles = 12"),
        ({**RELEASED_OMNI, "image_size": 512}, "image_size = 512"),
        ({**RELEASED_OMNI, "max_model_len": 3000}, "max_model_len = 3000"),
        ({**RELEASED_OMNI, "_downsample_factor": 4}, "_downsample_factor"),
        ({**RELEASED_OMNI, "max_num_patches": 0}, "max_num_patches 0"),
    ],
)
def test_unclear_configs_are_errors(values: Mapping[str, Any], message: str) -> None:
    """Trap 12: statistics are never guessed; nothing that may change a pixel is silently dropped."""
    with pytest.raises(ConfigError, match=message):
        image_processor(values)
