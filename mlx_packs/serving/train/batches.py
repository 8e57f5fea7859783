"""Datums of a request as checked rows, and rows as padded batches of arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import PackError
from .losses import Loss
from .wire import RawDatum

_MULTIPLE = 8  # rows are padded to a length that it divides
_SMALL = 256  # inputs of a pass in which padding takes little time
_LEAST_USED = 0.75  # of the inputs of a larger pass; the others are padding


@dataclass(frozen=True)
class Datum:
    """A datum that was checked.

    Attributes:
        tokens: [T] int32.
        targets: [T] int32.
        inputs: of the loss, [T] float32 by name.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]

    @property
    def size(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class RowLimits:
    context: int  # tokens of a row
    vocab_size: int


def checked_row(i: int, datum: RawDatum, loss: Loss, limits: RowLimits) -> Datum:
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
    if len(targets) != length:
        raise PackError(
            f"{where}.loss_fn_inputs.target_tokens: has the shape {list(targets.shape)}, but there "
            f"are {length} tokens. Send a target for each of them."
        )
    _check_tokens(targets, limits.vocab_size, f"{where}.loss_fn_inputs.target_tokens")

    inputs = _loss_inputs(datum, loss, length, where)
    return Datum(datum.tokens, targets.astype(np.int32), inputs)


def _check_tokens(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    if tokens.dtype.kind != "i":
        raise PackError(f"{where}: tokens must be integers.")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise PackError(
            f"{where}: token {outside.flat[0]} is outside of the vocabulary of {vocab_size}."
        )


def _loss_inputs(datum: RawDatum, loss: Loss, length: int, where: str) -> dict[str, np.ndarray]:
    known = {"target_tokens", *loss.inputs, *loss.optional}
    if unknown := sorted(set(datum.inputs) - known):
        raise PackError(f"{where}.loss_fn_inputs.{unknown[0]:.40}: this loss does not read it.")

    inputs = {name: np.ones(length, np.float32) for name in loss.optional}
    for name, values in datum.inputs.items():
        if name == "target_tokens":
            continue
        if len(values) != length:
            raise PackError(
                f"{where}.loss_fn_inputs.{name}: has the shape {list(values.shape)}, but "
                f"target_tokens [{length}]."
            )
        if not np.isfinite(values).all():
            raise PackError(f"{where}.loss_fn_inputs.{name}: has NaN or infinite values.")
        inputs[name] = values.astype(np.float32)

    for name in loss.inputs:
        if name not in inputs:
            raise PackError(f"{where}.loss_fn_inputs.{name}: is required.")
    return inputs


@dataclass(frozen=True)
class RowBatch:
    """Rows of a forward pass, whose targets are one after the other.

    Attributes:
        tokens: [B, T] int32, padded with 0.
        positions: [N] int32, of those that are no padding, in the flattened tokens.
        targets: [N] int32.
        inputs: of the loss, [N] float32 by name.
        sizes: the targets of each row; N in all.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]
    sizes: Sequence[int]


def split_passes(rows: Sequence[Datum], most: int) -> list[list[int]]:
    """Return the numbers of the rows of each forward pass, the longest rows first.

    Padded to its longest row, a pass has at most ``most`` inputs, few of them padding; a row that
    is longer is a pass by itself.
    """
    passes: list[list[int]] = []
    longest = used = 0
    for number in sorted(range(len(rows)), key=lambda i: -rows[i].size):
        size = rows[number].size
        inputs = longest * (len(passes[-1]) + 1) if passes else size
        is_padded = used + size < _LEAST_USED * inputs and inputs > _SMALL
        if not passes or inputs > most or is_padded:
            passes.append([])
            longest = size
            used = 0
        passes[-1].append(number)
        used += size
    return passes


def batch_of(rows: Sequence[Datum]) -> RowBatch:
    """Return rows as arrays, padded to the longest of them."""
    width = -(-max(row.size for row in rows) // _MULTIPLE) * _MULTIPLE
    tokens = np.zeros((len(rows), width), np.int32)
    positions = []
    for i, row in enumerate(rows):
        tokens[i, : row.size] = row.tokens
        positions.append(i * width + np.arange(row.size))

    return RowBatch(
        tokens,
        np.concatenate(positions).astype(np.int32),
        np.concatenate([row.targets for row in rows]),
        {name: np.concatenate([row.inputs[name] for row in rows]) for name in rows[0].inputs},
        [row.size for row in rows],
    )
