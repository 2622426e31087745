"""A policy behind any OpenAI-compatible chat completions endpoint.

A reply that breaks the contract is the model's failure, asked for again as often as the contract says. An
endpoint that cannot be reached, is misconfigured or speaks another protocol is infrastructure: PolicyError.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from holotron.contract.contract import Contract
from holotron.contract.conversation import Conversation
from holotron.contract.policy import ContractError, Decision, PolicyError, Usage
from holotron.contract.reply import strip_reasoning
from holotron.contract.step import Step
from holotron.serving.completion import SHOWN, Reply, TransientError, read_json, read_reply

KEY_VARIABLE = "HOLOTRON_API_KEY"
LARGEST_BODY = 16 * 1024 * 1024  # bytes; a chat completion is never near it
NOT_IN_BODY = ("retry", "schema_name")  # entries of request_defaults that are for the client
# What models write for a native tool call when the server has no parser for it.
TOOL_CALL_TEXT = re.compile(r"<tool_call>|<function=|\[TOOL_CALLS\]|<\|tool_call|<TOOLCALL>", re.IGNORECASE)


def is_endpoint(model: str) -> bool:
    """Whether a `--model` value is the URL of an endpoint rather than a path or a name."""
    return re.match(r"https?://", model.strip(), re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how a decision is asked for; times in seconds."""

    attempts: int = 3
    timeout_s: float = 120.0
    pause_s: float = 5.0
    temperature_step: float = 0.1
    temperature_floor: float = 0.4
    finish_reason: str = "stop"


@dataclass(slots=True)
class Tally:
    """What the attempts at one decision have come to so far."""

    problems: list[str] = field(default_factory=list)
    raw_text: str = ""
    output_tokens: int = 0
    usage: Usage = field(default_factory=Usage)


