"""Datums of a request as checked rows, and rows as padded batches of arrays."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import PackError
from .losses import Loss
from .wire import RawDatum

_MULTIPLE = 8  # rows are padded to a length that it divides


@dataclass(frozen=True)
class Row:
    """A datum that was checked.

    Attributes:
        tokens: [T] int32.
        targets: [T * K] int32, K for each token in turn.
        inputs: of the loss, [T * K] float32 by name; a number where all targets have the same.
        shape: of its log-probabilities, [T] or [T, K].
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray | float]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RowLimits:
    context: int  # tokens of a row
    vocab_size: int


def checked_row(
    i: int, datum: RawDatum, loss: Loss, settings: Mapping[str, float | None], limits: RowLimits
) -> Row:
    """Return a datum with the inputs of a loss; a PackError says what is wrong with it."""
    where = f"data[{i}]"
    length = len(datum.tokens)
    if not 0 < length <= limits.context:
        raise PackError(
            f"{where}: has {length} tokens. It must have 1 to {limits.context}, the context of the "
            "base."
        )
    _check_tokens(datum.tokens, limits.vocab_size, f"{where}.model_input")

    targets = datum.inputs.get("target_tokens")
    if targets is None:
        raise PackError(f"{where}.loss_fn_inputs.target_tokens: is required.")
    if targets.ndim not in (1, 2) or len(targets) != length or targets.size == 0:
        raise PackError(
            f"{where}.loss_fn_inputs.target_tokens: has the shape {list(targets.shape)}, but there "
            f"are {length} tokens. Send a target for each of them."
        )
    _check_tokens(targets, limits.vocab_size, f"{where}.loss_fn_inputs.target_tokens")

    inputs = _loss_inputs(datum, loss, settings, targets.shape, where)
    return Row(datum.tokens, targets.reshape(-1).astype(np.int32), inputs, targets.shape)


def _check_tokens(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    if tokens.dtype.kind != "i":
        raise PackError(f"{where}: tokens must be integers.")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise PackError(
            f"{where}: token {outside.flat[0]} is outside of the vocabulary of {vocab_size}."
        )


def _loss_inputs(
    datum: RawDatum,
    loss: Loss,
    settings: Mapping[str, float | None],
    shape: tuple[int, ...],
    where: str,
) -> dict[str, np.ndarray | float]:
    known = {"target_tokens", *loss.inputs, *loss.optional, *loss.settings}
    if unknown := sorted(set(datum.inputs) - known):
        raise PackError(f"{where}.loss_fn_inputs.{unknown[0]:.40}: this loss does not read it.")

    inputs: dict[str, np.ndarray | float] = dict.fromkeys(loss.optional, 1.0)
    inputs |= {name: value for name, value in settings.items() if value is not None}
    for name, values in datum.inputs.items():
        if name == "target_tokens":
            continue
        if values.shape != shape:
            raise PackError(
                f"{where}.loss_fn_inputs.{name}: has the shape {list(values.shape)}, but "
                f"target_tokens {list(shape)}."
            )
        if not np.isfinite(values).all():
            raise PackError(f"{where}.loss_fn_inputs.{name}: has NaN or infinite values.")
        inputs[name] = values.reshape(-1).astype(np.float32)

    for name in (*loss.inputs, *loss.settings):
        if name not in inputs:
            hint = " Name it in loss_fn_config." if name in loss.settings else ""
            raise PackError(f"{where}.loss_fn_inputs.{name}: is required.{hint}")
    return inputs


@dataclass(frozen=True)
class RowBatch:
    """Rows of one forward pass.

    Attributes:
        numbers: of the rows in their request.
        arrays: ``tokens`` [B, T] int32, padded with 0; ``positions`` [M], of each target in the
            flattened tokens; ``targets`` [M]; ``owners`` [M], the row of each target.
        inputs: of the loss, [M] float32 by name.
        shapes: of the log-probabilities of each row.
    """

    numbers: tuple[int, ...]
    arrays: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    shapes: tuple[tuple[int, ...], ...]


def batches_of(rows: Sequence[Row], tokens: int) -> Iterator[RowBatch]:
    """Yield batches of rows, similar lengths together, of at most ``tokens`` inputs and targets.

    A row that is longer is a batch of its own.
    """
    waiting: list[int] = []
    for number in sorted(range(len(rows)), key=lambda i: -_size(rows[i])):
        longest = _size(rows[waiting[0]]) if waiting else 0
        if waiting and longest * (len(waiting) + 1) > tokens:
            yield _laid_out(rows, waiting)
            waiting = []
        waiting.append(number)

    if waiting:
        yield _laid_out(rows, waiting)


def _size(row: Row) -> int:
    return max(len(row.tokens), len(row.targets))


def _laid_out(rows: Sequence[Row], numbers: Sequence[int]) -> RowBatch:
    chosen = [rows[number] for number in numbers]
    longest = max(len(row.tokens) for row in chosen)
    width = -(-longest // _MULTIPLE) * _MULTIPLE

    tokens = np.zeros((len(chosen), width), np.int32)
    positions = []
    for i, row in enumerate(chosen):
        tokens[i, : len(row.tokens)] = row.tokens
        repeats = len(row.targets) // len(row.tokens)
        positions.append(i * width + np.repeat(np.arange(len(row.tokens)), repeats))

    sizes = [len(row.targets) for row in chosen]
    arrays = {
        "tokens": tokens,
        "positions": np.concatenate(positions).astype(np.int32),
        "targets": np.concatenate([row.targets for row in chosen]),
        "owners": np.repeat(np.arange(len(chosen), dtype=np.int32), sizes),
    }
    inputs = {
        name: np.concatenate(
            [np.full(len(row.targets), row.inputs[name], np.float32) for row in chosen]
        )
        for name in chosen[0].inputs
    }
    return RowBatch(tuple(numbers), arrays, inputs, tuple(row.shape for row in chosen))
