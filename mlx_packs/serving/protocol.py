"""Requests and answers of the OpenAI API, as its clients write and read them.

A field that would change the answer and is not implemented is rejected, never ignored; what only
concerns a hosted service (``user``, ``store``, ...) is accepted.
"""

import json
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from ..bases.turns import IMAGE_MARK
from ..data.images import check_marks
from ..data.messages import ROLES, name_thoughts, normal_arguments, normal_tools
from ..errors import PackError, library_errors, reason_of
from ..vision.pictures import ImageSource
from .fields import Data, Integer, Json, JsonObject, Name, Number, Object, Seed, Text, field_error

_log = logging.getLogger("mlx_packs.serving")

MAX_STOPS = 16
MAX_CHOICES = 8

_MOST = 10_000  # messages of a chat, parts of a message, and similar
_DIGITS = 12  # of a token; Python converts no more than 4,300
_Stop = Annotated[str, Field(max_length=1024)]
Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
_Some = Annotated[Text, Field(min_length=1)]
_Chat = Annotated[list[JsonObject], Field(max_length=_MOST)]
_Texts = Annotated[list[Text], Field(min_length=1, max_length=64)]
Tokens = Annotated[list[Integer], Field(max_length=1 << 20)]
_Bias = Annotated[dict[Name, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
_Model = Annotated[str, Field(min_length=1, max_length=1024)]
_Share = Field(1.0, gt=0, le=1)
_Penalty = Field(0.0, ge=-2, le=2)


class _Image(Object):
    url: Data
    detail: Literal["auto", "high"] = "auto"  # both are the whole image


class _MessagePart(Object):
    type: Literal["text", "refusal", "image_url"]  # names the field that the part has
    text: Text = ""
    refusal: Text = ""
    image_url: _Image | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            return value  # which `type` itself rejects
        if kind not in ("text", "refusal", "image_url"):
            raise ValueError(
                f"a part of type '{kind:.40}' is not supported. Send parts of text or 'image_url'"
            )
        if kind not in value:
            raise ValueError(f"a part of type '{kind}' needs '{kind}'")
        if kind != "image_url" and value.get("image_url") is not None:
            raise ValueError(f"a part of type '{kind}' cannot have an 'image_url'")
        return value

    @property
    def written(self) -> str:
        """The text of the part, with a mark for an image."""
        if self.image_url is not None:
            return IMAGE_MARK
        return self.text + self.refusal


class Function(Object):
    name: str = Field(min_length=1, max_length=64)
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Object):
    type: Literal["function"]
    function: Function
    _template: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, value: Any, validated: ModelWrapValidatorHandler["Tool"]) -> "Tool":
        """Keep the keys as the request orders them, which the fields of a model do not."""
        tool = validated(value)
        for normal in normal_tools(value) or ():  # one, since a tool has a name
            tool._template = normal
        return tool

    def to_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it, in the form that training has."""
        return self._template


class _Called(Object):
    name: Name
    arguments: Text = "{}"
    parsed_arguments: Json = None  # which OpenAI's client derives from `arguments`

    @field_validator("arguments", mode="before")
    @classmethod
    def _to_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return json.dumps(normal_arguments(value), ensure_ascii=False)


class _ToolCall(Object):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: _Called
    index: Integer | None = None

    def to_template(self) -> dict[str, Any]:
        """Return the call as training has it; arguments that a model wrote as no object stay."""
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = normal_arguments(arguments)

        function = {"name": self.function.name, "arguments": arguments}
        call = {"type": self.type, "function": function}
        if self.id is None:
            return call
        return {"id": self.id, **call}


class Message(Object):
    """One turn of a conversation, also as an answer of this server or OpenAI's client has it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[_MessagePart] | None = Field(None, max_length=_MOST)
    name: Name | None = None
    tool_calls: list[_ToolCall] | None = Field(None, max_length=_MOST)
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    # Of an answer; no model reads them.
    annotations: list[Json] | None = Field(None, max_length=_MOST)
    parsed: Json = None  # which OpenAI's client derives from `content`

    @field_validator("content", mode="before")
    @classmethod
    def _to_parts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise ValueError("must be a text or a list of parts")
        return value

    @property
    def text(self) -> str:
        """The content, or what OpenAI's field ``refusal`` has in its place."""
        parts = self.content or ()
        return "".join(part.written for part in parts) or self.refusal or ""

    @property
    def images(self) -> dict[int, ImageSource]:
        """The images of the content, by the number of their part."""
        return {
            number: ImageSource(part.image_url.url)
            for number, part in enumerate(self.content or ())
            if part.image_url is not None
        }

    @model_validator(mode="after")
    def _check_images(self) -> "Message":
        if not self.images:
            return self
        if self.role == "assistant":
            raise ValueError("an answer cannot have images. Send them in a message of the user")
        check_marks(self.text, self.images)
        return self

    def to_template(self) -> dict[str, Any]:
        """Return the message as training has it: a text with a mark for each of its images."""
        message: dict[str, Any] = {"role": ROLES.get(self.role, self.role), "content": self.text}
        if images := self.images:
            message["images"] = list(images.values())
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value

        name_thoughts(message)
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        return message


