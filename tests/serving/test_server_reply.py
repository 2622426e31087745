"""A reply cut into reasoning, content and calls: the same however its text is cut into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from holotron.engine import LLM
from holotron.engine.grammar import Grammars
from holotron.engine.sampling_params import StructuredOutputs
from holotron.model.tiny_checkpoints import make_tiny
from holotron.serving.server.reply import Channels, Delta, ReplyReader, ReplyText, Spelling
from holotron.serving.server.schemas import FunctionTool
from holotron.serving.server.thinking import AfterThought, opens_thought
from holotron.serving.server.tools import read_calls

TOOLS = [
    FunctionTool.model_validate(
        {
            "name": "click",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "what": {"type": "string"}}},
        }
    )
]
CALL = '<TOOLCALL>[{"name": "click", "arguments": {"x": 5, "what": "é"}}]</TOOLCALL>'
XML = """<tool_call>
<function=click>
<parameter=x>
5
</parameter>
<parameter=what>
7
</parameter>
</function>
</tool_call>"""


def said(text: str, cuts: list[int], **options: Any) -> Delta:
    channels = Channels(options.pop("thinking", False), **options)
    whole = Delta()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        whole += channels.feed(text[start:end])
    whole += channels.finish()
    return whole


CASES: list[tuple[str, dict[str, Any], str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("plain", {}, "", "plain", []),
    ("", {}, "", "", []),
    ("  spaced  ", {}, "", "  spaced  ", []),
    ("a < b </think> c", {}, "", "a < b </think> c", []),
    ("<think>\nwhy\n</think>\n\nbecause", {}, "why", "because", []),
    ("\n<think>why</think>because ", {}, "why", "because ", []),
    ("<thin", {}, "", "<thin", []),
    ("why </th \n</think>\n because", {"thinking": True}, "why </th", "because", []),
    ("\n never ends \n", {"thinking": True}, "never ends", "", []),
    ("ends</think> \n", {"thinking": True}, "ends", "", []),
    ("</think>x", {"thinking": True}, "", "x", []),
    (CALL, {}, "", CALL, []),
    (CALL, {"tools": TOOLS}, "", "", [("click", {"x": 5, "what": "é"})]),
    (f"I click. \n{CALL}\n", {"tools": TOOLS}, "", "I click.", [("click", {"x": 5, "what": "é"})]),
    (f"hm</think>\n{XML}\n{XML}", {"tools": TOOLS, "thinking": True}, "hm", "", [("click", {"x": 5, "what": "7"})] * 2),
    ("<TOOLCALL>[{broken]</TOOLCALL>", {"tools": TOOLS}, "", "<TOOLCALL>[{broken]</TOOLCALL>", []),
    ("<TOOLCALL>[]</TOOLCALL>", {"tools": TOOLS}, "", "<TOOLCALL>[]</TOOLCALL>", []),
    ("a <TOOL", {"tools": TOOLS}, "", "a <TOOL", []),
    ("a <TOOLS>", {"tools": TOOLS}, "", "a <TOOLS>", []),
    ('[{"name":"click","arguments":{}}]', {"required": True}, "", "", [("click", {})]),
    ('[{"name":"cli', {"required": True}, "", '[{"name":"cli', []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "reasoning", "content", "calls"), CASES)
def test_channels(
    text: str, options: dict[str, Any], reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for attempt in range(12):
        if attempt == 0:
            cuts = []
        elif attempt == 1:
            cuts = list(range(1, len(text)))
        else:
            cuts = sorted(chance.sample(range(len(text) + 1), min(3, len(text))))
        found = said(text, cuts, **options)
        assert (found.reasoning, found.content) == (reasoning, content), (seed, cuts)
        assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found.calls] == calls


def test_half_characters_in_arguments_can_be_sent() -> None:
    read = read_calls('<TOOLCALL>[{"name": "\\ud800", "arguments": {"a": "\\udfff"}}]</TOOLCALL>', TOOLS)
    assert read is not None
    json.dumps(read[0], ensure_ascii=False).encode()


def test_text_holds_back_what_may_be_a_stop_and_half_characters(tiny_llm: LLM) -> None:
    spelling = Spelling(tiny_llm.vocabulary)
    tokens = [tiny_llm.vocabulary.token_bytes.index(bytes([byte])) for byte in "a€ END nd".encode()]
    text = ReplyText(spelling, ["ENDE", " ND", "END n"])
    pieces = [text.feed(token) for token in tokens]
    assert "".join(pieces) + text.finish() == "a€ "
    assert pieces[:4] == ["a", "", "", "€"]  # a character comes whole
    assert "".join(pieces[4:9]) == " "  # "END " may become the last stop
    free = ReplyText(spelling, [])
    assert "".join(map(free.feed, tokens[:3])) + free.finish() == "a\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module", params=["vl-v2", "nemotron-h-moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """One generation spells </think> in ordinary tokens, the next has a special one for it."""
    return LLM(make_tiny(request.param, tmp_path_factory.mktemp("tiny") / "model"), max_model_len=512)


def test_special_tokens_that_are_said_are_shown(checkpoint: LLM) -> None:
    spelling = Spelling(checkpoint.vocabulary)
    tokens = [*checkpoint.vocabulary.encode("why</think>so"), checkpoint.vocabulary.eos]
    reader = ReplyReader(spelling, [], Channels(thinking=True))
    delta = reader.feed(tokens)
    delta += reader.finish()
    assert (delta.reasoning, delta.content) == ("why", "so")
    assert 0 < reader.reasoning_tokens < len(tokens)


def test_prompts_that_open_a_thought(checkpoint: LLM) -> None:
    spelling = Spelling(checkpoint.vocabulary)

    def opened(content: str, **options: Any) -> bool:
        return opens_thought(
            checkpoint.prepare_chat([{"role": "user", "content": content}], None, options).prompt, spelling
        )

    assert opened("hello", enable_thinking=True) and opened("hello</think>", enable_thinking=True)
    assert not opened("hello", enable_thinking=False) and not opened("I <think>", enable_thinking=False)


def write(constraint: AfterThought, tokens: list[int]) -> None:
    for token in tokens:
        assert constraint.allowed()[token]
        constraint.accept(token)


def test_the_grammar_starts_after_the_thought(checkpoint: LLM) -> None:
    words, spelling = checkpoint.vocabulary, Spelling(checkpoint.vocabulary)
    inner = Grammars(words).constraint(StructuredOutputs(choice=["yes"]))
    constraint = AfterThought(inner, words, spelling, None)
    assert constraint.forced() is None and not constraint.complete
    assert not constraint.allowed()[list(words.stops)].any()  # a reply must follow
    write(constraint, words.encode("no, {} </thin"))
    write(constraint, words.encode(" </think>"))
    write(constraint, words.encode("yes"))
    assert constraint.complete


def test_a_thought_beyond_its_budget_is_closed(checkpoint: LLM) -> None:
    words, spelling = checkpoint.vocabulary, Spelling(checkpoint.vocabulary)
    for budget in (0, 3):
        constraint = AfterThought(None, words, spelling, budget)
        write(constraint, words.encode("xyz")[:budget])
        closing = []
        while (token := constraint.forced()) is not None:
            assert np.flatnonzero(constraint.allowed()).tolist() == [token]
            closing.append(token)
            constraint.accept(token)
        assert spelling.of(closing) == "\n</think>"
        assert constraint.allowed().all() and not constraint.complete
