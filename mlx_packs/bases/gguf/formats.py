"""The format that each weight of a GGUF file gets, and how far it then is from the file's."""

from collections.abc import Mapping

import numpy as np

from ...runtime import mx
from .blocks import DENSE, FORMATS, BlockFormat, block_rows, blocks_of, dequantized
from .header import GgufFile, TensorInfo

_MOST_ERROR = 0.01  # of a weight that stays quantized, relative to its root mean square
_SAMPLED_ROWS = 64  # of a tensor
_LEAST = 1e-30  # for weights that are all 0

Errors = dict[str, dict[str, float] | None]  # by type; None for a type that becomes dense


def choose_formats(
    file: GgufFile, names: Mapping[str, str], dtype: mx.Dtype, *, dense_k: bool
) -> tuple[dict[str, BlockFormat], Errors]:
    """Return the smallest format of each matrix that is near enough, and errors by type.

    Errors are relative to the root mean square, with scales in ``float32`` and ``rounded`` to
    ``dtype``. Matrices without a format become dense; with ``dense_k`` these include K-quants.
    """
    chosen: dict[str, BlockFormat] = {}
    squares: dict[str, np.ndarray] = {}
    errors: Errors = {}

    for name, tensor in names.items():
        info = file.tensors[tensor]
        if len(info.shape) != 2 or info.type in DENSE:
            continue

        errors.setdefault(info.type, None)
        for block_format in FORMATS.get(info.type, ()):
            if block_format.is_k and dense_k:
                continue
            sums = _squares(file, info, block_format, dtype)
            if sums[1] <= _MOST_ERROR**2 * sums[0]:
                chosen[name] = block_format
                squares[info.type] = squares.get(info.type, 0) + sums
                break

    for kind, sums in squares.items():
        relative = np.sqrt(sums[1:] / max(sums[0], _LEAST)).round(6).tolist()
        errors[kind] = dict(zip(("float32", "rounded"), relative, strict=True))
    return chosen, dict(sorted(errors.items()))


def _squares(
    file: GgufFile, tensor: TensorInfo, block_format: BlockFormat, dtype: mx.Dtype
) -> np.ndarray:
    """Sums of squares of a tensor by a sample of its rows: of weights, and of errors by scales."""
    if not block_format.is_k:
        return np.array([1.0, 0.0, 0.0])

    rows = block_rows(file, tensor)
    sample = rows[:: -(-len(rows) // _SAMPLED_ROWS)]
    codes, *parts = block_format.read(blocks_of(sample, tensor.type))
    expected = dequantized(sample, tensor.type).reshape(codes.shape).astype(np.float64)

    sums = [np.square(expected).sum()]
    for scale_dtype in (mx.float32, dtype):
        scales, biases = (mx.array(p).astype(scale_dtype).astype(mx.float32) for p in parts)
        actual = codes * np.array(scales)[:, None] + np.array(biases)[:, None]
        sums.append(np.square(actual - expected).sum())
    return np.array(sums) * (len(rows) / len(sample))