class _Schema(Object):
    name: Name = ""
    description: Text | None = None
    json_schema: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Object):
    """The form of the answer: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is required with type json_schema")
        return self


class _StreamOptions(Object):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class GenerationBody(Object):
    """What chat and text completions have in common."""

    model: _Model
    max_tokens: int | None = Field(None, ge=1, le=1 << 20)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = _Share
    top_k: int = Field(0, ge=0, le=1 << 20)
    min_p: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = _Penalty
    frequency_penalty: float = _Penalty
    logit_bias: _Bias | None = None
    seed: Seed | None = None
    stop: Stops = []
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    # Of a hosted service: they change nothing here.
    user: Name | None = None
    store: bool | None = None
    metadata: JsonObject | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise ValueError("must be a text or a list of texts")
        if not all(isinstance(stop, str) for stop in value):
            return value  # whose fault has the place of the request
        return [stop for stop in value if stop]  # an empty text ends nothing

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token in biases or ():
            if not (token.isdecimal() and len(token) <= _DIGITS):
                raise ValueError("must map tokens (numbers) to -100 to 100")
        return biases

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(GenerationBody):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=_MOST)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 20)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _check(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs.")

        if any(tool.function.strict for tool in self.usable_tools):
            text = "strict calls are not supported here. Send strict: false."
            raise field_error("tools", text, "unsupported")
        return self

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _check_choice(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError("a call cannot be enforced here. Send 'auto' or 'none'")
        return value

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        return self.tools or []

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def answer_schema(self) -> dict[str, Any]:
        if self.response_format is None or self.response_format.json_schema is None:
            return {"type": "object"}
        return self.response_format.json_schema.json_schema


class CompletionBody(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: _Texts | Annotated[Tokens, Field(min_length=1)]

    @field_validator("prompt", mode="before")
    @classmethod
    def _to_list_of_prompts(cls, value: Any) -> Any:
        prompts = value if isinstance(value, list) else [value]
        kinds = {type(prompt) for prompt in prompts}
        are_tokens = isinstance(value, list) and kinds == {int}
        if not kinds <= {str} and not are_tokens:
            raise ValueError("must be a text, a list of texts, or a list of tokens")
        return prompts


class EmbeddingBody(Object):
    """The body of ``/v1/embeddings``."""

    model: _Model
    input: list[_Some] = Field(min_length=1, max_length=2048)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Number | None = None
    prompt_name: Name | None = None
    user: Name | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("must be a text or a list of texts")
        return texts


class ClassifyBody(Object):
    """The body of ``/v1/classify``: texts, or chats as lists of messages."""

    model: _Model
    input: list[Text | _Chat] = Field(min_length=1, max_length=2048)
    top: Number | None = Field(None, ge=1)

    @field_validator("input", mode="before")
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        is_chat = isinstance(value, list) and all(isinstance(each, dict) for each in value)
        return [value] if isinstance(value, str) or is_chat else value


class RerankBody(Object):
    """The body of ``/v1/rerank``, as Jina and Cohere have it."""

    model: _Model
    query: _Some
    documents: list[Text] = Field(min_length=1, max_length=1000)
    top_n: Number | None = Field(None, ge=1)
    return_documents: bool = False
    instruction: Text | None = None

    @field_validator("documents", mode="before")
    @classmethod
    def _to_texts(cls, value: Any) -> Any:
        """A document is a text, or an object with one."""
        documents = value if isinstance(value, list) else []
        texts = [each.get("text") if isinstance(each, dict) else each for each in documents]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError("must be a list of texts, none of them empty")
        return texts


class PackBody(Object):
    """The body of ``POST /v1/packs``."""

    source: Name = Field(min_length=1)
    name: Name | None = None


def new_id(kind: str) -> str:
    """Return an identifier as OpenAI's: ``chatcmpl-…``."""
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def tool_calls(parser: Any, text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return what a model wrote between marks as tool calls; none if it cannot be read."""
    described = [tool.to_template() for tool in tools]
    try:
        with library_errors(lambda reason: PackError(reason, "unreadable")):
            written = parser(text, described)
        several = written if isinstance(written, list) else [written]
        return [_call(each) for each in several]
    except (PackError, *_NO_CALL) as error:  # cut off at max_tokens, or written otherwise
        _log.info("A tool call cannot be read and is answered as text: %s", reason_of(error))
    return []


_NO_CALL = (AttributeError, KeyError, TypeError, ValueError)  # of a mapping that is no call


def _call(written: Any) -> dict[str, Any]:
    """Return a call that a parser read as OpenAI's; raise what a model wrote that is none."""
    name = written["name"]
    arguments = written["arguments"]
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
