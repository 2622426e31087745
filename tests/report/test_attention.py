"""Attention pictures: what they say of shares and strong tokens, and that the hot place on the PNG is the hot box."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from holotron.model.attention_map import AttentionMap
from holotron.model.images import ProcessedImage
from holotron.report.attention import Panel, attention_panel, pointer_panel, shares, write_attention
from tests.model.screens import dynamic, native, noise, tiles

PROCESSORS: dict[str, Any] = {
    "tiles": tiles(size=128, patch_size=16, resize="uint8"),
    "dynamic": dynamic(patch_size=16, min_num_patches=32, max_num_patches=120, resize="uint8"),
    "native": native(multiple=32),
}


def looking(image: ProcessedImage, token: int, *more: ProcessedImage) -> AttentionMap:
    """Two layers with two heads: layer 3 looks at `token` of `image` with 0.6, at its others evenly with 0.1."""
    counts = [image.num_tokens, *(other.num_tokens for other in more)]
    mass = torch.full((2, 2, sum(counts) + 10), 0.0)
    mass[:, :, : counts[0]] = 0.1 / counts[0]
    mass[1, :, token] += 0.6
    mass[:, :, counts[0] : sum(counts)] = 0.05 / max(sum(counts[1:]), 1)
    mass[:, :, -10:] = ((1 - mass.sum(-1)) / 10)[..., None]
    places = torch.split(torch.arange(sum(counts)), counts)
    return AttentionMap((1, 3), mass, sum(counts) + 9, (image, *more), tuple(places))


def drawn(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"), dtype=np.float64)


def screen(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), "white")


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("size", [(300, 200), (160, 160), (150, 400), (1900, 1000)])
def test_the_reddest_place_on_the_picture_is_the_hot_tokens_box(
    kind: str, size: tuple[int, int], tmp_path: Path
) -> None:
    image = PROCESSORS[kind](noise(*size))
    token = random.randrange(image.num_tokens)
    print(f"token {token}")
    panel = attention_panel(looking(image, token), [3], "layer 3")
    pixels = drawn(write_attention(tmp_path / "a.png", screen(*size), [panel], "Task", "below"))
    red = pixels[..., 0] - pixels[..., 1:].mean(-1)
    x0, y0, x1, y1 = image.token_box(token)
    left, top, width, height = place_of_the_shot(pixels, size)
    box = (left + x0 / size[0] * width, top + y0 / size[1] * height,
           left + x1 / size[0] * width, top + y1 / size[1] * height)  # fmt: skip
    hot = red[top : top + height, left : left + width] > 100
    assert hot.any()
    ys, xs = np.nonzero(hot)
    inside = (xs + left >= box[0] - 4) & (xs + left <= box[2] + 4) & (ys + top >= box[1] - 4) & (ys + top <= box[3] + 4)
    assert inside.mean() > 0.98
    # and the whole box is hot, but for its outline and its number
    assert hot.sum() > 0.4 * (box[2] - box[0]) * (box[3] - box[1])


def place_of_the_shot(pixels: np.ndarray[Any, Any], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Left, top, width, height of the screenshot on a sheet with one panel: from the share bar right below it.

    The bar's first pixel is the screenshot's left edge, and its place and the margins are given in inches.
    """
    blue = np.all(np.abs(pixels - (0x3B, 0x8A, 0xC4)) < 3, axis=-1)
    rows = np.nonzero(blue.sum(1) > 0.4 * blue.sum(1).max())[0]
    top_of_bar, left = int(rows[0]), int(np.nonzero(blue[rows[0]])[0][0])
    aspect = size[0] / size[1]
    width = 6.4 * min(1, 0.9 * aspect)
    bottom = top_of_bar - 0.12 * 200
    return left, round(bottom - width / aspect * 200), round(width * 200), round(width / aspect * 200)


def test_shares_name_every_part() -> None:
    image, other = PROCESSORS["tiles"](noise(300, 200)), PROCESSORS["native"](noise(64, 64))
    across, down = image.tokens_per_tile
    thumbnail = image.num_tokens - across * down
    assert image.thumbnail
    seen = looking(image, thumbnail + 1, other)
    first = shares(seen, [3], 0)
    assert list(first) == ["tiles", "thumbnail", "other pictures", "text"]
    assert sum(first.values()) == pytest.approx(1, abs=1e-5)
    assert first["thumbnail"] == pytest.approx(0.6 + 0.1 * across * down / image.num_tokens, abs=1e-4)
    assert first["other pictures"] == pytest.approx(0.05, abs=1e-4)
    assert shares(seen, [1, 3], 0)["thumbnail"] == pytest.approx(first["thumbnail"] - 0.3, abs=1e-4)
    assert list(shares(looking(other, 0), [3])) == ["picture", "text"]


def test_the_strongest_come_first_and_what_has_nothing_is_left_out() -> None:
    boxes = torch.rand(6, 4)
    assert Panel("", boxes, torch.tensor([0.1, 0, 0.5, 0, 0.2, 0])).strongest() == [2, 4, 0]
    assert Panel("", boxes, torch.arange(6.0)).strongest(2) == [5, 4]


def test_panels_of_any_number_and_shape_fit_one_picture(tmp_path: Path) -> None:
    image = PROCESSORS["native"](noise(320, 180))
    seen = looking(image, 3)
    shot = screen(320, 180)
    sizes = []
    for count in (1, 2, 3, 8):
        panels = [attention_panel(seen, [3], f"layer {i}", point=(10, 20)) for i in range(count)]
        sizes.append(drawn(write_attention(tmp_path / "a.png", shot, panels, "Task", "below")).shape)
    assert all(0.4 < width / height < 3.5 for height, width, _ in sizes)
    with pytest.raises(ValueError, match="no panel"):
        write_attention(tmp_path / "b.png", shot, [], "Task", "below")
    assert not (tmp_path / "b.png").exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("task", ["", "$x^2$ \\frac", "点击 “确定” 🙂", "many words " * 200, "a" * 2000])
def test_a_task_is_drawn_as_written_whatever_it_says(task: str, tmp_path: Path) -> None:
    image = PROCESSORS["native"](noise(40, 30))
    panel = attention_panel(looking(image, 0), [1, 3], "both")
    pixels = drawn(write_attention(tmp_path / "deep" / "a.png", screen(40, 30), [panel], task, "below"))
    assert pixels.shape[1] < 3000 and pixels.shape[0] < 3000


def test_nothing_on_the_picture_is_no_failure(tmp_path: Path) -> None:
    image = PROCESSORS["native"](noise(40, 30))
    panel = Panel("nothing", image.token_boxes(), torch.zeros(image.num_tokens), {"picture": 0.0, "text": 1.0})
    write_attention(tmp_path / "a.png", screen(40, 30), [panel], "Task", "below")


def test_the_pointer_needs_a_head() -> None:
    with pytest.raises(ValueError, match="no grounding head"):
        pointer_panel(looking(PROCESSORS["native"](noise(40, 30)), 0), 2, "")
