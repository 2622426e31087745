"""The schemas, as the grammar engine that constrains decoding understands them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from holotron.contract.holo_localizer import HoloLocalizer
from holotron.contract.holotron3 import Holotron3
from holotron.contract.step import Answer, GoBack, Step, Wait, Write
from holotron.contract.tool_schema import TOOL_NAMES

from .strategies import steps


class ByteTokenizer:
    """One token a byte, and an end."""

    bos_token_id = None
    eos_token_id = 256
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


BYTES = LLTokenizer(TokenizerWrapper(ByteTokenizer()))
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
CONTRACT = Holotron3()


def compiled(schema: dict[str, Any]) -> str:
    grammar = LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT)
    is_error, complaints = LLMatcher.validate_grammar_with_warnings(grammar, BYTES)
    assert not is_error and not complaints, complaints
    return grammar


STEPS = compiled(CONTRACT.schema())
ANSWERS = compiled(CONTRACT.schema(answer_only=True))
PLACES = compiled(HoloLocalizer().schema())


def taken(grammar: str, text: str) -> int:
    """How many bytes of the text the grammar lets through; -1 for the whole text with nothing missing."""
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    count = matcher.try_consume_tokens(data)
    return -1 if count == len(data) and matcher.is_accepting() else count


@given(steps)
def test_every_step_can_be_generated(step: Step) -> None:
    assert taken(STEPS, CONTRACT.dump(step)) == -1
    assert (taken(ANSWERS, CONTRACT.dump(step)) == -1) == isinstance(step.tool_call, Answer)


@pytest.mark.parametrize("content", ["é ü ñ", "漢字かな", "😀👩‍👩‍👧", "a\nb\tc", "\x00\x1f\x7f\x85\u2028", '"\\/'])
def test_accents_cjk_emoji_and_controls_arrive_intact(content: str) -> None:
    step = Step(note=content, thought=content, tool_call=Write(content=content))
    text = CONTRACT.dump(step)
    assert taken(STEPS, text) == -1 and CONTRACT.parse(text) == step
    assert "\\u00e9" not in text


@pytest.mark.parametrize("seconds", [0.0, -0.0, 10.0, 1e-7, 0.0005, 9.9999, 1 / 3])
def test_every_wait_can_be_generated(seconds: float) -> None:
    text = CONTRACT.dump(Step(thought="", tool_call=Wait(seconds=seconds)))
    assert taken(STEPS, text) == -1


def test_pitfall_26_the_grammar_allows_no_whitespace_between_tokens() -> None:
    text = CONTRACT.dump(Step(thought="t", tool_call=GoBack()))
    outside = [0, *(i for i, sign in enumerate(text) if sign in "{}:,"), len(text)]
    for place in outside:
        for space in (" ", "\n", "\t"):
            assert taken(STEPS, text[:place] + space + text[place:]) in range(place + 1)
    assert taken(STEPS, text + " ") == len(text), "nothing may follow the object"


@pytest.mark.parametrize(
    "change",
    [
        {"thought": "t", "note": None},  # order
        {"note": None, "thought": "t", "extra": 1},
        {"note": 1, "thought": "t"},
        {"thought": "t"},
    ],
)
def test_the_grammar_fixes_fields_and_their_order(change: dict[str, object]) -> None:
    call = {"tool_name": "go_back"}
    good = {"note": None, "thought": "t", "tool_call": call}
    assert taken(STEPS, json.dumps(good, separators=(",", ":"))) == -1
    assert taken(STEPS, json.dumps({**change, "tool_call": call}, separators=(",", ":"))) != -1


@pytest.mark.parametrize("x", ["-1", "1001", "0.5", "01", "1e2", "true", '"1"', "500.0"])
def test_the_grammar_keeps_coordinates_in_range(x: str) -> None:
    step = '{"note":null,"thought":"","tool_call":{"tool_name":"move_to","element":"","x":%s,"y":0}}'
    place = '{"x":%s,"y":0}'
    for good in ("0", "1000", "57"):
        assert taken(STEPS, step % good) == -1 and taken(PLACES, place % good) == -1
    assert taken(STEPS, step % x) != -1 and taken(PLACES, place % x) != -1


def test_shape_of_the_schema() -> None:
    schema = CONTRACT.schema()
    assert schema["required"] == ["note", "thought", "tool_call"]
    variants = schema["properties"]["tool_call"]["anyOf"]
    assert [tool["properties"]["tool_name"] for tool in variants] == [{"const": name} for name in TOOL_NAMES]
    assert len(TOOL_NAMES) == len(set(TOOL_NAMES)) == 17
    for node in (schema, *variants, variants[0]["properties"]["goals"]["items"]):
        assert node["additionalProperties"] is False and node["required"] == list(node["properties"])
    text = CONTRACT.schema_text()
    assert not any(word in text for word in ("$ref", "$defs", 'title":"', "default", "description"))
    only = CONTRACT.schema(answer_only=True)["properties"]["tool_call"]["anyOf"]
    assert [tool["properties"]["tool_name"]["const"] for tool in only] == ["answer"]


def test_a_returned_schema_may_be_changed_without_harm() -> None:
    CONTRACT.schema()["properties"].clear()
    assert CONTRACT.schema()["properties"]
