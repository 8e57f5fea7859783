"""Requests and answers of the OpenAI API, as its clients write and read them.

A field that would change the answer and is not implemented is rejected, never ignored; what only
concerns a hosted service (``user``, ``store``, ...) is accepted.
"""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from ..errors import PackError

MAX_STOPS = 16
_CONTAINERS = 100_000  # lists and objects of a body, each of which takes many times its bytes
MAX_CHOICES = 8

_DIGITS = 12  # of a token; Python converts no more than 4,300
_Share = Field(1.0, gt=0, le=1)
_Penalty = Field(0.0, ge=-2, le=2)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Part(_Strict):
    type: Literal["text"]
    text: str


class Function(_Strict):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # calls are not held to their schema


class Tool(_Strict):
    """A tool, which is always a function."""

    type: Literal["function"]
    function: Function


class _Called(_Strict):
    name: str
    arguments: str


class _Call(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Called
    index: int | None = None


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    def to_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _parsed(call.function)},
                }
                for call in self.tool_calls
            ]
        return message


def _parsed(called: _Called) -> Any:
    """Return the arguments of a call as templates take them: an object, where they are JSON."""
    try:
        return from_json(called.arguments)
    except ValueError:
        return called.arguments


class _Schema(_Strict):
    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of the answer: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is required with type json_schema")
        return self


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class GenerationBody(_Strict):
    """What chat and text completions have in common."""

    model: str = Field(min_length=1, max_length=1024)
    max_tokens: int | None = Field(None, ge=1, le=1 << 20)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = _Share
    top_k: int = Field(0, ge=0, le=1 << 20)
    min_p: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = _Penalty
    frequency_penalty: float = _Penalty
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    # Of a hosted service: they change nothing here.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "GenerationBody":
        stops = self.stops
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop has {len(stops)} strings, and {MAX_STOPS} is the most")
        if not all(0 < len(stop) <= 1024 for stop in stops):
            raise ValueError("every stop string must have 1 to 1024 characters")
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isdecimal() and len(token) <= _DIGITS) or not -100 <= bias <= 100:
                raise ValueError("logit_bias must map tokens (numbers) to -100 to 100")
        return self

    @property
    def stops(self) -> list[str]:
        """The strings that end the text."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(GenerationBody):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 20)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None  # the model calls as many as it likes
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self


class CompletionBody(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: str | list[str] | list[int]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: None = None
    best_of: Literal[1] | None = None


class EmbeddingBody(_Strict):
    """The body of ``/v1/embeddings``."""

    model: str = Field(min_length=1, max_length=1024)
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class PackBody(_Strict):
    """The body of ``POST /v1/packs``."""

    source: str = Field(min_length=1, max_length=4096)
    name: str | None = None


def parsed(kind: type[_Strict], body: bytes) -> Any:
    """Return a body as one of the classes above.

    Raises:
        PackError: it is not JSON, or a field is wrong; ``flag`` names the field.
    """
    if body.count(b"[") + body.count(b"{") > _CONTAINERS:
        raise PackError(f"body: has more than {_CONTAINERS:,} lists and objects.")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:100]
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "is not supported here. Leave it out."
        raise PackError(f"{where or 'body'}: {reason}", flag=where or None) from None


def new_id(kind: str) -> str:
    """Return an identifier as OpenAI's: ``chatcmpl-…``."""
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Return numbers of tokens as OpenAI's."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def error_body(message: str, kind: str, code: str | None, param: str | None) -> dict[str, Any]:
    """Return an error as OpenAI's."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def tool_calls(parser: Any, texts: Sequence[str], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return what a model wrote as tool calls; a text that is none is left out.

    Args:
        parser: mlx-lm's, of the model.
        texts: what stands between the marks of a call.
        tools: those of the request.
    """
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    calls = []
    for text in texts:
        try:
            written = parser(text, described)
            calls += [_call(c) for c in (written if isinstance(written, list) else [written])]
        except Exception:  # of the model's library: cut off at max_tokens, or written otherwise
            continue
    return calls


def _call(written: Any) -> dict[str, Any]:
    """Return a call that a parser read as OpenAI's; raise what a model wrote that is none."""
    name, arguments = written["name"], written["arguments"]
    if not isinstance(name, str):
        raise TypeError("the name of a function is a text")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    identity = str(written.get("id") or new_id("call"))
    (identity + name + arguments).encode()  # half a surrogate pair cannot be sent
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
