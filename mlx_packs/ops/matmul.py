"""Products with quantized weights, of which some slices of rows are dense at a time.

MLX allocates ahead of what it computes, and computes independent work side by side: without
slices that wait for each other, several dense weights of a block are in memory at once.
"""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from .profile import profile

# (start, stop, after) to dense rows W[start:stop] in the dtype of ``after``, not before it is there
Rows = Callable[[int, int, mx.array], mx.array]


def sliced_matmul(
    x: mx.array,
    shape: tuple[int, int],
    rows: Rows,
    forward: Callable[[mx.array], mx.array] | None = None,
) -> mx.array:
    """Return the product with a frozen weight W; the gradient reaches x only, and unpacks W again.

    Semantics: y = x @ rows(0, O, x).T

    Args:
        x: [..., D], any float dtype.
        shape: (O, D) of W.
        rows: Gives dense slices of W.
        forward: Computes x [N, D] to [N, O] in another way, in the forward pass only.

    Returns:
        [..., O] in the dtype of x.
    """

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        if forward is not None:
            return forward(x)
        return _sliced_forward(x, shape, rows)

    @product.vjp
    def product_vjp(_: Sequence[mx.array], cotangent: mx.array, __: Sequence[mx.array]) -> mx.array:
        return _sliced_backward(cotangent, shape, rows)

    return product(x.reshape(-1, shape[1])).reshape(*x.shape[:-1], shape[0])


def _sliced_forward(x: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """Return x [N, D] @ W.T, [N, O]."""
    device = profile()
    parts: list[mx.array] = []
    for group in device.rounds(_slices(shape, len(x))):
        if parts:
            x = mx.depends(x, parts[-device.streams :])
        for stream, (start, stop) in group:
            with stream:
                parts.append(x @ rows(start, stop, x).T)

    if len(parts) == 1:
        return parts[0]
    return mx.concatenate(parts, axis=1)


def _sliced_backward(dy: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """Return dy [N, O] @ W, [N, D]."""
    totals: list[mx.array] = []  # of each stream
    for group in profile().rounds(_slices(shape, len(dy))):
        if totals:
            dy = mx.depends(dy, totals)
        for number, (stream, (start, stop)) in enumerate(group):
            with stream:
                part = dy[:, start:stop]
                weight = rows(start, stop, part)
                if number < len(totals):
                    totals[number] = mx.addmm(totals[number], part, weight)
                else:
                    totals.append(part @ weight)

    return sum(totals[1:], totals[0])


def _slices(shape: tuple[int, int], rows: int) -> Iterator[tuple[int, int]]:
    """Yield rows [start, stop) of a weight for a product with so many rows."""
    outputs = shape[0]
    size = profile().slice_size(shape, rows)
    for start in range(0, outputs, size):
        yield start, min(start + size, outputs)
