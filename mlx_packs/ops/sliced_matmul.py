"""Products with a frozen packed weight of which one slice of rows is dense at a time.

MLX allocates ahead of what it computes, and computes what is independent side by side: without
slices that wait for each other, several dense weights of a block are in memory at once.
"""

from collections.abc import Callable, Iterator

import mlx.core as mx

from ..runtime import on_cpu

SLICE_WEIGHTS = {"cpu": 1 << 20, "gpu": 1 << 26}  # that are dense at a time
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
        return forward(x, shape, rows)

    @product.vjp
    def product_vjp(_, cotangent, __):
        return backward(cotangent, shape, rows)

    return product(x.reshape(-1, shape[1])).reshape(*x.shape[:-1], shape[0])


def forward(x: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """x [N, D] @ W.T, [N, O]."""
    parts: list[mx.array] = []
    for start, stop in _slices(shape):
        if parts:
            x = mx.depends(x, parts[-1])
        parts.append(x @ rows(start, stop, x).T)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def backward(dy: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """dy [N, O] @ W, [N, D]."""
    total: mx.array | None = None
    for start, stop in _slices(shape):
        part = dy[:, start:stop]
        weight = rows(start, stop, part if total is None else total)
        total = part @ weight if total is None else mx.addmm(total, part, weight)
    return total


def _slices(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    outputs, width = shape
    step = max(1, SLICE_WEIGHTS[device()] // width // _MULTIPLE) * _MULTIPLE
    for start in range(0, outputs, step):
        yield start, min(start + step, outputs)
