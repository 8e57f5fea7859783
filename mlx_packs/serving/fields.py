"""Objects of a request, checked: null means "not given", and a fault names its field in words."""

import re
from functools import wraps
from typing import Annotated, Any, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..errors import Code, PackError
from .http import Handler, error_response, read_body

_CONTAINERS = 100_000  # lists and objects of a body, each of which takes many times its bytes
_COMMAS = 1 << 18  # between numbers and keys, whose parsing keeps all others waiting
_VALUES = 100_000  # of JSON that is passed on as it is


def _check_json(value: Any) -> Any:
    """Return JSON that is passed on; a ValueError if it has too many values."""
    waiting = [value]

    for count, item in enumerate(waiting):
        if count > _VALUES:
            raise ValueError(f"has more than {_VALUES:,} values")
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item

    return value


_CHECKED = AfterValidator(_check_json)
_SCHEMA = WithJsonSchema({"type": "json", "maxItems": _VALUES})

# Every field has a bound: texts and numbers by these types, lists and mappings by `max_length`.
Name = Annotated[str, Field(max_length=1024)]
Text = Annotated[str, Field(max_length=4_000_000)]  # what a model reads
Data = Annotated[str, Field(max_length=10_000_000)]  # a file in base64
Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Json = Annotated[Any, _CHECKED, _SCHEMA]
JsonObject = Annotated[dict[str, Any], _CHECKED, _SCHEMA]
Metadata = Annotated[dict[Name, Text], Field(max_length=1024)]
_REASONS = {
    "extra_forbidden": "is not supported here. Leave it out.",
    "missing": "is required.",
    "model_type": "must be an object.",
    "dict_type": "must be an object.",
    "list_type": "must be a list.",
    "string_type": "must be a text.",
    "bool_type": "must be true or false.",
    "int_type": "must be an integer.",
    "float_type": "must be a number.",
    "finite_number": "must be a finite number.",
}
_BEGINNINGS = (
    (re.compile(r"^Input should be "), "must be "),
    (re.compile(r"^(List|Dictionary|String) should have "), "must have "),
    (re.compile(r" after validation, not (\d+|more)"), ""),
    (re.compile(r"^Value error, "), ""),
    (re.compile(r"^Invalid JSON: "), "is not JSON: "),
)


class Object(BaseModel):
    """An object of a request. A key whose value is null is treated as if it were absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None}


def parsed(kind: type[Object], body: bytes) -> Any:
    """Return a body as a class of `protocol`; a PackError has the faulty field as its ``flag``."""
    if body.count(b"[") + body.count(b"{") > _CONTAINERS:
        raise PackError(f"body: has more than {_CONTAINERS:,} lists and objects.")
    if body.count(b",") > _COMMAS:
        raise PackError(f"body: has more than {_COMMAS:,} values.")

    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        # of a field that may have several types, what is wrong with the one that it has
        same = [each for each in others if each["loc"][:1] == first["loc"][:1]]
        if first["type"].endswith("_type"):
            first = next((each for each in same if not each["type"].endswith("_type")), first)
        parts = [str(part) for part in first["loc"] if "[" not in str(part)]
        where = ".".join(parts)[:100]
        raise PackError(f"{where or 'body'}: {_reason(first)}", flag=where or None) from None


def body_of(handler: Handler) -> type[Object] | None:
    """Return the kind of the body that a handler takes, by the type of its second argument."""
    kinds = [kind for kind in get_type_hints(handler).values() if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, Object)), None)


def answering(handler: Handler) -> Handler:
    """Return a handler of requests whose body is read and checked.

    It answers errors of its own with status 500, on the open connection: Starlette would raise them
    again after the answer, and uvicorn then close the connection.
    """
    kind = body_of(handler)

    @wraps(handler)
    async def answered(request: Request) -> Response:
        try:
            if kind is None:
                return await handler(request)
            body = parsed(kind, await read_body(request))
            return await handler(request, body)
        except (HTTPException, PackError, ClientDisconnect, TimeoutError):
            raise  # each has an answer of its own
        except Exception as error:
            return error_response(error)

    return answered


def field_error(field: str, text: str, code: Code = "invalid") -> PackError:
    """Return the error of a field of a request, which its message begins with."""
    return PackError(f"{field}: {text}", code, field)


def value_error(field: str, value: str, text: str, code: Code = "invalid") -> PackError:
    """Return the error of a field whose value is at fault."""
    return PackError(f"{field} '{value:.140}': {text}", code, field)


def not_found(field: str, value: str, reason: str) -> PackError:
    """Return the error of a field whose value names nothing that is here."""
    return value_error(field, value, reason, "not-found")


def _reason(fault: Any) -> str:
    """Return what is wrong with a field, as a clause whose subject is the field."""
    if (reason := _REASONS.get(fault["type"])) is not None:
        return reason
    reason = fault["msg"]
    for pattern, replacement in _BEGINNINGS:
        reason = pattern.sub(replacement, reason)
    return f"{reason.rstrip('.')}."
