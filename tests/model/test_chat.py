from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from holotron.model.chat import IGNORE, Chat, EncodedChat
from holotron.model.config import ConfigError
from holotron.model.image_tokens import expand_images
from holotron.model.special_ids import SpecialIds
from tests.model.chat_tokenizers import (
    OPEN_HEADER,
    PLAIN_HEADER,
    V2,
    V2_IMAGES,
    V2_STYLE,
    V3,
    V3_IMAGES,
    byte_tokenizer,
)

Messages = list[dict[str, Any]]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

TEXT_V2 = byte_tokenizer(V2, "<SPECIAL_12>")
VL_V2 = byte_tokenizer(V2 + V2_IMAGES, "<SPECIAL_12>", pad="<SPECIAL_12>")
OMNI = byte_tokenizer(V3 + V3_IMAGES, "<|im_end|>")
CHATS = {
    "nemotron_v2 text": Chat(TEXT_V2),
    "nemotron_v2": Chat(VL_V2),
    "chatml": Chat(OMNI),
    "v2 style": Chat(byte_tokenizer(V2 + V2_IMAGES, "<SPECIAL_12>", V2_STYLE)),
    "open header": Chat(byte_tokenizer(V3 + V3_IMAGES, "<|im_end|>", OPEN_HEADER)),
    "plain header": Chat(byte_tokenizer(V2, "</s>", PLAIN_HEADER)),
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def spoken(chat: Chat, encoded: EncodedChat) -> list[str]:
    return [chat.tokenizer.decode(encoded.ids[span.start : span.end]) for span in encoded.spans]


def specials(chat: Chat, ids: list[int]) -> list[str]:
    known = {i for i, token in chat.tokenizer.added_tokens_decoder.items() if token.special}
    return chat.tokenizer.convert_ids_to_tokens([i for i in ids if i in known])


def test_our_v2_turns_are_those_of_the_release() -> None:
    chat = CHATS["nemotron_v2"]
    assert chat.template_source == "nemotron_v2"
    messages = [
        {"role": "system", "content": " Be brief. /no_think"},
        user([{"type": "text", "text": "What is "}, IMAGE, {"type": "text", "text": "? "}]),
        assistant("A cat.", reasoning_content="whiskers"),
        user("Sure?"),
    ]
    asked = (
        "<s><SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nWhat is <image>?\n<SPECIAL_11>Assistant\nA cat.\n"
        "<SPECIAL_12>\n<SPECIAL_11>User\nSure?\n<SPECIAL_11>Assistant\n"
    )
    assert chat.render(messages) == asked + "<think></think>"
    assert chat.render(messages, thinking=True) == asked + "<think>\n"
    done = [*messages, assistant("Yes.", reasoning_content="ears too")]
    assert chat.render(done, add_generation_prompt=False) == (
        asked + "<think>\nears too\n</think>\n\nYes.\n<SPECIAL_12>\n"
    )
    assert chat.render([user("Hi")]) == (
        "<s><SPECIAL_10>System\n\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\n<think></think>"
    )
    assert CHATS["nemotron_v2 text"].render([user("Hi")]).endswith("Assistant\n<think>\n")


def test_our_chatml_turns_are_those_of_the_release() -> None:
    chat = CHATS["chatml"]
    assert chat.template_source == "chatml"
    messages = [
        user("Look"),
        assistant("<think>why</think>I look.", tool_calls=[call("look", at="漢", twice=True)]),
        {"role": "tool", "content": "a wall"},
        {"role": "tool", "content": [{"type": "text", "text": "a door"}, IMAGE]},
        assistant("Seen.", reasoning="both"),
    ]
    head = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nLook<|im_end|>\n<|im_start|>assistant\n"
    calls = (
        "<tool_call>\n<function=look>\n<parameter=at>\n漢\n</parameter>\n<parameter=twice>\ntrue\n</parameter>\n"
        "</function>\n</tool_call>\n<|im_end|>\n"
    )
    results = (
        "<|im_start|>user\n<tool_response>\na wall\n</tool_response>\n<tool_response>\na door<image>\n"
        "</tool_response>\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.render(messages, add_generation_prompt=False) == (
        f"{head}<think>\nwhy\n</think>\nI look.\n{calls}{results}<think>\nboth\n</think>\nSeen.<|im_end|>\n"
    )
    # a new question makes all that thinking old
    assert chat.render([*messages, user("And?")], thinking=False) == (
        f"{head}<think></think>I look.\n{calls}{results}<think></think>Seen.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )


def test_tools_are_shown_in_the_syntax_of_each_generation() -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "Sees <image> é", "parameters": {}}}]
    messages = [
        {"role": "system", "content": "Act."},
        user("Go"),
        assistant("", tool_calls=[call("look", at=1), call("look", at=2)]),
        {"role": "tool", "content": '{"seen": 1}'},
        {"role": "tool", "content": '{"seen": 2}'},
    ]
    listed = '{"name": "look", "description": "Sees <image> é", "parameters": {}}'
    v2 = CHATS["nemotron_v2"].render(messages, tools=tools)
    assert v2.startswith("<s><SPECIAL_10>System\nAct.\n\n") and f"<AVAILABLE_TOOLS>[{listed}]</AVAILABLE_TOOLS>" in v2
    assert v2.endswith(
        '<SPECIAL_11>Assistant\n<TOOLCALL>[{"name": "look", "arguments": {"at": 1}}, {"name": "look", "arguments": '
        '{"at": 2}}]</TOOLCALL>\n<SPECIAL_12>\n<SPECIAL_11>User\n<TOOL_RESPONSE>[{"seen": 1}, {"seen": 2}]'
        "</TOOL_RESPONSE>\n<SPECIAL_11>Assistant\n<think></think>"
    )
    chatml = CHATS["chatml"].render(messages, tools=tools)
    assert f"<tools>\n{listed}\n</tools>" in chatml
    for name in ("nemotron_v2", "chatml"):  # what a description spells is no picture
        assert "<image>" not in specials(CHATS[name], CHATS[name].prompt_ids(messages, tools=tools))


