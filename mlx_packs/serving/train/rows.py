"""Requests of forward passes and their results: the binary messages of tinker.proto."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from ...errors import PackError
from ..fields import field_error
from . import tinker_pb2
from .losses import Datum, Loss

MESSAGES: Any = tinker_pb2
MEDIA_TYPE = "application/x-protobuf"
_FLOAT32 = 1
_INT64 = 2
_DTYPES = {_FLOAT32: np.dtype(np.float32), _INT64: np.dtype(np.int64), 3: np.dtype(np.int32)}
MOST_DATUMS = 1 << 16
_MOST_CHUNKS = 10_000
_MOST_INPUTS = 16
_LONGEST_NAME = 64


def read_forward_request(body: bytes) -> Any:
    """Return a ForwardBackwardRequest from its bytes; `checked_row` checks its datums."""
    message = MESSAGES.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise PackError(f"body: is not a ForwardBackwardRequest ({error}).") from None
    _check_length("data", message.data, MOST_DATUMS)
    _check_length("loss_fn", message.loss_fn, _LONGEST_NAME)
    if message.loss_fn_config or message.loss_fn_config_v2:
        text = "Leave it out: every loss has the thresholds of docs/tinker.md."
        raise field_error("loss_fn_config", f"is not supported here. {text}")
    return message


def checked_row(i: int, message: Any, loss: Loss, context: int, vocab_size: int) -> Datum:
    """Return a datum with the inputs of a loss; a PackError says what is wrong with it."""
    where = f"data[{i}]"
    tokens = _tokens(message, f"{where}.model_input")
    length = len(tokens)
    if not 0 < length <= context:
        raise PackError(
            f"{where}: has {length} tokens. It must have 1 to {context}, the context of the base."
        )
    _check_tokens(tokens, vocab_size, f"{where}.model_input")

    where = f"{where}.loss_fn_inputs"
    arrays = _arrays(message, where)
    _check_arrays(arrays, loss, length, where)
    targets = arrays.pop("target_tokens")
    _check_tokens(targets, vocab_size, f"{where}.target_tokens")

    inputs = {name: np.ones(length, np.float32) for name in loss.optional}
    inputs |= {name: values.astype(np.float32) for name, values in arrays.items()}
    return Datum(tokens, targets.astype(np.int32), inputs)


def _check_tokens(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    if tokens.dtype.kind != "i":
        raise PackError(f"{where}: tokens must be integers.")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise PackError(
            f"{where}: token {outside.flat[0]} is outside of the vocabulary of {vocab_size}."
        )


def _check_arrays(arrays: Mapping[str, np.ndarray], loss: Loss, length: int, where: str) -> None:
    required = ("target_tokens", *loss.inputs)
    if unknown := sorted(set(arrays) - {*required, *loss.optional}):
        raise PackError(f"{where}.{unknown[0]:.40}: this loss does not read it.")
    if missing := [name for name in required if name not in arrays]:
        raise PackError(f"{where}.{missing[0]}: is required.")

    for name, values in arrays.items():
        if len(values) != length:
            raise PackError(
                f"{where}.{name}: has the shape {list(values.shape)}, but there are {length} "
                "tokens. Send a number for each of them."
            )
        if not np.isfinite(values).all():
            raise PackError(f"{where}.{name}: has NaN or infinite values.")


def _check_length(where: str, value: Sized, most: int) -> None:
    if len(value) > most:
        raise PackError(f"{where}: has a length of {len(value)}, and {most} is the most.")


def _tokens(message: Any, where: str) -> np.ndarray:
    """Return the tokens [T] int32 of a datum as it was sent."""
    _check_length(where, message.model_input, _MOST_CHUNKS)
    parts = [np.zeros(0, np.int32)]
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise PackError(f"{where}: has images or audio, which are not supported.")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), where))
    return np.concatenate(parts)


def _arrays(message: Any, where: str) -> dict[str, np.ndarray]:
    """Return the inputs of the loss of a datum by name, as they were sent."""
    _check_length(where, message.loss_fn_inputs, _MOST_INPUTS)
    arrays = {}
    for number, each in enumerate(message.loss_fn_inputs):
        _check_length(f"{where}[{number}].key", each.key, _LONGEST_NAME)
        arrays[each.key] = _tensor(each.value, f"{where}.{each.key}")
    return arrays


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


def forward_output(logprobs: Sequence[np.ndarray], loss: float) -> bytes:
    """Return the output of a forward pass: log-probabilities [T] of each datum, and the loss."""
    message = MESSAGES.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for values in logprobs:
        record = message.loss_fn_outputs.add(num_datums=1)
        value = record.fields.add(key="logprobs").value
        value.data = values.astype(np.float32).tobytes()
        value.offsets = np.array([0, 4 * values.size], np.int64).tobytes()
        value.dtype = _FLOAT32

    message.metrics.add(key="loss:sum", value=loss)
    return message.SerializeToString()
