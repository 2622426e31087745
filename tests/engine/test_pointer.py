from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from holotron.engine import LLM, Pointed, RequestOutput, SamplingParams, StructuredOutputs
from holotron.engine.pointer import cell_centres
from holotron.model.images import NativeConfig, NativeProcessor, TileConfig, TileProcessor
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.engine.tiny import picture, tiny_model

HALF = (0.5, 0.5, 0.5)
NATIVE = NativeProcessor(NativeConfig(HALF, HALF))
# the reply starts right at the coordinates, as `{"e":"a","x":1,"y":2}` does after its forced beginning
POINT = {
    "type": "object",
    "properties": {
        "e": {"const": "a"},
        "x": {"type": "integer", "minimum": 0, "maximum": 1000},
        "y": {"type": "integer", "minimum": 0, "maximum": 1000},
    },
    "required": ["e", "x", "y"],
    "additionalProperties": False,
}


def leaning(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> HolotronForConditionalGeneration:
    """A model that prefers some x token to a lone comma: every x row of the output weights is made large."""
    model = tiny_model(tokenizer, seed=seed)
    first = model.config.coordinate_tokens["x"]
    with torch.no_grad():
        model.language_model.lm_head.weight[first : first + 1001].mul_(8.0)
    return model


def ask(llm: LLM, *sizes: tuple[int, int], schema: dict[str, Any] = POINT, **params: Any) -> RequestOutput:
    given = {
        "prompt": "<img><image></img>" * len(sizes) + "where?",
        "multi_modal_data": {"image": [picture(w, h) for w, h in sizes]},
    }
    wanted = StructuredOutputs(json=schema)
    return llm.generate([given], SamplingParams(max_tokens=60, structured_outputs=wanted, **params))[0]


@torch.inference_mode()
def slow_point(model: HolotronForConditionalGeneration, llm: LLM, output: RequestOutput, sizes: Any) -> Pointed:
    """The head's choice from one full forward pass, cell by cell."""
    ids = output.prompt_token_ids
    reply = output.outputs[0].token_ids
    first = model.config.coordinate_tokens["x"]
    at = next(i for i, token in enumerate(reply) if first <= token < first + 1001)
    images = [NATIVE(picture(w, h)) for w, h in sizes]
    encoded = [model.encode_images(image.pixel_values) for image in images]
    tokens = torch.cat([e.tokens[0] for e in encoded])
    hidden = model.language_model(model.embed(torch.tensor([ids + reply[:at]]), tokens))[0]
    places = [i for i, token in enumerate(ids) if token == model.config.img_context_token_id]
    above = hidden[places[-images[-1].num_tokens :]]
    head = model.grounding_head
    assert head is not None
    keys = head.keys(encoded[-1].features, above[None], encoded[-1].columns)
    scores = head.scores(hidden[-1].view(1, 1, -1), keys).flatten().tolist()
    width, height = sizes[-1]
    columns = encoded[-1].columns * 2
    cells = []
    for i, score in enumerate(scores):
        x, y = i % columns * 8 + 4, i // columns * 8 + 4
        if x < width and y < height:
            cells.append((score, round(1000 * x / width), round(1000 * y / height)))
    score, x, y = max(cells)
    return Pointed(x, y, float(torch.tensor([c[0] for c in cells]).softmax(-1).max()))


@pytest.mark.parametrize("sizes", [[(48, 32)], [(50, 41)], [(16, 16), (64, 33)], [(64, 33), (16, 40)]])
def test_the_head_points_into_the_newest_image(sizes: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    model = leaning(tokenizer)
    for skip in (True, False):
        llm = LLM(model, tokenizer, skip_forced_tokens=skip)
        output = ask(llm, *sizes)
        (found,) = output.outputs[0].grounding
        expected = slow_point(model, llm, output, sizes)
        assert (found.x, found.y) == (expected.x, expected.y)
        assert found.probability == pytest.approx(expected.probability, abs=1e-4)
        assert json.loads(output.outputs[0].text) == {"e": "a", "x": found.x, "y": found.y}
        assert output.outputs[0].cumulative_logprob == pytest.approx(
            torch.tensor(found.probability).log().item(), abs=0.05
        )


def test_different_images_in_one_batch_point_as_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    llm = LLM(leaning(tokenizer), tokenizer)
    sizes = [(48, 32), (64, 64), (33, 20), (48, 32)]
    prompts = [
        {"prompt": f"{i}<img><image></img>", "multi_modal_data": {"image": [picture(*size, seed=i)]}}
        for i, size in enumerate(sizes)
    ]
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(json=POINT))
    together = llm.generate(prompts, params)
    for given, output in zip(prompts, together, strict=True):
        alone = llm.generate([given], params)[0].outputs[0]
        assert output.outputs[0].token_ids == alone.token_ids
        assert [(p.x, p.y) for p in output.outputs[0].grounding] == [(p.x, p.y) for p in alone.grounding]
        assert len(alone.grounding) == 1


def test_plain_coordinate_tokens_on_request_and_without_an_image(tokenizer: PreTrainedTokenizerFast) -> None:
    llm = LLM(leaning(tokenizer), tokenizer)
    plain = ask(llm, (48, 32), use_grounding_head=False).outputs[0]
    assert plain.grounding == [] and set(json.loads(plain.text)) == {"e", "x", "y"}
    without = ask(llm).outputs[0]
    assert without.grounding == [] and set(json.loads(without.text)) == {"e", "x", "y"}


def test_the_grammars_limits_hold_for_the_head(tokenizer: PreTrainedTokenizerFast) -> None:
    llm = LLM(leaning(tokenizer), tokenizer)
    free = ask(llm, (64, 64)).outputs[0].grounding[0]
    low, high = (0, free.x - 1) if free.x > 500 else (free.x + 1, 1000)
    narrow = {
        **POINT,
        "properties": {**POINT["properties"], "x": {"type": "integer", "minimum": low, "maximum": high}},
    }
    reply = ask(llm, (64, 64), schema=narrow).outputs[0]
    assert low <= json.loads(reply.text)["x"] <= high
    assert reply.grounding[0].x == json.loads(reply.text)["x"]
    # where no cell's y is allowed, y is written by the model, within its limits
    flat = {**POINT, "properties": {**POINT["properties"], "y": {"const": 3}}}
    reply = ask(llm, (64, 64), schema=flat).outputs[0]
    assert json.loads(reply.text)["y"] == 3
    # where no cell's x is allowed, nothing is pointed at
    thin = {**POINT, "properties": {**POINT["properties"], "x": {"const": 1}}}
    reply = ask(llm, (64, 64), schema=thin).outputs[0]
    assert json.loads(reply.text)["x"] == 1 and reply.grounding == []


def test_sampled_pointing_spreads_over_cells_and_repeats_by_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    llm = LLM(leaning(tokenizer), tokenizer)
    seen = [ask(llm, (64, 64), temperature=3.0, seed=seed).outputs[0].grounding for seed in range(12)]
    points = [(p.x, p.y) for pointed in seen for p in pointed]
    assert len(set(points)) > 3
    assert ask(llm, (64, 64), temperature=3.0, seed=5).outputs[0].grounding == seen[5]


@pytest.mark.parametrize("size", [(16, 16), (33, 20), (160, 160), (1, 1), (47, 130)])
def test_native_cells_are_eight_pixels_wide(size: tuple[int, int]) -> None:
    image = NATIVE(picture(*size))
    centres = cell_centres(image, 2)
    columns, rows = image.canvas_width // 8, image.canvas_height // 8
    expected = [(8 * c + 4, 8 * r + 4) for r in range(rows) for c in range(columns)]
    assert centres.tolist() == [list(map(float, point)) for point in expected]


def test_tiled_cells_lie_inside_their_tokens() -> None:
    tiles = TileProcessor(TileConfig(HALF, HALF, size=64, max_num_tiles=4))
    for size in ((130, 60), (64, 200), (90, 90)):
        image = tiles(picture(*size))
        centres, boxes = cell_centres(image, 2), image.token_boxes()
        across, down = image.tokens_per_tile
        per_tile = across * down * 4
        assert len(centres) == 4 * image.num_tokens
        for i, (x, y) in enumerate(centres.tolist()):
            tile, cell = divmod(i, per_tile)
            row, column = divmod(cell, 2 * across)
            x0, y0, x1, y1 = boxes[tile * across * down + row // 2 * across + column // 2].tolist()
            assert x0 < x < x1 and y0 < y < y1
