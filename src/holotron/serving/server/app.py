"""The routes, their description, and how what goes wrong is answered."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from holotron import __version__
from holotron.engine import AsyncLLM
from holotron.serving.server.bodies import ClientGone
from holotron.serving.server.chat import answer_chat, template_options
from holotron.serving.server.completions import answer_completion
from holotron.serving.server.errors import ApiError
from holotron.serving.server.gate import Gate, Traffic
from holotron.serving.server.images import check_images, count_images
from holotron.serving.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from holotron.serving.server.service import Service
from holotron.serving.server.settings import ServerSettings
from holotron.serving.server.streaming import as_json

log = logging.getLogger("holotron.serving")
_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_STATUSES = (400, 401, 404, 408, 413, 415, 429, 503)


def create_app(engine: AsyncLLM, settings: ServerSettings, traffic: Traffic | None = None) -> FastAPI:
    """An ASGI application over a running engine. `app.state` holds its `service` and `traffic`."""
    traffic = traffic or Traffic()
    service = Service(engine, settings)
    app = FastAPI(
        title="holotron",
        version=__version__,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        middleware=[Middleware(Gate, settings=settings, traffic=traffic, refused=service.metrics.refused)],
    )
    app.state.service, app.state.traffic = service, traffic
    _add_generation(app, service)
    _add_information(app, service, traffic)
    _add_tokens(app, service)
    _add_failures(app, service)
    _describe(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", **_takes(ChatRequest))
    async def chat(request: Request) -> Response:
        """A reply to a conversation, with images."""
        return await answer_chat(service, request)

    @app.post("/v1/completions", **_takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """The continuation of a text."""
        return await answer_completion(service, request)


def _add_information(app: FastAPI, service: Service, traffic: Traffic) -> None:
    models = [_model(service, name) for name in service.settings.names]

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": models}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "no such model"}})
    async def show_model(name: str) -> dict[str, Any]:
        found = next((model for model in models if model["id"] == name), None)
        if found is None:
            raise ApiError(404, f"the model {name[:100]!r} does not exist", param="model", code="model_not_found")
        return found

    @app.get("/health", responses={503: {"description": "shutting down"}})
    async def health() -> Response:
        """200 while new requests are taken."""
        return JSONResponse({"status": "draining" if traffic.draining else "ok"}, 503 if traffic.draining else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", **_takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of messages with their images."""
        async with service.reading(request, TokenizeRequest) as body:
            count_images(body.messages or [], service.limits)
            await service.fetcher.inline(body.messages or [])
            tokens = await service.prepared(lambda: _tokens(service, body))
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": service.llm.max_model_len,
            "tokens": tokens,
            "token_strs": [service.spelling.of([t]) for t in tokens] if body.return_token_strs else None,
        }
        return Response(as_json(answer), media_type="application/json")

    @app.post("/detokenize", **_takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of tokens, special ones included."""
        async with service.reading(request, DetokenizeRequest) as body:
            text = await service.prepared(lambda: _text(service, body.tokens), "tokens")
        return Response(as_json({"prompt": text}), media_type="application/json")


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return service.llm.vocabulary.encode(body.prompt)
    check_images(body.messages or [], service.limits)
    options = template_options(body.chat_template_kwargs)
    if body.tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    messages = [{"content": "", **message.model_dump(exclude_none=True)} for message in body.messages or []]
    return service.llm.prepare_chat(messages, None, options).prompt


def _text(service: Service, tokens: list[int]) -> str:
    vocabulary = service.llm.vocabulary
    if any(token >= vocabulary.size for token in tokens):
        raise ValueError(f"tokens must be below {vocabulary.size}")
    text = vocabulary.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    return text.encode("utf-8", "replace").decode()


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "holotron",
        "root": service.settings.names[0],
        "parent": None,
        "max_model_len": service.llm.max_model_len,
    }


def _add_failures(app: FastAPI, service: Service) -> None:
    def answered(error: ApiError) -> Response:
        service.metrics.refused(error.status)
        return error.response()

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        if error.status >= 500:
            log.error("%s", error.message, exc_info=error.__cause__ or error)
        return answered(error)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        wrong = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
        message = wrong.get(error.status_code, str(error.detail))
        return answered(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return answered(ApiError(400, str(error.errors()[0].get("msg", "the request is invalid"))))

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        return answered(ApiError(500, "the server failed; its log has the reason"))


def _takes(body: type[Any]) -> dict[str, Any]:
    """The description of a route that reads its body itself."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        "responses": {status: {"description": "see error.message"} for status in _STATUSES},
    }


def _describe(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        pairs = [(body, "validation") for body in _BODIES]
        _, found = models_json_schema(pairs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
