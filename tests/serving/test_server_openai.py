"""The official client against the server: what it sends is understood, what it gets back it can parse."""

from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from holotron.engine import LLM, SamplingParams
from tests.engine.tiny import picture
from tests.serving.running import Running, eventually, image_part

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"choice": {"enum": ["left", "right"]}, "sure": {"type": "boolean"}},
    "required": ["choice", "sure"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something",
            "parameters": {
                "type": "object",
                "properties": {"where": {"$ref": "#/$defs/place"}},
                "required": ["where"],
                "additionalProperties": False,
                "$defs": {"place": {"enum": [f"{name}-here", f"{name}-there"]}},
            },
        },
    }
    for name in ("click", "scroll")
]


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.openai()


@pytest.fixture(scope="module")
def thinking(thinking_server: Running) -> OpenAI:
    return thinking_server.openai()


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_a_reply_is_that_of_the_engine(client: OpenAI, server: Running) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    with server.http() as http:
        prompt = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": prompt}).json()["prompt"]
    assert "hello" in text
    raw = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == raw.choices[0].text and choice.message.content
    assert choice.finish_reason == raw.choices[0].finish_reason
    assert answer.model == "tiny" and answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == len(prompt) + answer.usage.completion_tokens


def test_streamed_and_whole_are_the_same(client: OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 5, "seed": 7}
    settings |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finishes[-1] == whole.choices[0].finish_reason and not any(finishes[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    logprobs = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert whole.choices[0].logprobs is not None
    assert logprobs == whole.choices[0].logprobs.content
    assert len(logprobs) == whole.usage.completion_tokens


def test_logprobs_are_probabilities(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=5
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert entries
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and len(values) == 5
        assert entry.logprob == values[0]  # greedy
        assert sum(map(math.exp, values)) <= 1.001
    spelled = b"".join(bytes(entry.bytes or []) for entry in entries).decode("utf-8", "replace")
    assert spelled == answer.choices[0].message.content
    old = client.completions.create(model="tiny", prompt="hello", max_tokens=5, temperature=0, logprobs=2)
    probabilities = old.choices[0].logprobs
    assert probabilities is not None and probabilities.tokens is not None and probabilities.top_logprobs is not None
    assert len(probabilities.tokens) == 5 and len(probabilities.top_logprobs[0]) == 2


def test_n_choices_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    def texts(**more: Any) -> list[str | None]:
        found = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, temperature=8, n=3, **more)
        assert [c.index for c in found.choices] == [0, 1, 2]
        assert found.usage is not None and found.usage.completion_tokens > 20
        return [c.message.content for c in found.choices]

    first = texts(seed=3)
    assert len(set(first)) == 3
    assert texts(seed=3) == first != texts(seed=-4)
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=20, temperature=8, n=3, seed=3, stream=True
    ):
        choice = chunk.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(3)] == first


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            "extra_body": {"structured_outputs": {"json": SCHEMA}},
        },
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client: OpenAI, fields: dict[str, Any], stream: bool) -> None:
    made: Any = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=200, temperature=3, stream=stream, **fields
    )
    text = "".join(c.choices[0].delta.content or "" for c in made) if stream else made.choices[0].message.content
    value = json.loads(text)
    assert set(value) == {"choice", "sure"} and value["choice"] in ("left", "right")


def test_other_structures(client: OpenAI) -> None:
    def ask(**fields: Any) -> str:
        answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=400, temperature=2, **fields)
        return answer.choices[0].message.content or ""

    assert ask(extra_body={"guided_choice": ["yes", "no"]}) in ("yes", "no")
    assert ask(extra_body={"structured_outputs": {"choice": ["ja"]}}) == "ja"
    assert ask(extra_body={"guided_regex": "[ab]{5}"}).strip("ab") == ""
    assert len(ask(extra_body={"structured_outputs": {"regex": "[ab]{5}"}})) == 5
    assert client.completions.create(
        model="tiny", prompt="x", extra_body={"guided_choice": ["seven"]}
    ).choices[0].text == "seven"  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"click", "scroll"}),
        ("any", {"click", "scroll"}),
        ({"type": "function", "function": {"name": "scroll"}}, {"scroll"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_calls(thinking: OpenAI, choice: Any, names: set[str], stream: bool) -> None:
    made: Any = thinking.chat.completions.create(
        model="tiny", messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=2000, temperature=1, stream=stream
    )
    if stream:
        chunks = list(made)
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        assert [call.index for call in calls] == list(range(len(calls)))
        content, finish = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        calls, content = made.choices[0].message.tool_calls, made.choices[0].message.content
        finish = made.choices[0].finish_reason
    assert finish == "tool_calls" and not content
    assert 1 <= len(calls) <= (1 if isinstance(choice, dict) else 8) and len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.function.name in names
        assert json.loads(call.function.arguments)["where"].startswith(f"{call.function.name}-")


def test_one_call_at_a_time(thinking: OpenAI) -> None:
    for seed in range(3):
        made = thinking.chat.completions.create(
            model="tiny", messages=HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert len(made.choices[0].message.tool_calls or ()) == 1


def test_tools_are_shown_and_results_are_read(thinking: OpenAI, thinking_server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "click", "arguments": '{"where": "click-here"}'}}
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "it worked"},
    ]
    for choice in ("auto", "none"):
        answer = thinking.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=3
        )
        assert answer.choices[0].message.tool_calls is None
    with thinking_server.http() as http:
        shown = http.post("/tokenize", json={"messages": messages, "tools": TOOLS, "return_token_strs": True}).json()
    text = "".join(shown["token_strs"])
    for part in ("<AVAILABLE_TOOLS>", "scroll-there", '<TOOLCALL>[{"name": "click"', "<TOOL_RESPONSE>[it worked]"):
        assert part in text


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_comes_first_and_apart(thinking: OpenAI, stream: bool) -> None:
    made: Any = thinking.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=300, temperature=1, stream=stream,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        extra_body={"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 9},
    )  # fmt: skip
    if stream:
        deltas = [c.choices[0].delta.to_dict() for c in made]
        message = {
            key: "".join(d.get(key) or "" for d in deltas) for key in ("reasoning", "reasoning_content", "content")
        }
    else:
        assert made.usage.completion_tokens_details.reasoning_tokens >= 9
        message = made.choices[0].message.to_dict()
    assert message["reasoning"] == message["reasoning_content"] and message["reasoning"]
    assert "think>" not in message["reasoning"] + message["content"]
    assert json.loads(message["content"]).keys() == {"choice", "sure"}


