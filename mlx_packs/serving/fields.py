"""Objects of a request: null means "not given", and a fault names its field in plain words."""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..errors import PackError

_CONTAINERS = 100_000  # lists and objects of a body, each of which takes many times its bytes
UNSUPPORTED = "is not supported here. Leave it out."
_REASONS = {
    "extra_forbidden": UNSUPPORTED,
    "missing": "is required.",
    "model_type": "must be an object.",
    "dict_type": "must be an object.",
    "list_type": "must be a list.",
    "string_type": "must be a text.",
    "bool_type": "must be true or false.",
    "int_type": "must be an integer.",
    "float_type": "must be a number.",
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

    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:100]
        raise PackError(f"{where or 'body'}: {_reason(first)}", flag=where or None) from None


def _reason(fault: Any) -> str:
    """Return what is wrong with a field, as a clause whose subject is the field."""
    if (reason := _REASONS.get(fault["type"])) is not None:
        return reason
    reason = fault["msg"]
    for pattern, replacement in _BEGINNINGS:
        reason = pattern.sub(replacement, reason)
    return f"{reason.rstrip('.')}."
