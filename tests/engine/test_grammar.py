from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from holotron.contract.holotron3 import Holotron3
from holotron.contract.step import (
    Answer,
    Click,
    Goal,
    GoBack,
    Hotkey,
    Scroll,
    Step,
    ToolCall,
    UpdatePlan,
    Write,
)
from holotron.engine import LLM, SamplingParams, StructuredOutputs
from holotron.engine.errors import ModelLoadError
from holotron.engine.grammar import Grammars
from holotron.engine.vocabulary import Vocabulary
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.tokenizer import EOS
from tests.engine.tiny import tiny_model, tiny_tokenizer

WORDS = [
    "note",
    "thought",
    "tool_call",
    "x",
    "y",
    "button",
    "left",
    "right",
    "É",
    "a b",
    'q"q',
    "\\",
    "\n",
    "",
]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose every value is bounded in length."""
    kinds = ["enum", "boolean", "null", "integer", "const", "string", "any"]
    kind = rng.choice(kinds + ["object"] * 6 + ["array"]) if depth < 3 else rng.choice(kinds)
    if depth == 0:
        kind = "object"
    if kind == "object":
        names = rng.sample(WORDS[:8], rng.randint(1, 4))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": names if rng.random() < 0.7 else names[:1],
            "additionalProperties": False,
        }
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": 3}
    if kind == "any":
        return {"anyOf": [random_schema(rng, 3), random_schema(rng, 3)]}
    simple: dict[str, dict[str, Any]] = {
        "enum": {"enum": rng.sample(WORDS, rng.randint(1, 4))},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "integer": {"type": "integer", "minimum": 0, "maximum": rng.choice([7, 40, 1000])},
        "const": {"const": rng.choice(WORDS)},
        "string": {"type": "string", "maxLength": rng.choice([0, 3, 6])},
    }
    return simple[kind]


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` satisfies a schema of `random_schema`'s kind."""
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return bool(value == schema["const"])
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(known)
            and all(fits(value[name], known[name]) for name in value)
        )
    if kind == "array":
        right = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return right and all(fits(item, schema["items"]) for item in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return value is None if kind == "null" else isinstance(value, bool)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_skipping_changes_no_token_and_every_text_fits_its_schema(
    seed: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(16)]
    params = [SamplingParams(max_tokens=900, structured_outputs=StructuredOutputs(json=s)) for s in schemas]
    prompts = [f"schema {i}" for i in range(len(schemas))]
    model = tiny_model(tokenizer, seed=seed, vision=False)
    with_skipping = LLM(model, tokenizer).generate(prompts, params)
    without = LLM(model, tokenizer, skip_forced_tokens=False).generate(prompts, params)
    for schema, fast, slow in zip(schemas, with_skipping, without, strict=True):
        assert fast.outputs[0].token_ids == slow.outputs[0].token_ids
        assert fast.outputs[0].cumulative_logprob == pytest.approx(slow.outputs[0].cumulative_logprob, abs=1e-2)
        for output in (fast, slow):
            assert output.outputs[0].finish_reason == "stop"
            text = output.outputs[0].text
            value = json.loads(text)
            assert fits(value, schema), (text, schema)
            assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":")) or "\\" in text
    assert sum(output.metrics.forced_tokens for output in with_skipping) > 100
    assert all(output.metrics.forced_tokens == 0 for output in without)