def test_thinking_can_be_switched_off(thinking: OpenAI, thinking_server: Running) -> None:
    def prompt(**fields: Any) -> str:
        with thinking_server.http() as http:
            shown = http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True, **fields}).json()
        return "".join(shown["token_strs"])

    assert prompt(chat_template_kwargs={"enable_thinking": True}).endswith("<think>\n")
    assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith("<think></think>")
    off = thinking.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "/think of it"}], max_tokens=5, reasoning_effort="none"
    )
    assert off.choices[0].message.to_dict()["reasoning"] is None
    cut = thinking.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True},
    )  # fmt: skip
    message = cut.choices[0].message.to_dict()
    assert message["content"] is None and message["reasoning"] and cut.choices[0].finish_reason == "length"


def test_images_in_order(client: OpenAI, server: Running) -> None:
    parts = [image_part(picture(48, 32, 1)), {"type": "text", "text": "and"}, image_part(picture(32, 32, 2), "JPEG")]
    messages: list[Any] = [{"role": "user", "content": parts}]
    answers = [
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, temperature=0) for _ in range(2)
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1]
    usage = [answer.usage.to_dict() if answer.usage else {} for answer in answers]
    details: Any = usage[1]["prompt_tokens_details"]
    assert details["image_tokens"] > 0 and details["cached_tokens"] > 0  # the prefix was still known
    assert usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"]


def test_stop_strings(client: OpenAI, server: Running) -> None:
    whole = client.completions.create(
        model="tiny", prompt="abc", max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
    )
    text = whole.choices[0].text
    stop = text[10:13]
    cut = client.completions.create(
        model="tiny", prompt="abc", max_tokens=30, temperature=0, stop=[stop, "never there"]
    )
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    streamed = client.completions.create(
        model="tiny", prompt="abc", max_tokens=30, temperature=0, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


def test_several_prompts(client: OpenAI) -> None:
    alone = [
        client.completions.create(model="tiny", prompt=p, max_tokens=6, temperature=0).choices[0].text
        for p in ("one", "two")
    ]
    both = client.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=6, temperature=0)
    assert [choice.text for choice in both.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert both.usage is not None and both.usage.prompt_tokens == 6


def test_many_clients_at_once(server: Running) -> None:
    def ask(i: int) -> str | None:
        return server.openai().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"client {i % 4}"}], max_tokens=10, temperature=0
        ).choices[0].message.content  # fmt: skip

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(32)))
    assert all(texts[i] == texts[i % 4] for i in range(32))
    eventually(lambda: not server.llm.has_unfinished)
    server.llm.check_integrity()


def test_metrics_count_what_was_done(tiny_llm: LLM, server: Running) -> None:
    def read() -> dict[str, float]:
        with server.http() as http:
            lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = read()
    answer = server.chat(max_tokens=7, ignore_eos=True).json()
    after = read()

    def grown(name: str, labels: str = "") -> float:
        key = f'vllm:{name}{{{labels}model_name="tiny"}}'
        return after[key] - before.get(key, 0.0)

    assert grown("prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert grown("generation_tokens_total") == 7
    assert grown("request_success_total", 'finished_reason="length",') == 1
    assert grown("time_to_first_token_seconds_count") == 1 and grown("time_to_first_token_seconds_sum") > 0
    assert grown("inter_token_latency_seconds_count") == 6
    assert grown("e2e_request_latency_seconds_sum") >= grown("inter_token_latency_seconds_sum") > 0
    assert grown("prefix_cache_queries_total") > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert f'vllm:{name}{{model_name="tiny"}}' in after
    assert after['holotron:preprocessing_queue_depth{model_name="tiny"}'] == 0


def test_a_caller_in_the_process_gets_the_same(thinking_server: Running, thinking: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [image_part(picture(64, 40, 3)), {"type": "text", "text": "?"}]}]
    online = thinking.chat.completions.create(model="tiny", messages=messages, max_tokens=16, temperature=0)
    inside = asyncio.run(thinking_server.service.engine.chat(messages, SamplingParams(max_tokens=16)))
    assert online.choices[0].message.content == inside.outputs[0].text
