"""What the pilot learns from is exactly what the engine will show it."""

from __future__ import annotations

import base64
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holotron.contract.conversation import Conversation, Screenshot, Turn
from holotron.contract.holotron3 import Holotron3
from holotron.engine import LLM
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.training.pilot.preset import pilot_config
from holotron.training.pilot.samples import (
    CELL,
    IGNORE,
    ExampleMaker,
    as_pointed,
    batches,
    cell_targets,
    character_grid,
    read_records,
    targets,
    words,
)
from holotron.training.pilot.vocabulary import build_pilot_tokenizer, pieces


@pytest.fixture(scope="module")
def maker() -> ExampleMaker:
    return ExampleMaker(build_pilot_tokenizer(), Holotron3(images_kept=1))


@pytest.fixture(scope="module")
def lines(records: list[Path]) -> list[str]:
    return read_records(records)


def test_the_prompt_is_the_one_the_engine_builds(maker: ExampleMaker, lines: list[str]) -> None:
    tokenizer = build_pilot_tokenizer()
    llm = LLM(HolotronForConditionalGeneration(pilot_config(tokenizer, hidden=32, channels=4)), tokenizer)
    checked = 0
    for line in lines:
        record = json.loads(line)
        if "step" not in record:
            continue
        question = maker(line, random.Random(0), steps_only=True).questions[0]
        rng = random.Random(0)
        shot = Screenshot(base64.b64decode(record["png"]), 160, 160, 160, 160)
        turns = [
            Turn(shot, step=as_pointed(_step(past), shot, rng), result=past["result"]) for past in record["history"]
        ]
        messages = maker.contract.messages(Conversation(record["goal"], [*turns, Turn(shot)]))
        assert question.ids[: question.reply] == llm.prepare_chat(messages).prompt
        reply = tokenizer.decode(question.ids[question.reply : -1])
        assert maker.contract.parse(reply).tool_call.tool_name == record["step"]["tool_call"]["tool_name"]
        assert question.ids[-1] == tokenizer.eos_token_id
        checked += 1
    assert checked >= 12


def _step(past: dict[str, Any]) -> Any:
    from holotron.contract.step import Step

    return Step.model_validate(past["step"])


def test_the_label_of_a_click_lies_in_its_box(maker: ExampleMaker, lines: list[str]) -> None:
    seen = 0
    for line in lines:
        for question in maker(line, random.Random(1)).questions:
            if question.point < 0:
                continue
            x, y = (question.ids[question.point + i] - first for i, first in enumerate(_firsts(maker)))
            assert any(
                x0 - CELL <= x * 0.16 <= x1 + CELL and y0 - CELL <= y * 0.16 <= y1 + CELL
                for x0, y0, x1, y1 in question.boxes
            )
            seen += 1
    assert seen > 20


def _firsts(maker: ExampleMaker) -> tuple[int, int]:
    return maker.x_ids.start, maker.x_ids.start + 1001


def test_batches_are_a_function_of_seed_and_number(maker: ExampleMaker, lines: list[str]) -> None:
    def ids(start: int, count: int) -> list[list[list[int]]]:
        made = islice(batches(lines, maker, 3, start, 4), count)
        return [[q.ids for e in batch for q in e.questions] for batch in made]

    whole = ids(0, 12)
    assert whole[7:] == ids(7, 5)
    assert whole[0] != whole[1]


def test_too_few_records_are_refused(maker: ExampleMaker, lines: list[str]) -> None:
    with pytest.raises(ValueError, match="fewer than one batch"):
        next(batches(lines[:2], maker, 0, 0, 4))


@given(st.floats(0, 150), st.floats(0, 150), st.floats(0.5, 100), st.floats(0.5, 100))
def test_cell_targets_are_inside_the_box_or_its_middle(x: float, y: float, w: float, h: float) -> None:
    box = (x, y, min(160.0, x + w), min(160.0, y + h))
    target = cell_targets([box], 20, 20).view(20, 20)
    assert target.sum() == pytest.approx(1, abs=1e-5)
    for row, column in target.nonzero().tolist():
        cx, cy = (column + 0.5) * CELL, (row + 0.5) * CELL
        inside = box[0] < cx < box[2] and box[1] < cy < box[3]
        middle = abs(cx - (box[0] + box[2]) / 2) <= CELL and abs(cy - (box[1] + box[3]) / 2) <= CELL
        assert inside or middle


def test_characters_lie_where_the_page_shows_them() -> None:
    record = {
        "width": 32, "height": 16, "elements": [],
        "chars": [["H", 5.0, 4.0, 7.0, 11.0], ["i", 10.0, 4.0, 2.0, 11.0], ["l", 10.9, 4.0, 2.0, 11.0]],
        "ignore": [[16, 8, 32, 16]],
    }  # fmt: skip
    grid = character_grid(record)
    assert grid.shape == (2, 8)
    assert grid[0, 1] == ord("H") - 32
    assert grid[0, 2] == IGNORE  # two letters in one cell cannot both be right
    assert (grid[1, 4:] == IGNORE).all() and (grid[1, :4] == 0).all()
    assert [text for text, _ in words(record)] == ["Hil"]


def test_ambiguous_texts_are_not_asked_for(lines: list[str]) -> None:
    for line in lines:
        record = json.loads(line)
        spoken = [text for text, _ in words(record)]
        for role, text, boxes in targets(record):
            assert boxes
            if role == "word":
                assert spoken.count(text) == 1


def test_pieces_are_one_token_and_decode_to_themselves() -> None:
    tokenizer = build_pilot_tokenizer()
    for piece in pieces():
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        assert len(ids) == 1 and tokenizer.decode(ids) == piece


def test_a_click_takes_few_tokens(maker: ExampleMaker) -> None:
    step = (
        '{"note":null,"thought":"I click the target.","tool_call":'
        '{"tool_name":"click","element":"OK","x":512,"y":30,"button":"left"}}'
    )
    ids = build_pilot_tokenizer()(step, add_special_tokens=False)["input_ids"]
    assert len(ids) == 9
    assert maker.contract.dump(maker.contract.parse(step)) == step


def test_torn_last_lines_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2')
    assert read_records([tmp_path / "a.jsonl"]) == ['{"a": 1}\n']


def test_examples_carry_labels_of_the_image_size(maker: ExampleMaker, lines: list[str]) -> None:
    example = maker(lines[-1], random.Random(0))
    assert example.characters.shape == (20, 40)
    assert example.characters.dtype == torch.int64
    assert (example.characters > 0).any()
