"""Products with weights; of a packed one some slices of rows are dense at a time.

MLX allocates ahead of what it computes, and computes what is independent side by side: without
slices that wait for each other, several dense weights of a block are in memory at once.
"""

from collections.abc import Callable, Iterator

import mlx.core as mx

from ..runtime import on_cpu
from .lanes import lanes, rounds

SLICE_WEIGHTS = {"cpu": 1 << 20, "gpu": 1 << 26}  # that are dense at a time
_LEAST_WORK = 1 << 22  # multiplications that are worth a lane: a tenth of a millisecond
_MULTIPLE = 128  # of rows, so that blocks of up to 256 weights are whole for every even width

# (start, stop, after) to dense rows W[start:stop] in the dtype of ``after``, not before it is there
Rows = Callable[[int, int, mx.array], mx.array]


def device() -> str:
    """Which of the sizes of this package's slices hold: ``cpu`` or ``gpu``."""
    return "cpu" if on_cpu() else "gpu"


def sliced_matmul(x: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """Product with a frozen weight W; the gradient reaches x only, and unpacks W again.

    Semantics: y = x @ rows(0, O, x).T

    Args:
        x: [..., D], any float dtype.   shape: (O, D) of W.   rows: dense slices of W.
    Returns: [..., O] in the dtype of x.
    """

    @mx.custom_function
    def product(x):
        return sliced_forward(x, shape, rows)

    @product.vjp
    def product_vjp(_, cotangent, __):
        return sliced_backward(cotangent, shape, rows)

    return product(x.reshape(-1, shape[1])).reshape(*x.shape[:-1], shape[0])


def sliced_forward(x: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """x [N, D] @ W.T, [N, O]."""
    parts: list[mx.array] = []
    for group in rounds(_slices(shape, len(x))):
        if parts:
            x = mx.depends(x, parts[-lanes() :])
        for lane, (start, stop) in group:
            with lane:
                parts.append(x @ rows(start, stop, x).T)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def sliced_backward(dy: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """dy [N, O] @ W, [N, D]."""
    totals: list[mx.array] = []  # of each lane
    for group in rounds(_slices(shape, len(dy))):
        if totals:
            dy = mx.depends(dy, totals)
        for number, (lane, (start, stop)) in enumerate(group):
            with lane:
                part = dy[:, start:stop]
                weight = rows(start, stop, part)
                if number < len(totals):
                    totals[number] = mx.addmm(totals[number], part, weight)
                else:
                    totals.append(part @ weight)
    return sum(totals[1:], totals[0])


def _slices(shape: tuple[int, int], rows: int) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of a weight; of a large product at least a slice for each lane."""
    outputs, width = shape
    step = max(1, SLICE_WEIGHTS[device()] // width // _MULTIPLE) * _MULTIPLE
    if rows * width * outputs >= lanes() * _LEAST_WORK:
        step = min(step, -(-outputs // lanes() // _MULTIPLE) * _MULTIPLE)
    for start in range(0, outputs, step):
        yield start, min(start + step, outputs)


def dense_matmul(x: mx.array, weight: mx.array) -> mx.array:
    """Product with a dense weight, rows of x dealt to the lanes, in both directions.

    Semantics: y = x @ weight.T

    Args:
        x: [..., D].   weight: [O, D].
    Returns: [..., O].
    """
    rows = x.reshape(-1, x.shape[-1])
    count = lanes()
    if not 1 < count <= len(rows) or len(rows) * weight.size < count * _LEAST_WORK:
        return x @ weight.T
    step = -(-len(rows) // count)
    parts = []
    for group in rounds(mx.split(rows, range(step, len(rows), step))):
        for lane, part in group:
            with lane:
                parts.append(part @ weight.T)
    return mx.concatenate(parts).reshape(*x.shape[:-1], -1)
