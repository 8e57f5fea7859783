"""Every field of every route has a bound, and no number of a request is an internal error."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlx_packs.serving.app import make_app
from mlx_packs.serving.fields import body_of
from mlx_packs.serving.train.losses import LOSSES
from mlx_packs.serving.train.rows import MESSAGES, checked_row, read_forward_request
from tests.helpers.errors import raises
from tests.helpers.tinker import PROTO, forward_request, sample_body

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


# These read no JSON: the first is of Protocol Buffers, and the others read no body.
OTHERS = {f"/api/v1/{name}" for name in ("forward_backward", "telemetry", "sessions/{id}/finish")}
OTHERS |= {"/api/v1/client/config", "/api/v1/client/dynamic_config"}
NUMBERS = (-1, 2**31 - 1, 2**32, 2**63 - 1, 2**63, 2**100, -(2**100))
NUMBERS += (float("nan"), float("inf"), 1e39, -1e39)


def bodies(server) -> dict:
    routes = [route for route in make_app(server.server).routes if "POST" in route.methods]
    return {route.path: body_of(route.endpoint) for route in routes}


def test_every_field_of_a_body_has_a_bound(server):
    models = bodies(server)
    assert {path for path, model in models.items() if model is None} == OTHERS

    unbounded = [
        (model.__name__, *path)
        for model in models.values()
        if model is not None
        for path, schema in leaves(model.model_json_schema())
        if not is_bounded(schema)
    ]
    assert unbounded == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("data", lambda message: [message.data.add() for _ in range(1 << 16)]),
        ("loss_fn", lambda message: setattr(message, "loss_fn", "l" * 65)),
        ("data[0].model_input", lambda message: [_chunk(message) for _ in range(10_001)]),
        ("data[0].loss_fn_inputs", lambda message: [_input(message, "a") for _ in range(17)]),
        ("data[0].loss_fn_inputs[0].key", lambda message: _input(message, "k" * 65)),
    ],
)
def test_a_message_beyond_its_bounds(name, change):
    message = MESSAGES.ForwardBackwardRequest(model_id="m")
    message.data.add().model_input.add(encoded_text={"tokens": bytes(4)})
    change(message)
    with raises("invalid", None, f"{name}: has a length of"):
        message = read_forward_request(message.SerializeToString())
        checked_row(0, message.data[0], LOSSES["cross_entropy"], 16, 16)


def _chunk(message):
    return message.data[0].model_input.add(encoded_text={"tokens": b""})


def _input(message, key):
    return message.data[0].loss_fn_inputs.add(key=key)


def valid_bodies(client) -> dict:
    session = {"session_id": client.session}
    model = {"model_id": client.create()}
    text = {"model": "base", "max_tokens": 1}
    return {
        "/v1/chat/completions": text | {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": text | {"prompt": [1]},
        "/v1/embeddings": {"model": "base", "input": ["a"]},
        "/v1/classify": {"model": "base", "input": ["a"]},
        "/v1/rerank": {"model": "base", "query": "a", "documents": ["a"]},
        "/v1/feedback": {"id": "a", "rating": "up"},
        "/api/v1/create_model": session | {"model_seq_id": 1, "base_model": "base"},
        "/api/v1/optim_step": model | {"adam_params": {}},
        "/api/v1/save_weights": model | {"path": "w"},
        "/api/v1/save_weights_for_sampler": model,
        "/api/v1/load_weights": session | {"path": "tinker://a/weights/w", "optimizer": False},
        "/api/v1/create_sampling_session": session | {"base_model": "base"},
        "/api/v1/asample": sample_body(client.session_on()),
    }


def test_no_number_of_a_body_is_an_internal_error(client, server, caplog):
    models = bodies(server)
    valid = valid_bodies(client)
    tried = 0

    for path, model in models.items():
        if model is None:
            continue
        numbers = [
            place
            for place, schema in leaves(model.model_json_schema())
            if schema.get("type") in ("integer", "number")
        ]
        assert not numbers or path in valid, path

        for place in numbers:
            for number in NUMBERS:
                body = json.dumps(with_value(valid[path], place, number)).encode()
                status, _, content = server.request("POST", path, body)
                assert status < 500, (path, place, number, content)
                answer = json.loads(content)
                if status == 200 and "request_id" in answer:
                    result = client.result(answer)
                    category = "" if isinstance(result, bytes) else result.get("category")
                    assert category != "server", (path, place, number)
                tried += 1

    assert tried > 300
    assert "A request failed" not in caplog.text


def test_no_number_of_a_message_is_an_internal_error(client, server, datum, caplog):
    model_id = client.create()
    tokens, inputs = datum
    arrays = {"logprobs": [0.0] * len(tokens), "target_tokens": inputs["target_tokens"]}
    for number in NUMBERS:
        with np.errstate(over="ignore"):
            arrays["advantages"] = np.full(len(tokens), number, np.float32)
        body = forward_request(model_id, [(tokens, arrays)], "ppo")
        assert server.request("POST", "/api/v1/forward_backward", body, PROTO)[0] < 500
    assert "A request failed" not in caplog.text
