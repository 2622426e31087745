"""Bad input is refused with 4xx in OpenAI's shape, and says which field; limits and keys hold."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from holotron.cli import main
from holotron.engine import LLM
from holotron.serving.server import Limits, ServerSettings, SettingsError
from tests.engine.tiny import picture
from tests.serving.running import Running, eventually, image_part, serving

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "click"}}
DEEP = "[" * 5000 + "]" * 5000


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hello"}, "messages", "array"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "system"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0]", "image_url"),
        ({"messages": HELLO + [{"role": "system", "content": "late"}]}, None, "template"),
        ({"temperature": -1}, "temperature", "greater"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens", "less"),
        ({"n": 129}, "n", "less"),
        ({"n": 17}, "n", "16"),
        ({"stop": ["a", ""]}, "stop[1]", "at least 1"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"top_logprobs": 2}, None, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "only 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "only"),
        ({"stream_options": {"include_usage": True}}, None, "stream"),
        ({"extra_body": {"top_k": 1}}, "extra_body", "client library"),
        ({"unheard_of": 1}, "unheard_of", "unknown"),
        ({"tool_choice": "required"}, None, "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "structure"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": {"type": "colour"}}}, "structured_outputs", "cannot be enforced"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "cannot be enforced"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_json": DEEP}, "guided_json", "JSON schema"),
        ({"guided_regex": "(a"}, None, ""),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "different"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "chat_template"),
        ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs", "tools"),
        ({"chat_template_kwargs": {"conversation": 5}}, None, "template"),
        ({"user": "x" * 300}, "user", "256"),
    ],
)
def test_bad_fields_are_named(thinking_server: Running, fields: dict[str, Any], param: str | None, word: str) -> None:
    with thinking_server.http() as client:
        response = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, **fields})
    error = refusal(response, 400)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert word in error["message"] and len(error["message"]) < 500


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", DEEP.encode(), b'{"messages": NaN}', b'{"temperature": 1e999}',
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"seed": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_what_is_no_request(server: Running, path: str, body: bytes) -> None:
    with server.http() as client:
        refusal(client.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt_token_ids"),
        ("/v1/completions", {"prompt": [-1]}, "prompt[0]"),
        ("/v1/completions", {"prompt": "x " * 4000}, "prompt"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": ["x"] * 9, "n": 2}, "n"),
        ("/tokenize", {}, None),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
def test_bad_completions(server: Running, path: str, body: dict[str, Any], param: str | None) -> None:
    with server.http() as client:
        assert refusal(client.post(path, json=body), 400)["param"] == param


def test_too_long_a_prompt_is_said_as_openai_says_it(server: Running) -> None:
    error = refusal(server.chat("x " * 4000), 400)
    assert error["code"] == "context_length_exceeded" and "4096" in error["message"]


def test_other_models_routes_and_methods(server: Running) -> None:
    error = refusal(server.chat(model="gpt-5"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model") and "tiny" in error["message"]
    assert server.chat(model="alias").json()["model"] == "alias"
    with server.http() as client:
        assert refusal(client.get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"
        refusal(client.get("/v1/engines"), 404)
        assert refusal(client.get("/v1/chat/completions"), 405)["type"] == "invalid_request_error"
        refusal(client.post("/v1/chat/completions", content=b"messages=1"), 415)
        assert client.get("/version").json()["version"]
        for absent in ("/docs", "/redoc"):
            refusal(client.get(absent), 404)


def test_a_structure_that_cannot_be_written_is_the_clients_fault(server: Running) -> None:
    # nothing is in both: the grammar compiles, and fails when the first token is due
    both = {"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]}
    response = server.chat(structured_outputs={"json": both})
    assert refusal(response, 400)["param"].startswith("structured_outputs")


def test_malformed_http(server: Running) -> None:
    for text in (b"GARBAGE\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), 5) as raw:
            raw.sendall(text)
            assert b" 400 " in raw.recv(4096).splitlines()[0]
    assert server.chat().status_code == 200


def test_large_bodies(tiny_llm: LLM) -> None:
    with serving(tiny_llm, Limits(body=20_000, bodies=50_000)) as running:
        big = {"messages": [{"role": "user", "content": "x" * 30_000}]}
        with running.http() as client:
            error = refusal(client.post("/v1/chat/completions", json=big), 413)
            assert error["code"] == "body_too_large"

            def pieces() -> Any:  # no Content-Length to believe
                for _ in range(30):
                    yield b"x" * 1000

            kind = {"Content-Type": "application/json"}
            refusal(client.post("/v1/chat/completions", content=pieces(), headers=kind), 413)
        held = [open_body(running, 18_000, 17_000) for _ in range(3)]
        try:
            eventually(lambda: running.service.bodies._held >= 34_000)
            time.sleep(0.2)
            response = running.chat("x" * 18_000)
            assert refusal(response, 429)["type"] == "rate_limit_error" and response.headers["retry-after"]
        finally:
            for connection in held:
                connection.close()
        eventually(lambda: running.service.bodies._held == 0)
        assert running.chat("x" * 100).status_code == 200


def open_body(running: Running, declared: int, sent: int) -> http.client.HTTPConnection:
    """A request whose body stops arriving."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(declared))
    connection.endheaders()
    connection.send(b"{" + b" " * (sent - 1))
    return connection


