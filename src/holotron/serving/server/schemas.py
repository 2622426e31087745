"""What requests may hold. Unknown fields are refused by name: to ignore one would be to answer something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

JsonObject = dict[str, Any]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


def _only(*allowed: object) -> Callable[[Any], Any]:
    """For settings that this server does not have: their neutral values pass, the others are refused."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            raise ValueError(f"this server supports only {' or '.join(map(repr, allowed))} here")
        return value

    return check


Zero = Annotated[float | None, AfterValidator(_only(0))]
One = Annotated[float | None, AfterValidator(_only(1))]
Off = Annotated[bool | None, AfterValidator(_only(False))]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # has no effect: nothing is padded here
    continuous_usage_stats: Off = None


class StructuredFields(Body):
    """vLLM's: one of json, regex, choice."""

    json_schema: JsonObject | str | None = Field(None, alias="json")
    regex: Annotated[str, Field(max_length=10_000)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    json_object: bool | None = None


class Sampled(Body):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: Annotated[str, Field(max_length=10_000)] | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    use_grounding_head: bool | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    # accepted at their neutral values alone
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    repetition_penalty: One = None
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_only({}))] = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    # about accounts and storage, of which there are none here
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes only with stream: true")
        if self.min_tokens and not self.ignore_eos:
            raise ValueError("min_tokens is supported only with ignore_eos: true, where it means max_tokens")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None  # every image is seen as the model sees images


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl | str


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | JsonObject | None = None


class CalledTool(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    # what client libraries hand back of a reply, empty
    refusal: Annotated[str | None, AfterValidator(_only(""))] = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any] | None, AfterValidator(_only([]))] = None

    @model_validator(mode="after")
    def _says(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        return self


class FunctionTool(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type json_schema, and only there")
        return self


class ChatRequest(Sampled):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    modalities: Annotated[list[str] | None, AfterValidator(_only(["text"]))] = None

    @model_validator(mode="after")
    def _agree_on_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes only with logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice asks for a call, but there are no tools")
        return self


class CompletionRequest(Sampled):
    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=64)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=64)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Off = None
    suffix: Annotated[str | None, AfterValidator(_only(""))] = None
    best_of: One = None


class TokenizeRequest(Body):
    """The tokens of a `prompt` as it is written, or those the chat template makes of `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Token], Field(max_length=2**20)]
