"""The binary messages of the Tinker protocol (tinker.proto): examples to train on, and results."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from ...errors import PackError
from . import tinker_pb2

MESSAGES: Any = tinker_pb2
MEDIA_TYPE = "application/x-protobuf"
_FLOAT32 = 1
_INT64 = 2
_DTYPES = {_FLOAT32: np.dtype(np.float32), _INT64: np.dtype(np.int64), 3: np.dtype(np.int32)}
MOST_DATUMS = 1 << 16
_MOST_CHUNKS = 10_000
_MOST_INPUTS = 16
_LONGEST_NAME = 64
STOPPED = 0
TOO_LONG = 1


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
    message = MESSAGES.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise PackError(f"body: is not a ForwardBackwardRequest ({error}).") from None
    _check_length("data", message.data, MOST_DATUMS)
    _check_length("loss_fn", message.loss_fn, _LONGEST_NAME)
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


def _check_length(where: str, value: Sized, most: int) -> None:
    if len(value) > most:
        raise PackError(f"{where}: has a length of {len(value)}, and {most} is the most.")


def _datum(i: int, message: Any) -> RawDatum:
    where = f"data[{i}]"
    _check_length(f"{where}.model_input", message.model_input, _MOST_CHUNKS)
    _check_length(f"{where}.loss_fn_inputs", message.loss_fn_inputs, _MOST_INPUTS)
    tokens = [np.zeros(0, np.int32)]
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise PackError(f"{where}.model_input: has images or audio, which are not supported.")
        tokens.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), f"{where}.model_input"))

    inputs = {}
    for number, each in enumerate(message.loss_fn_inputs):
        _check_length(f"{where}.loss_fn_inputs[{number}].key", each.key, _LONGEST_NAME)
        inputs[each.key] = _tensor(each.value, f"{where}.loss_fn_inputs.{each.key}")
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
    message = MESSAGES.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
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
    message = MESSAGES.SampleResponse()
    for each in sequences:
        sequence = message.sequences.add(stop_reason=STOPPED if each.stopped else TOO_LONG)
        sequence.tokens = np.array(each.tokens, np.int32).tobytes()
        sequence.logprobs = np.array(each.logprobs, np.float32).tobytes()

    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    return message.SerializeToString()
