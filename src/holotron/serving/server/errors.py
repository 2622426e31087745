"""Refusals in the shape OpenAI clients understand: {"error": {message, type, param, code}}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# Where an engine's message begins with the field that it is about.
_FIELD = re.compile(r"(?:messages|prompt|structured_outputs|tools)[\w.\[\]]*|\w+(?= is )")
_NO_FIELD = re.compile(r"[^a-z0-9_]|^(?:str|dict|bool|int|float|none)$")
_SHOWN = 400  # characters of a message; it may quote what the client sent


class ApiError(Exception):
    """An answer other than 2xx. `param` names the field at fault, `code` what is wrong, for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        message = self.message.encode("utf-8", "replace").decode()
        error = {"message": message, "type": _KINDS.get(self.status, fallback), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)


def overloaded(message: str, seconds: int = 1) -> ApiError:
    """429: the same request may succeed in `seconds`."""
    return ApiError(429, message, code="overloaded", headers={"Retry-After": str(seconds)})


def bad_body(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, its field named as in messages[0].content."""
    found = error.errors(include_url=False, include_context=False)
    first = max(found, key=lambda item: len(_fields(item["loc"])))  # of a union the member that fits best
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    param = _path(_fields(first["loc"]))
    message = "unknown field; remove it" if first["type"] == "extra_forbidden" else first["msg"]
    message = message.removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "this field is required"
    if param == "extra_body":
        message = "extra_body is an argument of the client library; put its entries at the top of the body"
    return ApiError(400, f"{param}: {message}"[:_SHOWN] if param else message[:_SHOWN], param=param or None)


def bad_value(error: ValueError, param: str | None = None) -> ApiError:
    """What the engine says about a request that it cannot serve; `param` where it names no field."""
    text = str(error)
    named = _FIELD.match(text)
    code = "context_length_exceeded" if text.startswith("the prompt has ") else None
    where = named[0].rstrip(".") if named else "messages" if text.startswith("image ") else param
    return ApiError(400, text[:_SHOWN], param=where, code=code)


def _fields(location: Sequence[int | str]) -> list[int | str]:
    """A location without the names of union members and validators, which are no fields, nor their tags."""
    named = [part for part in location if isinstance(part, int) or not _NO_FIELD.search(part)]
    return [part for i, part in enumerate(named) if i == 0 or part != named[i - 1]]


def _path(parts: Sequence[int | str]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:100]