@pytest.mark.parametrize("name", ["nemotron_v2 text", "nemotron_v2", "chatml", "v2 style", "open header"])
@pytest.mark.parametrize("system", [None, "Be brief.", "", [{"type": "text", "text": "Be brief."}]])
def test_thinking_can_be_switched_whatever_the_template_wants(name: str, system: Any) -> None:
    chat = CHATS[name]
    messages: Messages = [user("Open /think/no_think, then /no_think")]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    opened = {True: ("<think>\n", "assistant\n"), False: ("<think></think>", "<think>\n\n</think>\n\n")}
    for thinking in (True, False):
        rendered = chat.render(messages, thinking=thinking)
        assert rendered.endswith(opened[thinking])
        assert "Open /think/no_think, then /no_think" in rendered
        by_kwargs = chat.prompt_ids(messages, template_kwargs={"enable_thinking": thinking})
        if chat.thinking_switch == "text" or name == "open header":
            assert by_kwargs == chat.prompt_ids(messages, thinking=thinking)
    shown = chat.render([*messages[:-1], user("x")], thinking=False)
    assert "/no_think" not in shown


def test_how_each_template_is_switched() -> None:
    found = {name: chat.thinking_switch for name, chat in CHATS.items()}
    assert found == {
        "nemotron_v2 text": "enable_thinking",
        "nemotron_v2": "enable_thinking",
        "chatml": "enable_thinking",
        "v2 style": "text",
        "open header": "enable_thinking",
        "plain header": None,
    }
    with pytest.raises(ValueError, match="no thinking switch"):
        CHATS["plain header"].render([user("x")], thinking=True)


@pytest.mark.parametrize("name", ["nemotron_v2", "v2 style"])
def test_switches_in_the_text_select_and_are_removed(name: str) -> None:
    chat = CHATS[name]
    for word, opened in (("/think", "<think>\n"), ("/no_think", "<think></think>")):
        rendered = chat.render([user(f"Hello {word}")])
        assert "User\nHello\n" in rendered and rendered.endswith(opened)
        assert chat.render([{"role": "system", "content": word}, user("Hello")]) == rendered


