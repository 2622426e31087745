"""The holo_localizer contract."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holotron.contract.holo_localizer import HoloLocalizer, localizer_messages
from holotron.contract.policy import ContractError

from .strategies import shot

LOCALIZER = HoloLocalizer()


def test_pitfall_24_image_before_text_temperature_0_thinking_off() -> None:
    png = shot(30, 20).png
    messages = localizer_messages(png, "the blue button")
    assert messages == LOCALIZER.messages(png, "the blue button")
    assert [message["role"] for message in messages] == ["user"], "one user turn, no system prompt"
    image, text = messages[0]["content"]
    assert base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,")) == png
    assert text["type"] == "text" and text["text"].endswith("Element: the blue button")
    assert LOCALIZER.request_defaults["temperature"] == 0
    assert LOCALIZER.request_defaults["chat_template_kwargs"] == {"enable_thinking": False}


def test_pitfall_07_the_localizer_shows_the_schema_it_requests() -> None:
    text = localizer_messages(shot().png, "x")[0]["content"][1]["text"]
    shown = next(line for line in text.splitlines() if line.startswith("{"))
    assert shown == json.dumps(LOCALIZER.schema(), separators=(",", ":"))
    assert LOCALIZER.schema()["properties"]["x"] == {"maximum": 1000, "minimum": 0, "type": "integer"}


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_answers_come_back(x: int, y: int) -> None:
    assert LOCALIZER.parse(LOCALIZER.dump(x, y)) == (x, y)
    assert LOCALIZER.parse(f'```json\n{{"y": {y}, "x": {x}}}\n```') == (x, y)


@pytest.mark.parametrize("text", ['{"x":1001,"y":5}', '{"x":1920,"y":5}', '{"x":-1,"y":5}'])
def test_pitfall_06_out_of_range_is_an_error_not_a_click_elsewhere(text: str) -> None:
    with pytest.raises(ContractError, match=r"^x: .* is outside 0\.\.1000"):
        LOCALIZER.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"x":0.25,"y":0.25}', "x: 0.25 is a float.*holotron3.*nemotron_omni"),
        ('{"x":1}', "y: missing"),
        ('{"x":1,"y":null}', "y: None is not a number"),
        ('{"x":1,"y":2,"z":3}', "z: unknown field"),
        ('{"x":1,"y":2}{"x":3,"y":4}', "more than one JSON object"),
        ("Click(1, 2)", "one JSON object"),
        ("", "empty"),
    ],
)
def test_other_answers_are_refused(text: str, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        LOCALIZER.parse(text)


@given(st.text() | st.dictionaries(st.sampled_from("xyz"), st.integers() | st.floats() | st.text()).map(json.dumps))
def test_any_text_gives_a_point_or_a_contract_error(text: str) -> None:
    try:
        x, y = LOCALIZER.parse(text)
    except ContractError:
        return
    assert 0 <= x <= 1000 and 0 <= y <= 1000


def test_the_point_is_in_css_pixels_of_the_page_that_was_sent() -> None:
    page = shot(640, 400, scale=0.5)
    assert LOCALIZER.point((500, 250), page) == (640.0, 200.0)
    assert LOCALIZER.point((1000, 1000), page) == (1278.0, 798.0)


def test_only_png_is_sent_and_only_points_on_the_image_are_written() -> None:
    with pytest.raises(ValueError, match="not a PNG"):
        localizer_messages(b"GIF89a", "x")
    with pytest.raises(ContractError, match="y: 1001"):
        LOCALIZER.dump(0, 1001)
    assert len(LOCALIZER.prompt_hash) == 64
