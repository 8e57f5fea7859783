"""Products with weights; of a quantized one some slices of rows are dense at a time.

MLX allocates ahead of what it computes, and computes independent work side by side: without
slices that wait for each other, several dense weights of a block are in memory at once.
"""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from ..runtime import on_cpu
from .streams import rounds, stream_count
from .tiling import tiling

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
        return _sliced_forward(x, shape, rows) if forward is None else forward(x)

    @product.vjp
    def product_vjp(_: Sequence[mx.array], cotangent: mx.array, __: Sequence[mx.array]) -> mx.array:
        return _sliced_backward(cotangent, shape, rows)

    return product(x.reshape(-1, shape[1])).reshape(*x.shape[:-1], shape[0])


def _sliced_forward(x: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """Return x [N, D] @ W.T, [N, O]."""
    parts: list[mx.array] = []
    for group in rounds(_slices(shape, len(x))):
        if parts:
            x = mx.depends(x, parts[-stream_count() :])
        for stream, (start, stop) in group:
            with stream:
                parts.append(x @ rows(start, stop, x).T)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _sliced_backward(dy: mx.array, shape: tuple[int, int], rows: Rows) -> mx.array:
    """Return dy [N, O] @ W, [N, D]."""
    totals: list[mx.array] = []  # of each stream
    for group in rounds(_slices(shape, len(dy))):
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
    """Yield rows [start, stop) of a weight; of a large product at least a slice for each stream."""
    outputs, width = shape
    sizes, count = tiling(), stream_count()
    multiple = sizes.slice_rows
    step = max(1, sizes.slice_weights // width // multiple) * multiple
    if rows * width * outputs >= count * sizes.stream_work:
        step = min(step, -(-outputs // count // multiple) * multiple)
    for start in range(0, outputs, step):
        yield start, min(start + step, outputs)


def dense_matmul(x: mx.array, weight: mx.array) -> mx.array:
    """Return the product with a dense weight; CPU streams share the rows, in both directions.

    Semantics: y = x @ weight.T, [..., O] of [..., D] and [O, D]
    """
    rows = x.reshape(-1, x.shape[-1])
    count = stream_count()
    if not 1 < count <= len(rows) or len(rows) * weight.size < count * tiling().stream_work:
        return x @ weight.T
    step = -(-len(rows) // count)
    parts = []
    for group in rounds(mx.split(rows, range(step, len(rows), step))):
        for stream, part in group:
            with stream:
                parts.append(part @ weight.T)
    return mx.concatenate(parts).reshape(*x.shape[:-1], -1)


def dequantize(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    mode: str,
) -> mx.array:
    """Return the result of `mx.dequantize`, bit-identical: [O, D] of weight [O, D * bits / 32], uint32.

    On CPUs `mx.dequantize` takes weights one at a time; array operations are vectorized. They take
    three times the memory, so this is for slices.
    """
    if not (on_cpu() and mode == "affine" and bits in (4, 8) and scales.dtype == mx.float32):
        return mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits, mode=mode)
    codes = weight.view(mx.uint8)
    if bits == 4:  # spread two at a time: three operations on half as many bytes as weights
        pairs = codes.astype(mx.uint16)  # 00ab to 0a0b, whose lower byte comes first
        codes = ((pairs | (pairs << 4)) & 0x0F0F).view(mx.uint8)
    codes = codes.reshape(*scales.shape, group_size).astype(mx.float32)
    return (codes * scales[..., None] + biases[..., None]).reshape(len(weight), -1)