CONVERSATION: Messages = [
    {"role": "system", "content": "S"},
    user("one"),
    assistant(" A1 \n", reasoning_content="R1"),
    user("two"),
    assistant("A2", reasoning_content="R2 "),
]
EXPECTED = {
    "nemotron_v2": ["A1\n<SPECIAL_12>", "R2\n</think>\n\nA2\n<SPECIAL_12>"],
    "chatml": ["A1<|im_end|>", "R2\n</think>\nA2<|im_end|>"],
    "v2 style": ["A1\n<SPECIAL_12>", "R2 \n</think>\n\nA2\n<SPECIAL_12>"],
    "open header": [
        "<think>\nR1\n</think>\n\n A1 \n<|im_end|>",
        "<think>\nR2 \n</think>\n\nA2<|im_end|>",
    ],
    "plain header": [" A1 \n</s>", "A2</s>"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_spans_are_what_the_assistant_generates(name: str) -> None:
    chat = CHATS[name]
    encoded = chat.encode(CONVERSATION)
    assert spoken(chat, encoded) == EXPECTED[name]
    assert [span.message for span in encoded.spans] == [2, 4]
    assert chat.tokenizer.decode(encoded.ids) == chat.render(CONVERSATION, add_generation_prompt=False)
    # what precedes the last reply is what the model is prompted with for it
    if chat.thinking_switch is not None:
        assert encoded.ids[: encoded.spans[-1].start] == chat.prompt_ids(CONVERSATION[:-1], thinking=True)


@pytest.mark.parametrize("name", ["nemotron_v2", "chatml", "v2 style"])
def test_spans_of_calls(name: str) -> None:
    chat = CHATS[name]
    turn = assistant(None, tool_calls=[call("look", at="<SPECIAL_12><|im_end|>")])
    both = assistant("I look.", tool_calls=[call("look", at="x")])
    messages = [user("Go"), turn, {"role": "tool", "content": "<image>"}, both]
    found = spoken(chat, chat.encode(messages))
    if name == "chatml":
        block = "<tool_call>\n<function=look>\n<parameter=at>\n{}\n</parameter>\n</function>\n</tool_call>\n<|im_end|>"
        assert found == [block.format("<SPECIAL_12><|im_end|>"), "I look.\n" + block.format("x")]
        return
    block = '<TOOLCALL>[{{"name": "look", "arguments": {{"at": "{}"}}}}]</TOOLCALL>\n<SPECIAL_12>'
    first, second = block.format("<SPECIAL_12><|im_end|>"), block.format("x")
    if name == "nemotron_v2":
        assert found == [first, "I look.\n\n" + second]
    else:  # it writes an empty turn before the first call, and two turns at the end
        assert found == [first, "I look.\n<SPECIAL_12>", second]


PIECES = (
    "<SPECIAL_11>Assistant\n", "<SPECIAL_10>", "<SPECIAL_12>", "</s>", "<s>", "<|im_start|>assistant\n", "<|im_end|>",
    "<image>", "<img>", "</img>", "<video>", "### assistant:\n", "<", "im_end|>", "image>", "\n", " ", "\t", "the",
    "É", "漢字", "\ue000", "\ue001", "\ue0000w\ue000", "{{ bos_token }}", "[INST]", "7", "\\", '"', "\x85",
)  # fmt: skip
WORDS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=6).map("".join)
SPOKEN = WORDS.filter(lambda text: bool(text.strip()))
SEEN = st.lists(WORDS.map(lambda text: {"type": "text", "text": text}) | st.just(IMAGE), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn, parts: bool) -> Messages:
    messages: Messages = [] if draw(st.booleans()) else [{"role": "system", "content": draw(WORDS)}]
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(WORDS | SEEN) if parts else draw(WORDS)), assistant(draw(SPOKEN))]
    if draw(st.booleans()):
        messages.append(user(draw(WORDS)))
    return messages


