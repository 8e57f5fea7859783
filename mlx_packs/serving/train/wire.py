"""The Protocol Buffers messages of the Tinker protocol: rows to train on, and what comes of them.

Only the fields that are read or written are declared; a parser skips all others. A map of the
protocol is declared as what it is on the wire, a repeated pair of key and value.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ...errors import PackError

MEDIA_TYPE = "application/x-protobuf"
_PACKAGE = "mlx_packs.tinker"
_FLOAT32 = 1
_INT64 = 2
_DTYPES = {_FLOAT32: np.dtype(np.float32), _INT64: np.dtype(np.int64), 3: np.dtype(np.int32)}
_KIND = re.compile(r"(\w+)(?:([(\[])(\d*)[)\]])?")
MOST_DATUMS = 1 << 16
STOPPED = 0
TOO_LONG = 1

# message -> field -> (number, kind); a kind with [] is repeated. Texts and lists of a request have
# a bound: string(64), int64[2]. Bytes are bounded by the body, and by what is read of them.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "bytes"),
        "dtype": (3, "int32"),
        "shape": (4, "int64[2]"),
    },
    "NamedTensor": {"key": (1, "string(64)"), "value": (2, "Tensor")},
    "EncodedText": {"tokens": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "EncodedText")},
    "Datum": {"model_input": (1, "Chunk[10000]"), "loss_fn_inputs": (2, "NamedTensor[16]")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string(1024)"),
        "seq_id": (2, "int32"),
        "data": (3, f"Datum[{MOST_DATUMS}]"),
        "loss_fn": (4, "string(64)"),
        "loss_fn_config": (5, "bytes[16]"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "bytes[16]"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
    },
    "NamedBatchedTensor": {"key": (1, "string"), "value": (2, "BatchedTensor")},
    "ArrayRecord": {"fields": (2, "NamedBatchedTensor[]"), "num_datums": (3, "int64")},
    "NamedNumber": {"key": (1, "string"), "value": (2, "double")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "ArrayRecord[]"),
        "metrics": (3, "NamedNumber[]"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
    },
    "SampleResponse": {
        "sequences": (1, "SampledSequence[]"),
        "prompt_logprobs": (2, "bytes"),
    },
}


def _parts(kind: str) -> tuple[str, str, int | None]:
    """Return the type of a field, its bracket and its bound: string, "(" and 64."""
    item, bracket, bound = _KIND.fullmatch(kind).groups()
    return item, bracket or "", int(bound) if bound else None


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto()
    file.name = "mlx_packs_tinker.proto"
    file.package = _PACKAGE
    file.syntax = "proto3"

    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            _declare(message.field.add(name=field_name, number=number), kind)

    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    of_name = pool.FindMessageTypeByName
    return {
        name: message_factory.GetMessageClass(of_name(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


def _declare(declared: Any, kind: str) -> None:
    item, bracket, _ = _parts(kind)
    declared.label = declared.LABEL_REPEATED if bracket == "[" else declared.LABEL_OPTIONAL

    if item in _MESSAGES:
        declared.type = declared.TYPE_MESSAGE
        declared.type_name = f".{_PACKAGE}.{item}"
    else:
        declared.type = getattr(declared, f"TYPE_{item.upper()}")


MESSAGES = _classes()


@dataclass(frozen=True)
class RawDatum:
    """A datum as it was sent: ``tokens`` [T] int32 and arrays by name; nothing is checked yet."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ForwardRequest:
    """A request for a forward pass, or for one with its gradient.

    Attributes:
        seq_id: number of the request among those of its model.
    """

    model_id: str
    seq_id: int
    data: Sequence[RawDatum]
    loss: str
    forward_only: bool = False


def read_forward_request(body: bytes) -> ForwardRequest:
    """Return a request from its bytes; a PackError if they are none."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise PackError(f"body: is not a ForwardBackwardRequest ({error}).") from None
    _check_bounds(message, "")
    if message.loss_fn_config or message.loss_fn_config_v2:
        raise PackError(
            "loss_fn_config: is not supported here. Leave it out: every loss has the thresholds "
            "of docs/tinker.md.",
            flag="loss_fn_config",
        )

    data = [_datum(i, each) for i, each in enumerate(message.data)]
    return ForwardRequest(
        message.model_id, message.seq_id, data, message.loss_fn, message.forward_only
    )


def _check_bounds(message: Any, where: str) -> None:
    """Raise a PackError for a text or a list of a request that is longer than its bound."""
    for name, (_, kind) in _MESSAGES[message.DESCRIPTOR.name].items():
        item, bracket, bound = _parts(kind)
        value = getattr(message, name)

        if bound is not None and len(value) > bound:
            raise PackError(
                f"{where}{name}: has a length of {len(value)}, and {bound} is the most."
            )

        if item in _MESSAGES and bracket:
            for i, each in enumerate(value):
                _check_bounds(each, f"{where}{name}[{i}].")
        elif item in _MESSAGES and message.HasField(name):
            _check_bounds(value, f"{where}{name}.")


def _datum(i: int, message: Any) -> RawDatum:
    where = f"data[{i}]"
    tokens = [np.zeros(0, np.int32)]
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise PackError(f"{where}.model_input: has images or audio, which are not supported.")
        tokens.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), f"{where}.model_input"))

    inputs = {
        each.key: _tensor(each.value, f"{where}.loss_fn_inputs.{each.key}")
        for each in message.loss_fn_inputs
    }
    return RawDatum(np.concatenate(tokens), inputs)


def _tensor(message: Any, where: str) -> np.ndarray:
    """Return the numbers [T] of a tensor; it must be dense, with one number for each token."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise PackError(f"{where}: must be float32 or int64.")
    if message.sparse_csr or len(message.shape) > 1:
        raise PackError(
            f"{where}: sparse tensors, and several numbers for each token, are not supported here. "
            "Send one number for each token."
        )

    values = _array(message.dense, dtype, where)
    shape = list(message.shape) or [values.size]
    if shape != [values.size]:
        raise PackError(f"{where}: has {values.size} numbers, but the shape {shape}.")
    return values


def _array(content: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise PackError(f"{where}: {len(content)} bytes are no array of {dtype}.")
    return np.frombuffer(content, dtype)


def forward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return the output of a forward pass: log-probabilities [T] of each datum."""
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for values in logprobs:
        record = message.loss_fn_outputs.add(num_datums=1)
        value = record.fields.add(key="logprobs").value
        value.data = values.astype(np.float32).tobytes()
        value.offsets = np.array([0, 4 * values.size], np.int64).tobytes()
        value.dtype = _FLOAT32

    for name, number in metrics.items():
        message.metrics.add(key=name, value=number)
    return message.SerializeToString()


@dataclass(frozen=True)
class Sample:
    """A sampled sequence with the log-probability of each token."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool


def sample_output(sequences: Sequence[Sample], prompt_logprobs: np.ndarray | None) -> bytes:
    """Return sampled sequences, and log-probabilities of the prompt's tokens if asked for."""
    message = MESSAGES["SampleResponse"]()
    for each in sequences:
        sequence = message.sequences.add(stop_reason=STOPPED if each.stopped else TOO_LONG)
        sequence.tokens = np.array(each.tokens, np.int32).tobytes()
        sequence.logprobs = np.array(each.logprobs, np.float32).tobytes()

    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    return message.SerializeToString()
