"""From the model's text to a Step, and only to a Step."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holotron.contract.holotron3 import DESKTOP_NAMES, Holotron3
from holotron.contract.policy import ContractError
from holotron.contract.reply import strip_reasoning
from holotron.contract.step import Step, Write
from holotron.contract.tool_schema import TOOL_NAMES

from .strategies import steps

CONTRACT = Holotron3()
CLICK: dict[str, Any] = {"tool_name": "click", "element": "OK", "x": 10, "y": 20}


def reply(call: object = None, **fields: object) -> str:
    return json.dumps({"note": None, "thought": "t", "tool_call": call or CLICK, **fields})


def refused(text: str) -> str:
    with pytest.raises(ContractError) as caught:
        CONTRACT.parse(text)
    return str(caught.value)


@given(steps)
def test_dump_then_parse_is_identity(step: Step) -> None:
    text = CONTRACT.dump(step)
    assert CONTRACT.parse(text) == step
    assert CONTRACT.dump(CONTRACT.parse(text)) == text


@given(steps)
def test_dump_keeps_the_order_of_fields_and_fills_defaults(step: Step) -> None:
    shown = json.loads(CONTRACT.dump(step))
    assert list(shown) == ["note", "thought", "tool_call"]
    assert next(iter(shown["tool_call"])) == "tool_name"
    assert list(shown["tool_call"]) == list(type(step.tool_call).model_fields)


def test_dump_is_compact_with_defaults_filled() -> None:
    step = CONTRACT.parse(reply())
    assert CONTRACT.dump(step) == (
        '{"note":null,"thought":"t","tool_call":{"tool_name":"click","element":"OK","x":10,"y":20,"button":"left"}}'
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
pieces = st.sampled_from(
    ['{"', '"}', "{", "}", "[", "]", ":", ",", '"', "\\", "```json\n", "```", "<think>", "</think>",
     "tool_call", '"tool_name"', "click", "NaN", "1e999", "\ud800", '"thought"', "note", "null", "0.5", " "]
)  # fmt: skip


@settings(max_examples=300)
@given(st.text() | st.lists(pieces, max_size=40).map("".join) | json_values.map(json.dumps))
def test_any_text_gives_a_step_or_a_contract_error(text: str) -> None:
    try:
        step = CONTRACT.parse(text)
    except ContractError as error:
        assert str(error)
    else:
        assert isinstance(step, Step)


broken = st.fixed_dictionaries(
    {"tool_name": st.sampled_from([*TOOL_NAMES, *sorted(DESKTOP_NAMES), "run"]) | json_values},
    optional={
        name: json_values
        for name in ("element", "x", "y", "button", "goals", "keys", "seconds", "content", "press_enter", "z")
    },
)


@settings(max_examples=300)
@given(broken | json_values, json_values, json_values)
def test_any_object_gives_a_step_or_a_contract_error(call: object, note: object, thought: object) -> None:
    text = json.dumps({"note": note, "thought": thought, "tool_call": call})
    try:
        step = CONTRACT.parse(text)
    except ContractError as error:
        assert str(error).isprintable()
    else:
        assert CONTRACT.parse(CONTRACT.dump(step)) == step


@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[" * 100_000, '{"note":' + "9" * 10_000 + "}"])
def test_hostile_json_is_a_contract_error(text: str) -> None:
    refused(text)


@pytest.mark.parametrize("text", ['\\"' * 50_000, "<think>" * 20_000, '"' * 100_001, "</think>" * 20_000])
def test_hostile_repeats_are_read_in_linear_time(text: str) -> None:
    refused(text)  # quadratic scans of these take minutes


@pytest.mark.parametrize("name", sorted(DESKTOP_NAMES))
def test_desktop_names_parse_to_their_plain_names(name: str) -> None:
    plain = name.removesuffix("_desktop")
    assert plain in TOOL_NAMES
    arguments: dict[str, dict[str, object]] = {
        "scroll": {"element": "e", "x": 1, "y": 2, "direction": "down"},
        "write": {"content": "c"},
        "hotkey": {"keys": ["a"]},
        "hold_and_tap_key": {"hold_keys": ["a"], "tap_keys": ["b"]},
        "key_down": {"key": "a"},
        "key_up": {"key": "a"},
        "wait": {"seconds": 2},
    }
    rest = arguments.get(plain, {"element": "e", "x": 1, "y": 2})
    suffixed = CONTRACT.parse(reply({"tool_name": name, **rest}))
    assert suffixed == CONTRACT.parse(reply({"tool_name": plain, **rest}))
    assert suffixed.tool_call.tool_name == plain
    assert json.loads(CONTRACT.dump(suffixed))["tool_call"]["tool_name"] == plain


@pytest.mark.parametrize("name", ["answer_desktop", "navigate_desktop", "click_desktop_desktop", "Click", ""])
def test_other_names_are_refused_with_the_list(name: str) -> None:
    message = refused(reply({**CLICK, "tool_name": name}))
    assert message.startswith("tool_call.tool_name: unknown tool") and "'double_click'" in message


@pytest.mark.parametrize("value", [0.5, 10.0, -0.0])
def test_pitfall_05_float_coordinates_are_refused_naming_both_contracts(value: float) -> None:
    message = refused(reply({**CLICK, "x": value}))
    assert message.startswith("tool_call.x:") and "holotron3" in message and "nemotron_omni" in message


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({**CLICK, "y": 1001}, "tool_call.y"),
        ({**CLICK, "y": -1}, "tool_call.y"),
        ({**CLICK, "x": True}, "tool_call.x"),
        ({**CLICK, "x": "10"}, "tool_call.x"),
        ({**CLICK, "button": "top"}, "tool_call.button"),
        ({**CLICK, "z": 1}, "tool_call.z"),
        ({"tool_name": "click", "x": 1, "y": 2}, "tool_call.element"),
        ({"element": "e", "x": 1, "y": 2}, "tool_call.tool_name"),
        ({"tool_name": ["click"]}, "tool_call.tool_name"),
        ({"tool_name": "write", "content": "a", "press_enter": "yes"}, "tool_call.press_enter"),
        ({"tool_name": "wait", "seconds": 10.5}, "tool_call.seconds"),
        ({"tool_name": "wait", "seconds": True}, "tool_call.seconds"),
        ({"tool_name": "hotkey", "keys": []}, "tool_call.keys"),
        ({"tool_name": "hotkey", "keys": ["a", ""]}, "tool_call.keys.1"),
        ({"tool_name": "scroll", **{k: CLICK[k] for k in "xy"}, "element": "", "direction": "in"},
         "tool_call.direction"),
        ({"tool_name": "update_plan", "goals": [{"title": "a", "status": "later"}]},
         "tool_call.goals.0.status"),
        ([CLICK, CLICK], "tool_call"),
    ],
)  # fmt: skip
def test_errors_name_the_field(call: object, field: str) -> None:
    assert refused(reply(call)).startswith(f"{field}:")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("click the button", "one JSON object"),
        ("[1]", "one JSON object"),
        ('{"note": null, "thought": "cut o', "not valid JSON"),
        ("<think>never ends", "only reasoning"),
        (reply() + reply(), "more than one JSON object"),
        (reply() + "\n" + reply(), "more than one JSON object"),
        (reply() + " done", "text after"),
        ("Sure: " + reply(), "nothing else"),
        ('{"thought":"a","thought":"b"}', "given twice"),
        (reply({"tool_name": "wait", "seconds": float("nan")}), "NaN"),
        (reply(plan="x"), "plan: unknown field"),
        ('{"thought":"t"}', "tool_call: missing"),
        ('{"tool_call":{"tool_name":"go_back"}}', "thought: missing"),
        (reply(thought=None), "thought: "),
        (reply(note=3), "note: "),
        ('{"thought":"\\ud800","tool_call":{"tool_name":"go_back"}}', "half a character"),
    ],
)
def test_replies_that_are_not_one_step_are_refused(text: str, words: str) -> None:
    assert words in refused(text)


def test_note_may_be_left_out() -> None:
    assert CONTRACT.parse('{"thought":"t","tool_call":{"tool_name":"go_back"}}').note is None


def test_pitfall_11_a_reply_cut_by_length_is_no_step_at_any_length() -> None:
    whole = reply({"tool_name": "write", "content": 'a "quoted" {brace}', "press_enter": True})
    for length in range(len(whole)):
        refused(whole[:length])
    assert CONTRACT.request_defaults["retry"]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("{body}", 0),
        ("<think>plan</think>{body}", 1),
        ("<think>a</think>\n<think>b</think>\n{body}", 2),
        ('<think>say "hi</think>{body}', 1),
        ("<think>{{}}</think>{body}", 1),
        ("the template opened it</think>{body}", 1),
        ("{body}<think>after</think>", 1),
        ("{body}\n<think>cut", 1),
        ("```json\n<think>in the fence</think>{body}\n```", 1),
    ],
)
def test_pitfall_12_inline_reasoning_is_stripped_and_counted(text: str, count: int) -> None:
    full = text.format(body=reply())
    assert strip_reasoning(full)[1] == count
    assert CONTRACT.parse(full) == CONTRACT.parse(reply())


def test_pitfall_12_tags_typed_as_content_stay() -> None:
    call = {"tool_name": "write", "content": '<think>"x"</think> and </think> and ``` {'}
    for before in ("", "<think>a</think>", "```json\n"):
        step = CONTRACT.parse(before + reply(call))
        assert isinstance(step.tool_call, Write) and step.tool_call.content == call["content"]


@pytest.mark.parametrize(
    "text",
    [
        "```json\n{body}\n```",
        "```\n{body}\n```",
        "```{body}```",
        "```json\n```json\n{body}\n```\n```",
        "```json\n{body}",
        "{body}\n```",
        "\n\n  ```JSON\n\n{body}\n\n```\n\n",
    ],
)
def test_pitfall_18_stray_or_doubled_code_fences_do_not_change_the_action(text: str) -> None:
    call = {"tool_name": "answer", "content": "```py\nprint(1)\n```"}
    assert CONTRACT.parse(text.format(body=reply(call))) == CONTRACT.parse(reply(call))


def test_pitfall_19_two_running_goals_are_an_error_when_strict_and_a_warning_otherwise() -> None:
    goals = [{"title": title, "status": "running"} for title in ("a", "b")]
    text = reply({"tool_name": "update_plan", "goals": goals})
    assert refused(text) == "tool_call.goals: 2 goals are running; keep at most one running"
    with pytest.warns(UserWarning, match="2 goals are running"):
        assert Holotron3(strict=False).parse(text).tool_call.tool_name == "update_plan"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = reply({"tool_name": "update_plan", "goals": [goals[0], {"title": "b", "status": "todo"}]})
        Holotron3(strict=False).parse(one)
        CONTRACT.parse(one)


def test_wait_is_whole_milliseconds() -> None:
    assert CONTRACT.dump(CONTRACT.parse(reply({"tool_name": "wait", "seconds": 1e-5}))).endswith('"seconds":0.0}}')
    assert CONTRACT.dump(CONTRACT.parse(reply({"tool_name": "wait", "seconds": 2}))).endswith('"seconds":2.0}}')