def test_slow_bodies_time_out_and_stall_nobody(tiny_llm: LLM) -> None:
    with serving(tiny_llm, Limits(body_seconds=0.5, requests=4)) as running:
        slow = [open_body(running, 100, 5) for _ in range(8)]
        assert running.chat().status_code == 200  # they hold no place
        for connection in slow:
            answer = connection.getresponse()
            assert answer.status == 408 and json.loads(answer.read())["error"]["type"] == "timeout_error"


def test_limits_of_images_pixels_and_tokens(tiny_llm: LLM) -> None:
    with serving(tiny_llm, Limits(images=2, pixels=48 * 32, tokens=8)) as running:
        small, large = image_part(picture(48, 32)), image_part(picture(49, 32))
        assert running.chat([small, small]).status_code == 200
        assert refusal(running.chat([small] * 3), 400)["param"] == "messages"
        error = refusal(running.chat([small, large]), 400)
        assert error["param"] == "messages[0].content[1].image_url" and "49 x 32" in error["message"]
        assert refusal(running.chat(max_tokens=9), 400)["param"] == "max_tokens"
        assert running.chat(max_tokens=8).status_code == 200
        with running.http() as client:  # what is not asked for is limited as well
            body = {"messages": HELLO, "ignore_eos": True}
            assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 8


def test_too_many_requests(tiny_llm: LLM) -> None:
    with serving(tiny_llm, Limits(requests=3)) as running, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(running.chat, max_tokens=300, ignore_eos=True) for _ in range(8)]
        answers = [one.result() for one in asked]
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 3 + [429] * 5
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1 and refusal(refused, 429)["code"] == "overloaded"
        assert running.chat().status_code == 200


def test_the_queue_of_preprocessing_is_bounded(tiny_llm: LLM) -> None:
    with serving(tiny_llm, Limits(preprocessing=2, preprocessing_threads=1)) as running:
        gate = threading.Event()
        running.service.preprocessing._pool.submit(gate.wait)  # the one thread is busy
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(running.chat) for _ in range(2)]
            eventually(lambda: running.service.preprocessing.depth == 2)
            with running.http() as client:
                assert 'queue_depth{model_name="tiny"} 2.0' in client.get("/metrics").text
            refusal(running.chat(), 429)
            gate.set()
            assert [one.result().status_code for one in waiting] == [200, 200]
        assert running.service.preprocessing.depth == 0


def test_keys(tiny_llm: LLM) -> None:
    with serving(tiny_llm, api_key="ключ-1") as running, running.http() as client:
        key = b"Bearer " + "ключ-1".encode()
        for headers in (
            {},
            {b"Authorization": b"Bearer no"},
            {b"Authorization": key[7:]},
            {b"Authorization": b"Basic " + key[7:]},
        ):
            for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
                error = refusal(client.get(path, headers=headers), 401)
                assert error["code"] == "invalid_api_key" and "ключ" not in error["message"]
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models", headers={b"Authorization": key}).status_code == 200
        counted = client.get("/metrics", headers={b"Authorization": key}).text
        assert 'requests_refused_total{model_name="tiny",status="401"} 20.0' in counted


def test_pages_in_a_browser_cannot_use_a_local_server(server: Running) -> None:
    with server.http() as client:
        for host in ("evil.example", "127.0.0.1.evil.example:80", "[::2]"):
            refusal(client.get("/v1/models", headers={"Host": host}), 403)
        for host in ("localhost", "127.0.0.1:9", "[::1]:80", "LOCALHOST"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200
        simple = {"Content-Type": "text/plain", "Origin": "https://evil.example"}  # needs no leave from the server
        refusal(client.post("/v1/completions", content=b'{"prompt": "x"}', headers=simple), 415)
        asked = client.options("/v1/completions", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_public_addresses_need_a_key(host: str) -> None:
    with pytest.raises(SettingsError, match="API_KEY"):
        ServerSettings(("m",), host)
    assert ServerSettings(("m",), host, api_key="k").host == host
    assert ServerSettings(("m",), host, insecure=True).host == host
    assert "k3y" not in repr(ServerSettings(("m",), host, api_key="k3y"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "localhost", "LocalHost"])
def test_loopback_needs_none(host: str) -> None:
    assert ServerSettings(("m",), host).local


def test_the_command_refuses_what_it_must(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLOTRON_API_KEY", raising=False)
    assert main(["serve", "weights/pilot", "--host", "0.0.0.0"]) == 1
    assert "HOLOTRON_API_KEY" in capsys.readouterr().err
    assert main(["serve", "weights/pilot", "--engine", "abacus"]) == 2
    assert main(["serve", "weights/pilot", "--print-only"]) == 2
    assert main(["serve", "no/such/folder", "--port", "0"]) == 1
    assert "no/such/folder" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "weights/pilot", "--port", str(port)]) == 1
        assert f"127.0.0.1:{port}" in capsys.readouterr().err