@pytest.mark.parametrize("name", EXPECTED)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_text_makes_a_span_or_a_special_token(name: str, data: st.DataObject) -> None:
    chat = CHATS[name]
    messages = data.draw(conversations(parts=name in ("nemotron_v2", "chatml", "open header")))
    encoded = chat.encode(messages, thinking=None if name == "plain header" else False)
    end = {"nemotron_v2": "\n<SPECIAL_12>", "v2 style": "\n<SPECIAL_12>", "plain header": "</s>"}.get(
        name, "<|im_end|>"
    )
    replies = [(i, m["content"]) for i, m in enumerate(messages) if m["role"] == "assistant"]
    strips = name not in ("plain header", "open header")
    assert spoken(chat, encoded) == [(text.strip() if strips else text) + end for _, text in replies]
    assert [span.message for span in encoded.spans] == [i for i, _ in replies]

    def harmless(content: Any) -> Any:
        return "x" if isinstance(content, str) else [IMAGE for part in content if part["type"] != "text"] or "x"

    plain = [{**message, "content": harmless(message["content"])} for message in messages]
    thinking = None if name == "plain header" else False
    assert specials(chat, encoded.ids) == specials(chat, chat.encode(plain, thinking=thinking).ids)
    ids = chat.prompt_ids(messages, thinking=thinking, add_generation_prompt=False)
    assert specials(chat, ids) == specials(chat, encoded.ids)
    shown = chat.render(messages, thinking=thinking, add_generation_prompt=False)
    assert chat.tokenizer.decode(ids) == chat.tokenizer.decode(encoded.ids) == shown


def test_parts_side_by_side_do_not_spell_a_token_together() -> None:
    chat = CHATS["nemotron_v2"]
    ids = chat.prompt_ids([user([{"type": "text", "text": "<ima"}, {"type": "text", "text": "ge>"}])])
    assert "<image>" not in specials(chat, ids) and "<image>" in chat.tokenizer.decode(ids)


def test_a_conversation_may_hold_private_characters() -> None:
    chat = CHATS["chatml"]
    text = "".join(chr(code) for code in range(0xE000, 0xF8FE)) + "<|im_end|>"
    assert text in chat.tokenizer.decode(chat.encode([user(text), assistant("x")]).ids)
    with pytest.raises(ValueError, match="private-use"):
        chat.encode([user(text + "\uf8fe\uf8ff")])


def test_the_label_of_the_last_end_token_is_kept_even_where_it_pads() -> None:
    chat = CHATS["nemotron_v2"]
    tokenizer = chat.tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    encoded = chat.encode([user("q"), assistant("a"), user("q"), assistant("a")])
    assert encoded.labels.count(tokenizer.eos_token_id) == 2
    last = max(i for i, label in enumerate(encoded.labels) if label != IGNORE)
    assert encoded.labels[last] == encoded.ids[last] == tokenizer.eos_token_id
    assert [label for label in encoded.labels if label != IGNORE] == [
        token for token, own in zip(encoded.ids, encoded.mask, strict=True) if own
    ]


def test_reasoning_that_the_template_would_hide_is_refused() -> None:
    with pytest.raises(ValueError, match="the last message has reasoning"):
        CHATS["v2 style"].encode([user("q"), assistant("a", reasoning_content="r")], thinking=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "page", "content": "x"}], "role 'page'"),
        ([user(7)], r"messages\[0\].content must be text"),
        ([user([{"type": "input_audio"}])], r"messages\[0\].content\[0\]"),
        ([user("x"), assistant(" ")], r"messages\[1\] is an assistant's without text"),
        ([user("x"), assistant("", tool_calls=[{"function": {}}])], r"tool_calls\[0\] must name"),
        ([user("x"), assistant("", tool_calls=[{"name": "f", "arguments": "{"}])], "arguments are not JSON"),
        ([user("x"), assistant("", tool_calls=[{"name": "f", "arguments": "[]"}])], "must be a JSON object"),
        ([user("x"), {"role": "system", "content": "late"}], "the chat template refused"),
    ],
)
def test_bad_messages_are_refused_in_words(messages: Messages, message: str) -> None:
    for name in ("nemotron_v2", "chatml"):
        with pytest.raises(ValueError, match=message):
            CHATS[name].encode(messages)


