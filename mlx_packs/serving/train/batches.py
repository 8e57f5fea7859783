"""Datums of a request as checked rows, and rows as padded batches of arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import PackError
from .losses import Loss
from .wire import RawDatum

_MULTIPLE = 8  # rows are padded to a length that it divides
SMALL = 256  # inputs of a pass in which others take little time
_LEAST_USED = 0.75  # of the inputs of a larger pass; the others are padding


@dataclass(frozen=True)
class Row:
    """A datum that was checked.

    Attributes:
        tokens: [T] int32.
        targets: [T] or [T, K] int32, K for each token.
        inputs: of the loss, [T * K] float32 by name; a number where all targets have the same.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray | float]

    @property
    def size(self) -> int:
        """Inputs of a forward pass; further targets of a token cost little."""
        return len(self.tokens)


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
    return Row(datum.tokens, targets.astype(np.int32), inputs)


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
    """Rows of one model in a forward pass.

    Attributes:
        numbers: of the rows in their request.
        arrays: ``tokens`` [B, T] int32, padded with 0; ``positions`` [N], of those that are no
            padding, in the flattened tokens; ``owners`` [M], the row of each target.
        targets: of each row, [T] or [T, K] int32; M in all.
        inputs: of the loss, [M] float32 by name.
    """

    numbers: tuple[int, ...]
    arrays: dict[str, np.ndarray]
    targets: tuple[np.ndarray, ...]
    inputs: dict[str, np.ndarray]


@dataclass
class Room:
    """The room of a forward pass, whose rows are padded to the longest: ``most`` inputs in all.

    A row that is longer is a pass of its own.
    """

    most: int
    rows: int = 0
    longest: int = 0
    used: int = 0  # inputs that are no padding

    def takes(self, row: Row) -> bool:
        """Return whether another row fits, without too much padding; it has its place then."""
        longest = max(self.longest, row.size)
        inputs = longest * (self.rows + 1)
        used = self.used + row.size
        if self.rows and (inputs > self.most or used < _LEAST_USED * inputs and inputs > SMALL):
            return False

        self.rows += 1
        self.longest = longest
        self.used = used
        return True


def padded_width(rows: Sequence[Row]) -> int:
    """Return the inputs to which rows of one pass are padded."""
    longest = max(len(row.tokens) for row in rows)
    return -(-longest // _MULTIPLE) * _MULTIPLE


def batch_of(rows: Sequence[Row], numbers: Sequence[int], width: int) -> RowBatch:
    """Return some rows of a request, by their numbers, padded to a width."""
    chosen = [rows[number] for number in numbers]
    tokens = np.zeros((len(chosen), width), np.int32)
    positions = []
    for i, row in enumerate(chosen):
        tokens[i, : len(row.tokens)] = row.tokens
        positions.append(i * width + np.arange(len(row.tokens)))

    sizes = [row.targets.size for row in chosen]
    arrays = {
        "tokens": tokens,
        "positions": np.concatenate(positions).astype(np.int32),
        "owners": np.repeat(np.arange(len(chosen), dtype=np.int32), sizes),
    }
    inputs = {
        name: np.concatenate(
            [np.full(row.targets.size, row.inputs[name], np.float32) for row in chosen]
        )
        for name in chosen[0].inputs
    }
    return RowBatch(tuple(numbers), arrays, tuple(row.targets for row in chosen), inputs)