class HttpPolicy:
    """Implements Policy.

    `base_url` may end at the host, at `/v1` or at `/v1/chat/completions`. Without `model` the endpoint must
    serve exactly one, which is then used. `api_key` defaults to the environment variable HOLOTRON_API_KEY and
    appears in nothing but the Authorization header. `timeout`, `pause` (seconds) and `attempts` override the
    contract's. `structured_outputs` adds vLLM's field of that name beside `response_format`; `extra` is
    merged into the body last. Raises ValueError for a URL that is none or holds credentials.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None,
        contract: Contract,
        api_key: str | None = None,
        timeout: float | None = None,
        pause: float | None = None,
        attempts: int | None = None,
        response_format: bool = True,
        structured_outputs: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.base_url = _base(base_url)
        self.model, self.contract = model, contract
        self.name = f"{model or 'model'} at {self.base_url}"
        self.response_format, self.structured_outputs = response_format, structured_outputs
        self.extra = dict(extra or {})
        given = {"timeout_s": timeout, "pause_s": pause, "attempts": attempts}
        self.retry = Retry(
            **contract.request_defaults.get("retry", {}) | {k: v for k, v in given.items() if v is not None}
        )
        self._key = api_key or os.environ.get(KEY_VARIABLE) or None
        local = (urlsplit(self.base_url).hostname or "") in ("localhost", "127.0.0.1", "::1")
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=None,  # the whole exchange is bounded instead, so that a trickle does not outlast it
            trust_env=not local,  # a proxy for the world is no way to this machine
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def check(self) -> str:
        """Ask which models are served and return the one to be used; raises PolicyError with what to do."""
        try:
            status, body = await self._exchange("GET", "/models", None)
            self._refuse_status(status, body)
            listed = read_json(body).get("data")
        except TransientError as error:
            raise self._unreachable([str(error)]) from error
        names = [str(item.get("id")) for item in listed or () if isinstance(item, dict)]
        if self.model is None:
            if len(names) != 1:
                listing = ", ".join(names[:10]) or "none"
                raise PolicyError(f"{self.base_url} serves {len(names)} models ({listing}): name one.")
            self.model = names[0]
        elif names and self.model not in names:
            raise PolicyError(f"{self.base_url} does not serve {self.model!r}: name one of {', '.join(names[:10])}.")
        return self.model

    async def decide(self, conversation: Conversation) -> Decision:
        started = time.monotonic()
        if self.model is None:
            await self.check()
        # Built once: every attempt sends the same messages, byte for byte.
        body = self._body(conversation)
        tally = Tally()
        infrastructure = False
        for attempt in range(1, self.retry.attempts + 1):
            if attempt > 1:
                await asyncio.sleep(self.retry.pause_s)
                self._lower_temperature(body)
            try:
                reply = await self._ask(body)
                tally.output_tokens += reply.usage.output_tokens
                tally.usage, tally.raw_text = reply.usage, reply.content
                step, extra = self._read(reply)
            except TransientError as error:
                infrastructure = True
                tally.problems.append(str(error))
            except ContractError as error:
                infrastructure = False
                tally.problems.append(str(error))
            else:
                extra |= {"discarded": tally.problems} if tally.problems else {}
                return Decision(step, reply.usage, time.monotonic() - started, attempt, reply.content, extra)
        if infrastructure:
            raise self._unreachable(tally.problems)
        raise ContractError(
            f"{tally.problems[-1]} (attempt {self.retry.attempts} of {self.retry.attempts})",
            raw_text=tally.raw_text, attempts=self.retry.attempts, usage=tally.usage,
        )  # fmt: skip

    async def close(self) -> None:
        await self._client.aclose()

    def _body(self, conversation: Conversation) -> dict[str, Any]:
        defaults = self.contract.request_defaults
        schema = self.contract.schema(conversation.answer_now)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.contract.messages(conversation),
            "stream": False,
        }
        body |= {key: value for key, value in defaults.items() if key not in NOT_IN_BODY}
        if self.response_format:
            named = {"name": defaults.get("schema_name", "step"), "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if self.structured_outputs:
            body["structured_outputs"] = {"json": schema}
        return body | self.extra

    def _lower_temperature(self, body: dict[str, Any]) -> None:
        """Cooler from the second attempt on, measured from the first; greedy stays greedy."""
        first = self.extra.get("temperature", self.contract.request_defaults.get("temperature", 0.0))
        if first > 0:
            body["temperature"] = max(self.retry.temperature_floor, round(first - self.retry.temperature_step, 6))

    async def _ask(self, body: dict[str, Any]) -> Reply:
        status, answer = await self._exchange("POST", "/chat/completions", body)
        self._refuse_status(status, answer)
        return read_reply(read_json(answer))

    async def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(self.retry.timeout_s),
                self._client.stream(method, self.base_url + path, json=body) as response,
            ):
                received = bytearray()
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > LARGEST_BODY:
                        raise TransientError(f"the answer is larger than {LARGEST_BODY >> 20} MiB")
                return response.status_code, bytes(received)
        except TimeoutError:
            raise TransientError(f"no complete answer within {self.retry.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise TransientError(str(error) or type(error).__name__) from error

    def _refuse_status(self, status: int, body: bytes) -> None:
        """For all but 2xx: TransientError where waiting may help, PolicyError with advice where not."""
        if 200 <= status < 300:
            return
        said = self._quote(body)
        if status >= 500 or status in (408, 409, 429):
            raise TransientError(f"HTTP {status}: {said}")
        if status in (401, 403):
            key = "the key it was given" if self._key else f"requests without a key (set {KEY_VARIABLE})"
            raise PolicyError(f"{self.base_url} refuses {key}: HTTP {status}: {said}")
        if status == 404:
            raise PolicyError(
                f"{self.base_url} knows no such address or no model {self.model!r}: HTTP 404: {said}. "
                "Check the URL (it usually ends in /v1) and the model name."
            )
        if 300 <= status < 400:
            raise PolicyError(f"{self.base_url} redirects (HTTP {status}): give the address it redirects to.")
        raise PolicyError(
            f"{self.base_url} rejects the request: HTTP {status}: {said}. Check that it takes images and "
            "response_format, and that its context and image limits fit the contract."
        )

    def _read(self, reply: Reply) -> tuple[Step, dict[str, Any]]:
        """The step in a reply. ContractError: the model's fault; TransientError: the server's."""
        if reply.finish_reason == "length":
            raise ContractError("finish_reason: length, the output was cut off; raise max_tokens or think less")
        text, inline = strip_reasoning(reply.content)
        if reply.tool_calls or TOOL_CALL_TEXT.match(text):
            raise TransientError(
                f"the reply is a native tool call, but contract {self.contract.name} wants JSON in content: "
                "structured output or the tool-call parser is not set up as the contract needs"
            )
        if reply.finish_reason != self.retry.finish_reason:
            raise ContractError(f"finish_reason: {reply.finish_reason}, not {self.retry.finish_reason}")
        if not text:
            where = "only reasoning and no content" if reply.reasoning or inline else "empty content"
            raise TransientError(f"the reply has {where}: check the server's reasoning and tool-call parsers")
        step = self.contract.parse(text)
        reasoning = {"reasoning": reply.reasoning} if reply.reasoning else {}
        return step, reasoning | ({"inline_think": inline} if inline else {})

    def _unreachable(self, problems: list[str]) -> PolicyError:
        last = self._hide(problems[-1])
        return PolicyError(
            f"{self.base_url} gave no usable answer in {len(problems)} attempt(s): {last}. "
            "Check that the server is running, that the URL and port are right, and the server's log."
        )

    def _quote(self, body: bytes) -> str:
        """The start of a foreign answer on one line, or its error message; never with the key in it."""
        text = body.decode("utf-8", "replace")
        try:
            error = json.loads(text)["error"]
            text = error["message"] if isinstance(error, dict) else error
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return self._hide(" ".join(str(text).split()))[:SHOWN] or "(empty)"

    def _hide(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def _base(url: str) -> str:
    url = url.strip().rstrip("/").removesuffix("/chat/completions").rstrip("/")
    parts = urlsplit(url)
    if not is_endpoint(url) or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of an endpoint: it must start with http:// or https://")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"the endpoint URL for host {parts.hostname} holds credentials or a query: put the key into "
            f"{KEY_VARIABLE} and leave only the address"
        )
    return url if parts.path else f"{url}/v1"
