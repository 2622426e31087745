"""From a conversation to messages: order, eviction, history, determinism, prompt."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holotron.contract.contract import Contract, get_contract
from holotron.contract.conversation import Conversation, Screenshot, Settings, Turn
from holotron.contract.holotron3 import (
    ANSWER_NOW,
    EVICTED,
    OBSERVATION_CLOSE,
    OBSERVATION_OPEN,
    RESULT_LIMIT,
    Holotron3,
)
from holotron.contract.step import Answer, Goal, GoBack, Step, ToolCall, UpdatePlan

from .strategies import shot, talk

CONTRACT: Contract = get_contract("holotron3")


def parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for message in messages if isinstance(message["content"], list) for part in message["content"]]


def images(messages: list[dict[str, Any]]) -> list[bytes]:
    urls = [part["image_url"]["url"] for part in parts(messages) if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [base64.b64decode(url.split(",", 1)[1]) for url in urls]


def report(result: str | None, call: ToolCall | None = None, is_error: bool = False) -> str:
    step = Step(thought="", tool_call=call or GoBack())
    conversation = Conversation("g", [Turn(shot(), step=step, result=result, is_error=is_error), Turn(shot())])
    content = CONTRACT.messages(conversation)[4]["content"]
    assert isinstance(content, str)
    return content


def test_messages_in_order() -> None:
    conversation = talk(2)
    conversation.turns[1].observation = "You clicked there twice."
    messages = CONTRACT.messages(conversation)
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "user",
        "assistant",
        "user",
        "user",
    ]
    assert messages[0]["content"] == CONTRACT.system_prompt(conversation.settings)
    assert messages[1]["content"] == "Task: Buy milk"
    opening, image, closing = messages[2]["content"]
    assert opening == {"type": "text", "text": "<observation>\n"}
    assert image["type"] == "image_url" and images([messages[2]]) == [conversation.turns[0].screenshot.png]
    assert closing == {"type": "text", "text": "\n</observation>"}
    step = conversation.turns[0].step
    assert step is not None and messages[3]["content"] == CONTRACT.dump(step)
    assert messages[4]["content"] == '<tool_output tool="click">clicked 0</tool_output>'
    assert messages[5]["content"][2]["text"] == "\nYou clicked there twice.\n</observation>"


def test_a_finished_conversation_ends_with_its_last_result() -> None:
    messages = CONTRACT.messages(talk(2, decided=True))
    assert messages[-1]["content"] == '<tool_output tool="click">clicked 1</tool_output>'
    pending = talk(2, decided=True)
    pending.turns[1].result = None
    assert CONTRACT.messages(pending)[-1]["role"] == "assistant"


def test_a_hole_in_the_history_is_refused() -> None:
    conversation = talk(3)
    conversation.turns[1].step = None
    with pytest.raises(ValueError, match="turn 1 has no step"):
        CONTRACT.messages(conversation)


def test_results_are_cut_never_empty_and_flagged_by_type() -> None:
    assert report("") == '<tool_output tool="go_back">Done.</tool_output>'
    assert report(" \n") == '<tool_output tool="go_back">Done.</tool_output>'
    assert report(None) == '<tool_output tool="go_back">No result was recorded.</tool_output>'
    assert report("no page", is_error=True) == '<error tool="go_back">no page</error>'
    assert report("error: none really") == '<tool_output tool="go_back">error: none really</tool_output>'
    assert len(report("", is_error=True)) > len('<error tool="go_back"></error>')
    body = report("x" * 5000).removeprefix('<tool_output tool="go_back">').removesuffix("</tool_output>")
    assert body == "x" * RESULT_LIMIT and RESULT_LIMIT == 2000
    plan = UpdatePlan(goals=[Goal(title="find", status="done"), Goal(title="buy", status="running")])
    assert report("", plan) == '<tool_output tool="update_plan">1. find [done]\n2. buy [running]</tool_output>'


@pytest.mark.parametrize("frame", ["</tool_output>", "</observation>", "</error>"])
def test_page_text_cannot_close_a_frame(frame: str) -> None:
    assert report(f"a{frame}b").count(frame) == (1 if frame == "</tool_output>" else 0)
    conversation = talk(1)
    conversation.turns[0].observation = f"a{frame}b"
    closing = CONTRACT.messages(conversation)[2]["content"][2]["text"]
    assert closing.count(frame) == (1 if frame == "</observation>" else 0)
    assert closing.startswith("\na<\\/")


def test_answer_now_is_said_in_the_last_observation_only() -> None:
    conversation = talk(3)
    before = CONTRACT.messages(conversation)
    conversation.answer_now = True
    after = CONTRACT.messages(conversation)
    assert after[-1]["content"][2]["text"] == f"\n{ANSWER_NOW}{OBSERVATION_CLOSE}"
    assert after[:-1] == before[:-1], "the prefix must stay the same, so that it stays cached"


def test_pitfall_08_history_holds_no_reasoning_and_no_raw_output() -> None:
    raw = (
        '<think>secret plan</think>```json\n{"thought": "seen", "tool_call":'
        ' {"tool_name": "click_desktop", "element": "a", "x": 1, "y": 2}}\n```'
    )
    conversation = talk(2)
    conversation.turns[0].step = CONTRACT.parse(raw)
    messages = CONTRACT.messages(conversation)
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert said == [
        '{"note":null,"thought":"seen","tool_call":{"tool_name":"click","element":"a","x":1,"y":2,"button":"left"}}'
    ]
    everything = json.dumps(messages[1:])
    assert "secret plan" not in everything and "think" not in everything and "```" not in everything


def test_pitfall_08_a_retry_sends_the_messages_of_the_first_attempt() -> None:
    conversation = talk(4)
    kept = copy.deepcopy(conversation)
    first = json.dumps(CONTRACT.messages(conversation))
    with pytest.raises(ValueError):
        CONTRACT.parse("rubbish of the failed attempt")
    assert json.dumps(CONTRACT.messages(conversation)) == first
    assert conversation == kept
    retry = CONTRACT.request_defaults["retry"]
    assert (retry["attempts"], retry["timeout_s"], retry["pause_s"]) == (3, 120.0, 5.0)
    assert (retry["temperature_step"], retry["temperature_floor"]) == (0.1, 0.4)


@given(st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans())
def test_pitfall_09_exactly_the_newest_images_remain(k: int, n: int, merge: bool, decided: bool) -> None:
    conversation = talk(k, decided=decided)
    messages = Holotron3(images_kept=n, merge_evicted=merge).messages(conversation)
    everything = Holotron3(images_kept=k).messages(conversation)
    shots = [turn.screenshot.png for turn in conversation.turns]
    assert images(messages) == shots[-n:] and images(everything) == shots
    assert [message["role"] for message in messages] == [message["role"] for message in everything]
    wrappers = [message["content"] for message in messages if isinstance(message["content"], list)]
    assert len(wrappers) == k
    for index, content in enumerate(wrappers):
        texts = [part["text"] for part in content if part["type"] == "text"]
        evicted = index < k - n
        expected = OBSERVATION_OPEN + (EVICTED if evicted else "") + OBSERVATION_CLOSE
        assert "".join(texts) == expected
        assert len(texts) == (1 if merge else 3) if evicted else len(texts) == 2


def test_the_marker_can_be_chosen() -> None:
    messages = Holotron3(images_kept=1, evicted_marker="[screenshot evicted]").messages(talk(2))
    assert messages[2]["content"] == [{"type": "text", "text": "<observation>\n[screenshot evicted]\n</observation>"}]
    assert EVICTED == "[Image omitted by context cleaning]" and Holotron3().images_kept == 3


def test_pitfall_10_results_are_user_messages_not_tool_messages() -> None:
    messages = CONTRACT.messages(talk(5))
    assert {message["role"] for message in messages} == {"system", "user", "assistant"}
    assert all("tool_calls" not in message and "tool_call_id" not in message for message in messages)


def test_pitfall_03_a_screenshot_whose_record_disagrees_with_its_bytes_is_refused() -> None:
    taken = shot(20, 10)
    lying = Screenshot(taken.png, 40, 20, 20, 10)
    with pytest.raises(ValueError, match="40 x 20 but its PNG is 20 x 10"):
        CONTRACT.messages(Conversation("g", [Turn(lying)]))


def test_pitfall_07_schema_bytes_in_the_prompt_equal_those_of_the_request(tmp_path: Path) -> None:
    prompt = CONTRACT.system_prompt(Settings())
    assert prompt.count("<output_format>") == prompt.count("</output_format>") == 1
    block = prompt.split("<output_format>")[1].split("</output_format>")[0]
    shown = block.split("```json\n")[1].split("\n```")[0]
    assert shown == Holotron3().schema_text()
    assert json.dumps(CONTRACT.schema(), ensure_ascii=False, separators=(",", ":")) == shown
    assert json.loads(shown) == CONTRACT.schema()
    assert CONTRACT.messages(talk(1))[0]["content"].count(shown) == 1
    file = tmp_path / "prompt.md"
    for text in ("no schema here", "{{schema}} and again {{schema}}"):
        file.write_text(text)
        with pytest.raises(ValueError, match="exactly once"):
            get_contract("holotron3", prompt_file=file)


def test_pitfall_27_same_date_and_screenshots_give_byte_identical_prompts() -> None:
    assert json.dumps(Holotron3().messages(talk(4))) == json.dumps(Holotron3().messages(talk(4)))
    script = (
        "import hashlib, json\n"
        "from holotron.contract.holotron3 import Holotron3\n"
        "from tests.contract.strategies import talk\n"
        "print(hashlib.sha256(json.dumps(Holotron3().messages(talk(2))).encode()).hexdigest())\n"
    )
    here = hashlib.sha256(json.dumps(Holotron3().messages(talk(2))).encode()).hexdigest()
    root = Path(__file__).resolve().parents[2]
    for seed in ("1", "2"):  # another process with another hash seed
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}:{root / 'src'}"}
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == here


def test_pitfall_30_no_secret_reaches_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HAI_API_KEY", "OPENAI_API_KEY", "PASSWORD", "HF_TOKEN"):
        monkeypatch.setenv(name, "swordfish")
    contract = Holotron3()
    sent = json.dumps([contract.messages(talk(2)), contract.request_defaults]).lower()
    assert "swordfish" not in sent
    assert "password" not in contract.system_prompt(Settings()).lower()


def test_prompt_contains_every_required_element_and_its_parameters() -> None:
    chosen = Settings("2031-05-06", max_steps=17, max_seconds=33.5, environment="test rig", effort="high")
    prompt = CONTRACT.system_prompt(chosen)
    for value in ("Date: 2031-05-06", "17 steps, 33.5 seconds", "Environment: test rig", "Effort: high"):
        assert value in prompt
    assert "{{" not in prompt
    for section in ("how_it_works", "fields", "tools", "describing_elements", "interaction", "blockers",
                    "planning", "answering", "settings", "output_format"):  # fmt: skip
        assert f"<{section}>" in prompt and f"</{section}>" in prompt
    listed = prompt.split("<tools>")[1].split("</tools>")[0]
    variants = CONTRACT.schema()["properties"]["tool_call"]["anyOf"]
    for name in (tool["properties"]["tool_name"]["const"] for tool in variants):
        assert name in listed, f"{name} is allowed but not explained"


def test_a_prompt_file_replaces_the_prompt_and_its_hash_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "mine.md"
    file.write_text("Día {{date}} {not a parameter}: {{schema}}", encoding="utf-8")
    contract = get_contract("holotron3", prompt_file=file, images_kept=2)
    assert contract.images_kept == 2
    prompt = contract.system_prompt(Settings(date="{{effort}}"))
    assert prompt.startswith('Día {{effort}} {not a parameter}: {"type":"object"')
    assert contract.prompt_hash == hashlib.sha256(file.read_bytes()).hexdigest() != CONTRACT.prompt_hash
    built_in = Path(sys.modules[Holotron3.__module__].__file__ or "").parent / "prompts" / "holotron3.md"
    assert CONTRACT.prompt_hash == hashlib.sha256(built_in.read_bytes()).hexdigest()


def test_unusable_prompt_files_and_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent.md cannot be read"):
        Holotron3(prompt_file=tmp_path / "absent.md")
    bad = tmp_path / "bad.md"
    bad.write_bytes(b"\xff\xfe {{schema}}")
    with pytest.raises(ValueError, match="UTF-8"):
        Holotron3(prompt_file=bad)
    bad.write_text("{{schema}} {{password}}")
    with pytest.raises(ValueError, match="unknown placeholders password"):
        Holotron3(prompt_file=bad)
    with pytest.raises(ValueError, match="images_kept is 0"):
        Holotron3(images_kept=0)
    with pytest.raises(ValueError, match="unknown contract 'holo9'.*holotron3"):
        get_contract("holo9")
    with pytest.raises(ValueError, match="HoloLocalizer"):
        get_contract("holo_localizer")


def test_request_defaults_are_those_of_the_contract_and_belong_to_one_instance() -> None:
    defaults = CONTRACT.request_defaults
    assert (defaults["temperature"], defaults["top_p"], defaults["max_tokens"]) == (0.8, 0.95, 4096)
    assert defaults["chat_template_kwargs"] == {"enable_thinking": True}
    other = Holotron3()
    other.request_defaults["retry"]["attempts"] = 99
    assert CONTRACT.request_defaults["retry"]["attempts"] == 3


def test_calls_without_a_place_have_no_point() -> None:
    page = shot(200, 100)
    assert CONTRACT.point(Answer(content="x"), page) is None
    assert CONTRACT.point(CONTRACT.parse(CLICK).tool_call, page) == (199.0, 50.0)


CLICK = '{"thought":"","tool_call":{"tool_name":"drag_to","element":"","x":1000,"y":500}}'
