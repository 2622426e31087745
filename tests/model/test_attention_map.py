"""What a token attends to: against an eager recomputation, and from tokens back to the screen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holotron.engine.pointer import Pointer
from holotron.engine.sampling_params import SamplingParams
from holotron.model.attention_map import attention_map, capture, cell_boxes, spread
from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.images import ImageProcessor, ProcessedImage
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.model import tiny
from tests.model.screens import dynamic, native, noise, tiles

IMAGE = 90  # a token of the tiny vocabulary
PATTERN = "M-*M*-M"
CONV = {"tower": "conv", "channels": [4, 4, 8], "blocks": [1, 1]}
PROCESSORS: dict[str, ImageProcessor] = {
    "tiles": tiles(size=32, patch_size=8, max_num_tiles=6, resize="uint8"),
    "dynamic": dynamic(patch_size=8, min_num_patches=32, max_num_patches=96, resize="uint8"),
    "native": native(multiple=16),
}


def build(vision: bool = True, **changes: Any) -> HolotronForConditionalGeneration:
    grounding = changes.pop("grounding_config", None)
    config = HolotronConfig(
        llm_config={**tiny.TINY, "hybrid_override_pattern": PATTERN, **changes},
        vision_config=CONV if vision else None,
        projector_hidden_size=16,
        img_context_token_id=IMAGE,
        grounding_config=grounding,
    )
    model = HolotronForConditionalGeneration(config).eval()
    tiny.randomise(model)
    return model


def prompt(*images: ProcessedImage, text: int = 7) -> list[int]:
    ids: list[int] = torch.randint(0, IMAGE, (text,)).tolist()
    for image in images:
        ids += [IMAGE] * image.num_tokens + torch.randint(0, IMAGE, (text,)).tolist()
    return ids


def eager(model: HolotronForConditionalGeneration, ids: list[int], images: list[ProcessedImage]) -> Tensor:
    """All of every attention matrix, (layers, heads, T, T), from the layers' own inputs and in fp64."""
    tokens = torch.cat([model.encode_images(i.pixel_values).tokens.flatten(0, 1) for i in images])
    h, found = model.embed(torch.tensor([ids]), tokens), []
    for layer, kind in zip(model.language_model.backbone.layers, PATTERN, strict=True):
        if kind == "*":
            mixer: Any = layer.mixer
            u = layer.norm(h)[0].double()
            q, k = (u @ proj.weight.double().T for proj in (mixer.q_proj, mixer.k_proj))
            heads = []
            for head in range(4):
                group = head // 2
                a, b = q[:, head * 16 : head * 16 + 16], k[:, group * 16 : group * 16 + 16]
                scores = (a @ b.T / math.sqrt(16)).masked_fill(~torch.ones(len(ids), len(ids)).tril().bool(), -math.inf)
                heads.append(scores.softmax(-1))
            found.append(torch.stack(heads))
        h = layer(h, None, None, None)
    return torch.stack(found)


