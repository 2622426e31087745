"""The HTTP policy against a real server that behaves well, badly or not at all."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import time
from typing import Any

import pytest
from PIL import Image

from holotron.contract.contract import Contract, get_contract
from holotron.contract.conversation import Conversation, Screenshot, Turn
from holotron.contract.policy import ContractError, Decision, PolicyError
from holotron.contract.step import Answer as AnswerCall
from holotron.contract.step import Click
from holotron.serving.http_policy import KEY_VARIABLE, HttpPolicy, is_endpoint
from tests.serving.endpoint import STEP_TEXT, Answer, Endpoint, completion, serve

SECRET = "sk-very-secret-0123456789"


@pytest.fixture
def contract() -> Contract:
    return get_contract("holotron3")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def conversation(answer_now: bool = False, goal: str = "Click Ok. Ünïcode 漢字") -> Conversation:
    buffer = io.BytesIO()
    Image.new("RGB", (160, 160), "white").save(buffer, "PNG")
    shot = Screenshot(buffer.getvalue(), 160, 160, 160.0, 160.0)
    return Conversation(goal, [Turn(shot)], answer_now=answer_now)


async def decide(endpoint: Endpoint | str, contract: Contract, **options: Any) -> Decision:
    url = endpoint if isinstance(endpoint, str) else endpoint.url
    talk = options.pop("talk", None) or conversation()
    policy = HttpPolicy(url, options.pop("model", "pilot"), contract, **({"pause": 0.0} | options))
    try:
        return await policy.decide(talk)
    finally:
        await policy.close()


async def test_a_valid_step(contract: Contract) -> None:
    with serve(completion(reasoning="I look at the button.")) as endpoint:
        decision = await decide(endpoint, contract)
    assert decision.step.tool_call == Click(element="Ok", x=500, y=250)
    assert (decision.attempts, decision.raw_text) == (1, STEP_TEXT)
    assert decision.extra["reasoning"] == "I look at the button."
    usage = decision.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (321, 300, 45)


async def test_request_holds_the_contracts_messages_schema_and_sampling(contract: Contract) -> None:
    with serve(completion()) as endpoint:
        await decide(endpoint, contract, structured_outputs=True, extra={"seed": 7})
    body = endpoint.bodies[0]
    assert body["messages"] == contract.messages(conversation())
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema == contract.schema() == body["structured_outputs"]["json"]
    # The very bytes that the prompt shows, key order included.
    assert json.dumps(schema, separators=(",", ":"), ensure_ascii=False) in body["messages"][0]["content"]
    assert {k: body[k] for k in ("model", "temperature", "top_p", "max_tokens", "seed")} == {
        "model": "pilot", "temperature": 0.8, "top_p": 0.95, "max_tokens": 4096, "seed": 7}  # fmt: skip
    assert not {"extra_body", "retry", "schema_name"} & set(body)


async def test_the_schema_is_sent_only_where_asked(contract: Contract) -> None:
    with serve(completion()) as endpoint:
        await decide(endpoint, contract, response_format=False)
    assert not {"response_format", "structured_outputs"} & set(endpoint.bodies[0])


async def test_a_forced_answer_asks_for_the_answer_schema(contract: Contract) -> None:
    text = json.dumps({"thought": "t", "tool_call": {"tool_name": "answer", "content": "42"}})
    with serve(completion(text)) as endpoint:
        decision = await decide(endpoint, contract, talk=conversation(answer_now=True))
    assert decision.step.tool_call == AnswerCall(content="42")
    assert endpoint.bodies[0]["response_format"]["json_schema"]["schema"] == contract.schema(True)


BAD_MODEL = {
    "nonsense": completion("I would click the button, I think."),
    "cut off": completion(STEP_TEXT, finish="length"),
    "filtered": completion(STEP_TEXT, finish="content_filter"),
    "unknown tool": completion(STEP_TEXT.replace('"click"', '"smash"')),
    "float coordinate": completion(STEP_TEXT.replace("500", "0.5")),
    "out of range": completion(STEP_TEXT.replace("500", "1001")),
    "two objects": completion(STEP_TEXT + STEP_TEXT),
    "deep": completion("[" * 100_000),
    "huge number": completion(STEP_TEXT.replace("500", "9" * 5000)),
}


@pytest.mark.parametrize("name", BAD_MODEL)
async def test_unusable_output_is_asked_for_again_and_then_the_models_failure(name: str, contract: Contract) -> None:
    with serve(BAD_MODEL[name]) as endpoint, pytest.raises(ContractError) as caught:
        await decide(endpoint, contract)
    assert len(endpoint.raw) == caught.value.attempts == 3
    assert caught.value.raw_text and caught.value.usage and caught.value.usage.output_tokens == 45


async def test_a_retry_sends_the_same_messages_cooler(contract: Contract) -> None:
    bad = completion("nonsense"), completion(STEP_TEXT, finish="length")
    with serve(*bad, completion()) as endpoint:
        decision = await decide(endpoint, contract)
    assert decision.attempts == 3 and len(decision.extra["discarded"]) == 2
    assert [body.pop("temperature") for body in endpoint.bodies] == [0.8, 0.7, 0.7]
    messages = [raw.partition(b'"messages":')[2].partition(b'"stream":')[0] for raw in endpoint.raw]
    assert len(messages[0]) > 1000 and messages[0] == messages[1] == messages[2]


@pytest.mark.parametrize(("first", "later"), [(0.0, 0.0), (0.45, 0.4), (1.0, 0.9)])
async def test_temperature_of_retries(first: float, later: float, contract: Contract) -> None:
    with serve(completion("nonsense"), completion()) as endpoint:
        await decide(endpoint, contract, extra={"temperature": first})
    assert [body["temperature"] for body in endpoint.bodies] == [first, pytest.approx(later)]


async def test_the_pause_between_attempts(contract: Contract) -> None:
    with serve(completion("nonsense"), completion()) as endpoint:
        started = time.monotonic()
        await decide(endpoint, contract, pause=0.3)
    assert time.monotonic() - started >= 0.3


REASONING = {
    "inline": f"<think>Which one? {{}}</think>\n{STEP_TEXT}",
    "orphan close": f"Which one?</think>{STEP_TEXT}",
    "twice": f"<think>a</think><think>b</think>{STEP_TEXT}",
}


@pytest.mark.parametrize("name", REASONING)
async def test_inline_reasoning_is_stripped_and_counted(name: str, contract: Contract) -> None:
    with serve(completion(REASONING[name])) as endpoint:
        decision = await decide(endpoint, contract)
    assert decision.step.thought == "The button is in view."
    assert decision.extra["inline_think"] == (2 if name == "twice" else 1)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_is_read_from_either_field(field: str, contract: Contract) -> None:
    with serve(completion(**{field: "hm"})) as endpoint:
        assert (await decide(endpoint, contract)).extra == {"reasoning": "hm"}


BAD_SERVER = {
    "500": (Answer({"error": {"message": "out of memory"}}, 500), "out of memory"),
    "502 page": (Answer(b"<html>Bad gateway</html>", 502), "Bad gateway"),
    "429": (Answer({"error": "slow down"}, 429), "slow down"),
    "no JSON": (Answer(b"<html>Welcome to nginx</html>"), "Welcome to nginx"),
    "empty body": (Answer(b""), "no JSON object"),
    "a list": (Answer([1, 2]), "no JSON object"),
    "deep JSON": (Answer(b"[" * 200_000), "no JSON object"),
    "other JSON": (Answer({"status": "ok"}), "status"),
    "no choices": (Answer({"choices": []}), "choices"),
    "null message": (Answer({"choices": [{"message": None}]}), "choices"),
    "content parts": (Answer({"choices": [{"message": {"content": [{"type": "text"}]}}]}), "list"),
    "too large": (Answer(b" " * (17 << 20)), "16 MiB"),
    "null content": (completion(None), "parser"),
    "only reasoning": (completion("", reasoning_content="I click it."), "only reasoning"),
    "only inline reasoning": (completion("<think>I click it.</think>"), "only reasoning"),
    "tool call text": (completion('<tool_call>{"name": "click"}</tool_call>'), "tool-call parser"),
    "tool calls": (completion(None, "tool_calls", tool_calls=[{"id": "1"}]), "tool-call parser"),
    "slow": (Answer({}, wait=1.0), "within 0.3 s"),
    "trickle": (Answer(b" " * 50, drip=0.05), "within 0.3 s"),
}


@pytest.mark.parametrize("name", BAD_SERVER)
async def test_a_broken_server_is_infrastructure(name: str, contract: Contract) -> None:
    answer, said = BAD_SERVER[name]
    late = name in ("slow", "trickle")
    timeout = 0.3 if late else 20.0
    with serve(answer) as endpoint, pytest.raises(PolicyError) as caught:
        await decide(endpoint, contract, timeout=timeout)
    message = str(caught.value)
    assert "in 3 attempt(s)" in message
    assert late or len(endpoint.raw) == 3  # a request given up may not even have arrived
    assert endpoint.url in message and said in message and "Check that the server is running" in message
    assert len(message) < 1000


async def test_a_server_that_recovers_is_no_failure(contract: Contract) -> None:
    with serve(Answer({}, 503), Answer(b"starting"), completion()) as endpoint:
        decision = await decide(endpoint, contract)
    assert decision.attempts == 3 and decision.step.tool_call.tool_name == "click"


ADVICE = {
    401: "HOLOTRON_API_KEY",
    403: "HOLOTRON_API_KEY",
    404: "model name",
    400: "too many images",
    308: "redirects",
}


@pytest.mark.parametrize("status", ADVICE)
async def test_a_misconfigured_request_is_not_repeated(status: int, contract: Contract) -> None:
    with serve(Answer({"error": {"message": "too many images"}}, status)) as endpoint:
        with pytest.raises(PolicyError, match=ADVICE[status]) as caught:
            await decide(endpoint, contract)
    assert len(endpoint.raw) == 1 and endpoint.url in str(caught.value)


async def test_nobody_listens(contract: Contract) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(PolicyError, match=f"{url}/v1 gave no usable answer in 3 attempt"):
        await decide(url, contract)


async def test_the_key_is_sent_and_never_shown(contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    echo = Answer({"error": {"message": f"Incorrect API key provided: {SECRET}."}}, 401)
    with serve(echo) as endpoint, pytest.raises(PolicyError) as caught:
        await decide(endpoint, contract)
    assert endpoint.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert SECRET not in str(caught.value) and "[key]" in str(caught.value)
    with serve(Answer(SECRET.encode())) as endpoint, pytest.raises(PolicyError) as caught:
        await decide(endpoint, contract)
    assert SECRET not in str(caught.value)
    assert all(SECRET.encode() not in raw for raw in endpoint.raw)


async def test_no_key_no_header(contract: Contract) -> None:
    with serve(completion()) as endpoint:
        await decide(endpoint, contract)
    assert "Authorization" not in endpoint.headers[0]


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
async def test_where_a_base_url_may_end(ending: str, contract: Contract) -> None:
    with serve(completion()) as endpoint:
        assert (await decide(endpoint.url + ending, contract)).attempts == 1


async def test_the_only_model_is_found(contract: Contract) -> None:
    with serve(completion()) as endpoint:
        await decide(endpoint, contract, model=None)
        assert endpoint.bodies[0]["model"] == "pilot"
        endpoint.models = {"data": [{"id": "a"}, {"id": "b"}]}
        with pytest.raises(PolicyError, match=r"serves 2 models \(a, b\): name one"):
            await decide(endpoint, contract, model=None)
        policy = HttpPolicy(endpoint.url, "c", contract)
        with pytest.raises(PolicyError, match="does not serve 'c': name one of a, b"):
            await policy.check()
        await policy.close()


async def test_a_proxy_for_the_world_is_not_asked_about_this_machine(
    contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    with serve(completion()) as endpoint:
        assert (await decide(endpoint, contract)).attempts == 1


async def test_concurrent_decisions_reach_the_server_together(contract: Contract) -> None:
    answer = completion()
    answer.meeting = threading.Barrier(8)
    with serve(answer) as endpoint:
        policy = HttpPolicy(endpoint.url, "pilot", contract)
        decisions = await asyncio.gather(*(policy.decide(conversation()) for _ in range(8)))
        await policy.close()
    assert [decision.attempts for decision in decisions] == [1] * 8


async def test_half_a_surrogate_pair_cannot_get_in(contract: Contract) -> None:
    body = completion(STEP_TEXT.replace("in view", "in \ud800 view")).body
    with serve(Answer(json.dumps(body).encode())) as endpoint:
        decision = await decide(endpoint, contract)
    assert decision.step.thought == "The button is in ? view." and decision.raw_text.encode()


@pytest.mark.parametrize("url", ["", "weights/pilot", "ftp://host", "http://", "http://u:p@host/v1", "http://h/?key=1"])
def test_what_is_no_endpoint_is_refused(url: str, contract: Contract) -> None:
    with pytest.raises(ValueError) as caught:
        HttpPolicy(url, "pilot", contract)
    assert "u:p" not in str(caught.value) and "key=1" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "endpoint"),
    [("http://localhost:8000", True), ("HTTPS://api.example/v1", True), ("weights/pilot", False),
     ("https", False), ("org/model", False), ("", False)],
)  # fmt: skip
def test_is_endpoint(model: str, endpoint: bool) -> None:
    assert is_endpoint(model) is endpoint
