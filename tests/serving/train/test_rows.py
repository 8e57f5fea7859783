"""Requests of forward passes from bytes to padded batches, and what is wrong with some."""

import re
from pathlib import Path

import numpy as np
import pytest

from mlx_packs.errors import PackError
from mlx_packs.serving.train import tinker_pb2
from mlx_packs.serving.train.losses import LOSSES, split_passes
from mlx_packs.serving.train.rows import MESSAGES, checked_row, read_forward_request
from tests.helpers.tinker import forward_request

CONTEXT, VOCABULARY = 6, 50
GOOD = {"target_tokens": [2, 3], "weights": [0.5, 1.0]}
SAMPLED = {"target_tokens": [2, 3], "logprobs": [-1.0, -2.0], "advantages": [1.0, 0.0]}


SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
FIELD = re.compile(r"(repeated )?(\w+) (\w+) = (\d+);")


def row_of(tokens: list[int], inputs: dict, loss: str = "cross_entropy", context: int = CONTEXT):
    request = read_forward_request(forward_request("m", [(tokens, inputs)], loss))
    return checked_row(0, request.data[0], LOSSES[loss], context, VOCABULARY)


@pytest.mark.parametrize(
    ("tokens", "inputs", "loss", "message"),
    [
        ([], GOOD, "cross_entropy", "has 0 tokens"),
        ([1] * 7, GOOD, "cross_entropy", "1 to 6, the context"),
        ([1, -1], GOOD, "cross_entropy", "token -1 is outside"),
        ([1, 2], {"target_tokens": [2, 50]}, "cross_entropy", "token 50 is outside"),
        ([1, 2], {"target_tokens": [2.0, 3.0]}, "cross_entropy", "must be integers"),
        ([1, 2], {"target_tokens": [2, 3, 4]}, "cross_entropy", "a number for each"),
        ([1, 2], {"weights": [1.0, 1.0]}, "cross_entropy", "target_tokens: is required"),
        ([1, 2], GOOD | {"weights": [1.0]}, "cross_entropy", r"weights: has the shape \[1\]"),
        ([1, 2], GOOD | {"weight": [1.0, 1.0]}, "cross_entropy", "weight: this loss does not"),
        ([1, 2], SAMPLED | {"advantages": [np.nan, 1.0]}, "ppo", "advantages: has NaN"),
        ([1, 2], {"target_tokens": [2, 3]}, "ppo", "logprobs: is required"),
    ],
)
def test_faulty_rows(tokens, inputs, loss, message):
    with pytest.raises(PackError, match=message):
        row_of(tokens, inputs, loss)


def request_with(field: str) -> bytes:
    """A request that is valid but for one field of its tensor, or of its loss."""
    request = MESSAGES.ForwardBackwardRequest()
    request.ParseFromString(forward_request("m", [([1, 2], GOOD)]))
    tensor = request.data[0].loss_fn_inputs[0].value
    if field == "sparse_csr":
        tensor.sparse_csr = b"\x0a\x00"
    elif field == "shape":
        tensor.shape[:] = [3]
    elif field == "dtype":
        tensor.dtype = 9
    elif field == "dense":
        tensor.dense += b"x"
    else:
        getattr(request, field).append(b"\x0a\x04beta")
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xff", "is not a ForwardBackwardRequest"),
        (request_with("shape"), r"has 2 numbers, but the shape \[3\]"),
        (request_with("dtype"), "must be float32 or int64"),
        (request_with("dense"), "17 bytes are no array of int64"),
        (request_with("sparse_csr"), "target_tokens: sparse tensors, and several numbers"),
        (
            forward_request("m", [([1, 2], {"target_tokens": [[2, 3], [3, 4]]})]),
            "target_tokens: sparse tensors, and several numbers",
        ),
        (request_with("loss_fn_config"), "loss_fn_config: is not supported here"),
        (request_with("loss_fn_config_v2"), "loss_fn_config: is not supported here"),
    ],
)
def test_faulty_bytes(body, message):
    with pytest.raises(PackError, match=message):
        request = read_forward_request(body)
        checked_row(0, request.data[0], LOSSES["cross_entropy"], CONTEXT, VOCABULARY)


def test_images_are_rejected():
    datum = MESSAGES.Datum()
    image = b"\x12\x03\x0a\x01x"  # the field 2 of a chunk, a message whose field 1 is "x"
    datum.model_input.add().MergeFromString(image)
    with pytest.raises(PackError, match="images"):
        checked_row(0, datum, LOSSES["cross_entropy"], CONTEXT, VOCABULARY)


def passes(most: int, *lengths: int) -> list[list[int]]:
    rows = [row_of([1] * n, {"target_tokens": [1] * n}, context=4096) for n in lengths]
    return split_passes(rows, most)


def test_the_rows_of_each_pass():
    """Padding counts, a long row is a pass by itself, and a large pass has little padding."""
    assert passes(12, 2, 6, 5) == [[1, 2], [0]]
    assert passes(12, 1, 13) == [[1], [0]]
    assert passes(256, 120, 8) == [[0, 1]]
    assert passes(2048, 84, 300) == [[1], [0]]
    assert passes(2048, 300, 160, 300) == [[0, 2, 1]]


def test_the_messages_were_compiled_from_the_proto_file():
    file = Path(tinker_pb2.__file__).with_name("tinker.proto")
    declared = {}
    for name, body in re.findall(r"message (\w+) \{(.*?)\n\}", file.read_text(), re.DOTALL):
        declared[name] = {
            (field, int(number), bool(repeated), SCALARS.get(kind, kind))
            for repeated, kind, field, number in FIELD.findall(body)
        }

    compiled = {}
    for name, message in tinker_pb2.DESCRIPTOR.message_types_by_name.items():
        compiled[name] = {
            (f.name, f.number, f.is_repeated, f.message_type.name if f.message_type else f.type)
            for f in message.fields
        }
    assert declared == compiled and len(declared) == 13