@pytest.mark.parametrize("kind", PROCESSORS)
@torch.no_grad()
def test_masses_equal_an_eager_recomputation(kind: str, seed: int) -> None:
    model = build()
    images = [PROCESSORS[kind](noise(90, 70)), PROCESSORS[kind](noise(50, 100))]
    ids = prompt(*images)
    whole = eager(model, ids, images)
    for query in (-1, len(ids) - 5, 3):
        seen = attention_map(model, ids, images, query)
        assert seen.layers == (2, 4) and seen.query == query % len(ids)
        torch.testing.assert_close(seen.mass.double(), whole[:, :, query], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(seen.mass.sum(-1), torch.ones(2, 4))
        on = [float(seen.heat(i, layers=[2]).sum()) for i in range(2)]
        assert sum(on) + seen.text_mass([2]) == pytest.approx(1, abs=1e-5)
    early = attention_map(model, ids, images, 3)
    assert float(early.on_image(0).abs().max()) == 0.0  # nothing attends to what comes later
    assert early.text_mass() == pytest.approx(1, abs=1e-5)


@torch.no_grad()
def test_parts_of_the_map(seed: int) -> None:
    model = build()
    first, second = PROCESSORS["tiles"](noise(90, 70)), PROCESSORS["native"](noise(40, 40))
    ids = prompt(first, second)
    seen = attention_map(model, ids, [first, second])
    assert [ids[i] for i in seen.places[1]] == [IMAGE] * second.num_tokens
    assert seen.places[0].tolist() == list(range(7, 7 + first.num_tokens))
    torch.testing.assert_close(seen.on_image(0), seen.mass[:, :, 7 : 7 + first.num_tokens])
    torch.testing.assert_close(seen.heat(1), seen.mass[1][:, seen.places[1]].mean(0))
    torch.testing.assert_close(seen.heat(1, [2, 4]), seen.mass[:, :, seen.places[1]].mean((0, 1)))
    for layers in ([3], [2, 7], []):
        with pytest.raises(ValueError, match="2, 4"):
            seen.heat(layers=layers)


@torch.no_grad()
def test_outputs_do_not_change_and_nothing_is_left_behind(seed: int) -> None:
    model = build()
    ids = torch.tensor([prompt()])
    before = model(ids).logits
    with pytest.raises(ZeroDivisionError), capture(model, 2):
        watched = model(ids).logits
        _ = 1 / 0
    assert torch.equal(watched, before) and torch.equal(model(ids).logits, before)
    assert not any(module._forward_hooks for module in model.modules())
    image = PROCESSORS["native"](noise(40, 40))
    attention_map(model, prompt(image), [image])
    assert torch.equal(model(ids).logits, before)


def test_text_alone_has_a_map(seed: int) -> None:
    seen = attention_map(build(vision=False), prompt(), [])
    assert seen.text_mass() == pytest.approx(1, abs=1e-5) and not seen.places and seen.pointer is None


def test_what_cannot_be_looked_at_is_named(seed: int) -> None:
    image = PROCESSORS["native"](noise(40, 40))
    with pytest.raises(ConfigError, match=r"'M-M' has no attention layer"):
        attention_map(build(hybrid_override_pattern="M-M"), prompt(image), [image])
    with pytest.raises(ConfigError, match="no vision tower"):
        attention_map(build(vision=False), prompt(image), [image])
    with pytest.raises(ValueError, match="18 image placeholders in the prompt, 9 image features"):
        attention_map(build(), prompt(image, image), [image])
    for query in (7, -8):
        with pytest.raises(ValueError, match=f"{query} is outside the prompt of 7 tokens"):
            attention_map(build(), prompt(), [], query)


def look_at(model: HolotronForConditionalGeneration, token: int) -> None:
    """Make every head attend to `token`: keys see one channel alone, which is large in that token's embedding.

    The language model is one attention layer, so that the channel reaches it untouched.
    """
    backbone: Any = model.language_model.backbone
    mixer = backbone.layers[0].mixer
    with torch.no_grad():
        for weight in (mixer.q_proj.weight, mixer.k_proj.weight):
            weight.zero_()
        mixer.k_proj.weight[:, 0] = 10
        mixer.q_proj.weight[:, 1] = 10
        backbone.embeddings.weight[:, 0] = 0
        backbone.embeddings.weight[:, 1] = 8
    encode = model.encode_images

    def marked(pixel_values: Tensor) -> Any:
        found = encode(pixel_values)
        flat = found.tokens.flatten(0, 1)
        flat[:, 0] = 0
        flat[token, 0] = 8 * flat[token].norm()
        return found

    model.encode_images = marked  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("where", [0.0, 0.4, 0.97])
def test_the_hottest_place_is_the_one_that_is_looked_at(kind: str, where: float, seed: int) -> None:
    """Also in the thumbnail: 0.97 lies in it for tiles."""
    model = build(hybrid_override_pattern="*")
    image = PROCESSORS[kind](noise(100, 60))
    token = int(where * image.num_tokens)
    look_at(model, token)
    seen = attention_map(model, prompt(image), [image])
    assert int(seen.heat().argmax()) == token and float(seen.heat()[token]) > 0.9
    heat = spread(image.token_boxes(), seen.heat(), (image.width, image.height), (200, 120))
    y, x = (int(v) for v in np.unravel_index(int(heat.argmax()), heat.shape))
    x0, y0, x1, y1 = (2 * v for v in image.token_box(token))
    assert x0 - 1 <= x + 0.5 <= x1 + 1 and y0 - 1 <= y + 0.5 <= y1 + 1
    inside = heat[round(y0) : round(y1), round(x0) : round(x1)]
    assert float(inside.sum()) > 0.7 * float(heat.sum())


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("raster", [(100, 60), (37, 41), (250, 90)])
def test_spreading_keeps_the_mass(kind: str, raster: tuple[int, int], seed: int) -> None:
    image = PROCESSORS[kind](noise(100, 60))
    mass = torch.rand(image.num_tokens)
    heat = spread(image.token_boxes(), mass, (100, 60), raster)
    assert heat.shape == (raster[1], raster[0])
    assert float(heat.sum()) == pytest.approx(float(mass.sum()), rel=1e-6)
    even = spread(image.token_boxes(), mass.new_tensor(areas(image.token_boxes())), (100, 60), raster)
    assert float(even.max() / even.min()) == pytest.approx(1, rel=1e-5)  # mass by area is the same everywhere


def areas(boxes: Tensor) -> list[float]:
    return [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in boxes.tolist()]


def test_spreading_by_hand() -> None:
    boxes = torch.tensor([[0, 0, 3, 2], [0, 0, 6, 2], [6, 0, 6, 2]], dtype=torch.float64)
    heat = spread(boxes, torch.tensor([0.6, 0.3, 9.0]), (6, 2), (3, 1))
    # the first box covers one raster pixel and a half; the empty box is nowhere
    torch.testing.assert_close(heat, torch.tensor([[0.4 + 0.1, 0.2 + 0.1, 0.1]], dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["native", "tiles"])
@pytest.mark.parametrize("size", [(100, 60), (101, 58), (44, 45)])
def test_the_pointer_is_the_engines(kind: str, size: tuple[int, int], seed: int) -> None:
    """Same cell, same share, same place; padding is never pointed at."""
    model = build(grounding_config={"size": 16, "cells": 2})
    model.config.coordinate_tokens = {"x": 0, "y": 1001}
    image = PROCESSORS[kind](noise(*size))
    ids = prompt(image)
    seen = attention_map(model, ids, [image])
    encoded = model.encode_images(image.pixel_values)
    hidden = model.language_model(model.embed(torch.tensor([ids]), encoded.tokens.flatten(0, 1)))[0]
    engine = Pointer.build(model, encoded, hidden[7 : 7 + image.num_tokens], image)
    choice = engine.choose(hidden[-1], None, SamplingParams(), torch.Generator())
    assert seen.pointer is not None and choice is not None
    assert float(seen.pointer.sum()) == pytest.approx(1, abs=1e-5)
    assert float(seen.pointer.max()) == pytest.approx(choice.probability, rel=1e-4)
    boxes = cell_boxes(image, 2)
    assert len(boxes) == len(seen.pointer)
    x0, y0, x1, y1 = boxes[int(seen.pointer.argmax())].tolist()
    assert x0 <= choice.x * image.width / 1000 + 0.1 and choice.x * image.width / 1000 - 0.1 <= x1
    assert y0 <= choice.y * image.height / 1000 + 0.1 and choice.y * image.height / 1000 - 0.1 <= y1
    assert not seen.pointer[torch.tensor(areas(boxes)) <= 0].any()
