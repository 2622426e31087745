"""Whatever the OpenAPI document allows, and much that it does not, is answered without a fault of the server's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from holotron.engine import LLM
from holotron.serving.server import Limits
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.serving.running import Running, serving

BODIES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Short contexts, so that no example takes long."""
    tokenizer = tiny_tokenizer()
    llm = LLM(tiny_model(tokenizer), tokenizer, max_model_len=64)
    with serving(llm, Limits(choices=4)) as running:
        yield running
        assert not llm.has_unfinished
        llm.check_integrity()


@pytest.fixture(scope="module")
def api(small: Running) -> Any:
    return schemathesis.openapi.from_url(f"{small.url}/openapi.json")


def test_the_document_describes_every_route(small: Running) -> None:
    with small.http() as client:
        document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        *BODIES, "/v1/models", "/v1/models/{name}", "/health", "/version", "/metrics",
    }  # fmt: skip
    for path in BODIES:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].removeprefix("#/components/schemas/")
        assert document["components"]["schemas"][name]["additionalProperties"] is False


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(
    ("method", "path"),
    [*(("POST", path) for path in BODIES), ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/health")],
)
def test_no_request_makes_the_server_fail(api: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = api[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("nothing in it to get wrong")

    seen: list[int] = []

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        response = case.call()
        case.validate_response(response, checks=[not_a_server_error])
        seen.append(response.status_code)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    ask()
    assert seen


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
def test_no_field_of_a_good_request_makes_the_server_fail(
    api: Any, small: Running, path: str, base: dict[str, Any]
) -> None:
    """Requests that are wholly drawn are mostly refused early; a few drawn fields in a good one get further."""
    statuses: list[int] = []

    @given(case=api[path]["POST"].as_strategy(), data=st.data())
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any, data: st.DataObject) -> None:
        assume(isinstance(case.body, dict) and case.body)
        kept = data.draw(st.lists(st.sampled_from(sorted(case.body)), min_size=1, max_size=2, unique=True))
        fields = {name: case.body[name] for name in kept if name != "model"}
        with small.http() as client:
            response = client.post(path, json={**base, **fields})
        assert response.status_code < 500, (fields, response.text)
        statuses.append(response.status_code)

    ask()
    assert 200 in statuses and 400 in statuses