def test_templates_whose_turns_cannot_be_told_apart_are_refused() -> None:
    endless = "{%- for m in messages -%}{{- '<SPECIAL_11>' + m.role + m.content -}}{%- endfor -%}"
    with pytest.raises(ValueError, match="none of the end tokens"):
        Chat(byte_tokenizer(V2, "</s>", endless)).encode([user("x"), assistant("y")])
    shouting = endless.replace("m.content", "m.content[:4] + '</s>'")
    with pytest.raises(ValueError, match="changes the assistant's words"):
        Chat(byte_tokenizer(V2, "</s>", shouting)).encode([user("x"), assistant("yyyy")])


def test_which_template_fits_is_told_by_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Chat(byte_tokenizer(("<s>", "</s>"), "</s>"))
    both = (*V2, "<|im_start|>", "<|im_end|>")
    assert Chat(byte_tokenizer(both, "<SPECIAL_12>")).template_source == "nemotron_v2"
    assert Chat(byte_tokenizer(both, "<|im_end|>")).template_source == "chatml"
    with pytest.raises(ConfigError, match="do not tell which"):
        Chat(byte_tokenizer(both, "</s>"))
    byte_tokenizer(V2, "<SPECIAL_12>", PLAIN_HEADER).save_pretrained(tmp_path)
    chat = Chat.from_folder(tmp_path)
    assert (chat.template_source, chat.template()) == ("checkpoint", PLAIN_HEADER)


def test_a_config_may_name_the_token_that_ends_a_turn(tmp_path: Path) -> None:
    template = PLAIN_HEADER.replace("</s>", "<|endoftext|>")
    byte_tokenizer((*V2, "<|endoftext|>"), "</s>", template).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, len(V2)]}))
    chat = Chat.from_folder(tmp_path)
    assert spoken(chat, chat.encode([user("x"), assistant("y")])) == ["y<|endoftext|>"]


def test_images_grow_to_their_tokens() -> None:
    image, start, end = 7, 8, 9
    assert expand_images([1, 7, 2, 7], [3, 1], image, start, end) == [1, 8, 7, 7, 7, 9, 2, 8, 7, 9]
    assert expand_images([8, 7, 9, 2], [3], image, start, end) == [8, 7, 7, 7, 9, 2]
    assert expand_images([8, 7, 7, 7, 9], [3], image, start, end) == [8, 7, 7, 7, 9]
    assert expand_images([7, 7, 1], [2, 2], image) == [7, 7, 7, 7, 1]
    assert expand_images([1, 2], [], None) == [1, 2]
    for ids, counts, message in (
        ([7, 1], [2, 2], "1 image placeholders for 2 images"),
        ([7, 1], [], "1 image placeholders for 0 images"),
        ([8, 7, 1], [2], "delimiter 8 at its side but not 9"),
        ([1, 7, 9], [2], "delimiter 9 at its side but not 8"),
        ([7], [0], "image 0 has 0 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            expand_images(ids, counts, image, start, end)


@pytest.mark.parametrize("name", ["nemotron_v2", "open header"])  # bare placeholders, and ones with delimiters
def test_spans_follow_images_that_grow(name: str) -> None:
    chat = CHATS[name]
    special = SpecialIds.resolve(chat.tokenizer, {})
    messages = [user([IMAGE, {"type": "text", "text": "<image>?"}]), assistant("one"), user([IMAGE]), assistant("two")]
    encoded = chat.encode(messages)
    grown = encoded.expand_images([256 * 5, 1], special)
    assert spoken(chat, grown) == spoken(chat, encoded)
    assert grown.ids == expand_images(encoded.ids, [1280, 1], special.image, special.image_start, special.image_end)
    assert [grown.ids.count(i) for i in (special.image, special.image_start, special.image_end)] == [1281, 2, 2]
    assert special.image not in grown.labels
    again = grown.expand_images([1280, 1], special)
    assert again == grown


def test_the_tokenizer_alone_is_not_changed_by_a_chat() -> None:
    tokenizer: PreTrainedTokenizerFast = CHATS["nemotron_v2"].tokenizer
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer("<image>", add_special_tokens=False)["input_ids"]) == "<image>"
    assert len(tokenizer("<image>", add_special_tokens=False)["input_ids"]) == 1