def test_sampled_text_is_the_same_with_and_without_skipping(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    schema = Holotron3().schema()
    params = [
        SamplingParams(temperature=2.0, seed=i, max_tokens=60, structured_outputs=StructuredOutputs(json=schema))
        for i in range(6)
    ]
    fast = LLM(model, tokenizer).generate(["go"] * 6, params)
    slow = LLM(model, tokenizer, skip_forced_tokens=False).generate(["go"] * 6, params)
    assert [f.outputs[0].token_ids for f in fast] == [s.outputs[0].token_ids for s in slow]


STEPS: list[tuple[str | None, str, ToolCall]] = [
    (None, "I click it.", Click(element="OK", x=0, y=1000)),
    (None, "", Click(element='a "quoted" É', x=57, y=570, button="right")),
    ("a note", "É il pulsante", Scroll(element="list", x=100, y=10, direction="down")),
    (None, "I click it.", Write(content="x\\y", press_enter=False, overwrite=False)),
    ("", "type", Write(content="", press_enter=True)),
    (None, "back", GoBack()),
    (None, "keys", Hotkey(keys=["ctrl", "a"])),
    (None, "plan", UpdatePlan(goals=[Goal(title="one", status="todo")])),
    (None, "I click it.", Answer(content="日本 done")),
]


@pytest.mark.parametrize(("note", "thought", "call"), STEPS)
def test_what_models_are_trained_on_stays_possible_token_by_token(
    note: str | None, thought: str, call: ToolCall, llm: LLM
) -> None:
    contract = Holotron3()
    constraint = Grammars(llm.vocabulary).constraint(StructuredOutputs(json=contract.schema()))
    for token in llm.vocabulary.encode(contract.dump(Step(note=note, thought=thought, tool_call=call))):
        assert constraint.allowed()[token], llm.vocabulary.token_bytes[token]
        forced = constraint.forced()
        assert forced in (None, token)
        constraint.accept(token)
    assert constraint.complete


def test_a_forced_span_waits_for_a_longer_piece(llm: LLM) -> None:
    """`{"note":` is forced, but pieces go on beyond it, so the model chooses among them and a byte."""
    constraint = Grammars(llm.vocabulary).constraint(StructuredOutputs(json=Holotron3().schema()))
    allowed = {llm.vocabulary.token_bytes[i] for i in constraint.allowed().nonzero()[0]}
    assert allowed == {b"{", b'{"note":"', b'{"note":null,"thought":"'}
    assert constraint.forced() is None


def test_forced_bytes_are_the_tokenizers_own_pieces(llm: LLM) -> None:
    text = '{"note":null,"thought":"I click it."}'
    wanted = StructuredOutputs(choice=[text])
    output = llm.generate("go", SamplingParams(structured_outputs=wanted))[0]
    assert output.outputs[0].text == text
    assert output.outputs[0].token_ids == llm.vocabulary.encode(text)
    assert output.outputs[0].finish_reason == "stop"
    assert output.metrics.forced_tokens == output.metrics.output_tokens


@pytest.mark.parametrize("regex", ["[ab]{3}-[0-9]{2}", '(a|b)"/\\\\', "é{1,2}x"])
def test_regex(regex: str, llm: LLM) -> None:
    output = llm.generate("go", SamplingParams(structured_outputs=StructuredOutputs(regex=regex)))[0]
    assert re.fullmatch(regex, output.outputs[0].text)


def test_choices_with_special_characters(llm: LLM) -> None:
    choices = ['yes "sir"', "no\nway", "peut-être", "back\\slash", "yes"]
    for seed in range(8):
        params = SamplingParams(temperature=3.0, seed=seed, structured_outputs=StructuredOutputs(choice=choices))
        assert llm.generate("go", params)[0].outputs[0].text in choices


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "string", "format": "made-up"},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "pattern": "a(?=b)"},
        {"type": "frob"},
        {"$ref": "http://localhost:1/schema"},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused_at_once(schema: dict[str, Any], llm: LLM) -> None:
    with pytest.raises(ValueError, match="structured_outputs cannot be enforced: "):
        llm.prepare("go", SamplingParams(structured_outputs=StructuredOutputs(json=schema)))


def test_a_broken_regex_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="unclosed group"):
        llm.prepare("go", SamplingParams(structured_outputs=StructuredOutputs(regex="a(b")))


def test_no_schema_opens_the_door_to_whitespace(llm: LLM) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    constraint = Grammars(llm.vocabulary).constraint(StructuredOutputs(json=schema))
    for text in ("{", '"a"', ":"):
        for token in llm.vocabulary.encode(text):
            constraint.accept(token)
            if not text.startswith('"'):
                starts = {llm.vocabulary.token_bytes[i][:1] for i in constraint.allowed().nonzero()[0]}
                assert not starts & {b" ", b"\n", b"\t", b"\r"}


def test_length_is_said_when_the_text_is_cut(llm: LLM) -> None:
    wanted = StructuredOutputs(json={"type": "string", "minLength": 50})
    output = llm.generate("go", SamplingParams(max_tokens=7, structured_outputs=wanted))[0]
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.output_tokens == 7
    # forced tokens count against the limit too
    wanted = StructuredOutputs(choice=["0123456789"])
    output = llm.generate("go", SamplingParams(max_tokens=7, structured_outputs=wanted))[0]
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("0123456", "length")


def test_every_token_is_its_own_text(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = Vocabulary(tokenizer, len(tokenizer) + 5)
    pieces = ["I click it.", "É il pulsante", ',"x":1000', '"}}']
    for piece in pieces:
        assert vocabulary.token_bytes[tokenizer.convert_tokens_to_ids(piece)] == piece.encode()
    assert sorted(vocabulary.token_bytes[:256]) == [bytes([i]) for i in range(256)]
    assert vocabulary.token_bytes[tokenizer.convert_tokens_to_ids(EOS)] == b""
    assert vocabulary.token_bytes[len(tokenizer) :] == [b""] * 5
    anything = Grammars(vocabulary).constraint(StructuredOutputs(regex="(.|\n)*"))
    assert not anything.allowed()[vocabulary.token_bytes.index(b"\xff")]


def test_a_vocabulary_larger_than_the_model_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ModelLoadError, match="the model only 100"):
        Vocabulary(tokenizer, 100)


def test_padding_of_the_vocabulary_is_never_generated() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, vision=False, vocab_size=len(tokenizer) + 2000)
    params = SamplingParams(temperature=100.0, seed=1, max_tokens=60, ignore_eos=True)
    output = LLM(model, tokenizer).generate("go", params)[0]
    assert max(output.outputs[0].token_ids) < len(tokenizer)
