"""The fields of a request's body, read from the JSON schema of its model."""

from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]


def leaves(schema: dict, path: Path = (), root: dict | None = None) -> Iterator[tuple[Path, dict]]:
    """Yield every schema within a schema with its path; items of a list have the index 0."""
    root = root or schema
    if name := schema.get("$ref"):
        schema = root["$defs"][name.rpartition("/")[2]]

    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        for option in options:
            yield from leaves(option, path, root)
        return

    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from leaves(field, (*path, name), root)
    if "items" in schema:
        yield from leaves(schema["items"], (*path, 0), root)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from leaves(schema["additionalProperties"], (*path, "1"), root)


def is_bounded(schema: dict) -> bool:
    """Return whether no value of a schema is larger than some number."""
    if "const" in schema or "enum" in schema or "properties" in schema:
        return True

    kind = schema.get("type")
    least = {"minimum", "exclusiveMinimum"} & set(schema)
    most = {"maximum", "exclusiveMaximum"} & set(schema)
    bounds = {
        "string": "maxLength" in schema,
        "integer": bool(least and most),
        "number": bool(least and most),
        "array": "maxItems" in schema,
        "object": "maxProperties" in schema,
        "json": "maxItems" in schema,
    }
    return bounds.get(kind, kind in ("boolean", "null"))


def with_value(body: Any, path: Path, value: object) -> Any:
    """Return a body with a value at a path, whose lists and objects are made where they miss."""
    if not path:
        return value

    first, *rest = path
    if first == 0:
        items = body if isinstance(body, list) and body else [None]
        return [with_value(items[0], tuple(rest), value), *items[1:]]
    fields = body if isinstance(body, dict) else {}
    return {**fields, first: with_value(fields.get(first), tuple(rest), value)}
