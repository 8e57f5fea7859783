"""8-bit codes with one float32 scale a block, on a map that is fine near zero.

Optimizer states, and the absmax of NF4, span many decades inside a block. The dynamic map has seven
decades with more values in the larger ones: https://arxiv.org/abs/2110.02861
"""

import functools
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

BLOCK_SIZE = 256


@functools.cache
def dynamic_map(signed: bool = True) -> mx.array:
    """Return the 256 values of a code in [-1, 1] or [0, 1], sorted: bitsandbytes' map, exactly.

    Seven decades from 1e-6 to 1; decade i has 2^i values of each sign (2^(i+1) if there is one
    sign), in the middles of equal parts of [0.1, 1]. 0 and 1 are added.
    """
    low = np.float32(0.1)
    width = np.float64(np.float32(0.9))
    values = [0.0, 1.0]

    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        k = np.arange(parts + 1)
        step = width / parts
        # each half from its own end, as torch.linspace does
        ends = np.where(k < (parts + 1) // 2, low + step * k, 1 - step * (parts - k))
        ends = ends.astype(np.float32)
        middles = (ends[1:] + ends[:-1]) / np.float32(2) * np.float32(10.0 ** (i - 6))
        values.extend(middles)
        if signed:
            values.extend(-middles)

    return mx.array(np.sort(np.array(values, dtype=np.float32)))


def nearest(values: mx.array, table: mx.array) -> mx.array:
    """Return the index, uint8, of the nearest entry of a sorted table [2^n], n of 8 at most."""
    return count_below(values, (table[1:] + table[:-1]) / 2)


def count_below(values: mx.array, edges: mx.array) -> mx.array:
    """Return how many of the 2^n - 1 sorted edges are below each value, uint8, by bisection."""
    below = mx.zeros(values.shape, mx.uint8)
    step = (edges.size + 1) // 2
    while step:
        below = mx.where(values > edges[below + (step - 1)], below + step, below)
        step //= 2
    return below


def encode(values: mx.array, signed: bool = True) -> tuple[mx.array, mx.array]:
    """Return codes uint8 [N] and scales float32 [N / 256, rounded up] of N values of any shape.

    Without signs, a number above 0 never becomes 0: an optimizer divides by its root.
    """
    flat = values.astype(mx.float32).flatten()
    blocks = mx.pad(flat, (0, -flat.size % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)
    scales = mx.abs(blocks).max(axis=1)
    scaled = blocks / mx.where(scales > 0, scales, 1)[:, None]

    codes = nearest(scaled, dynamic_map(signed))
    if not signed:
        codes = mx.maximum(codes, scaled > 0)
    return codes.flatten()[: flat.size], scales


def decode(
    codes: mx.array, scales: mx.array, shape: Sequence[int], signed: bool = True
) -> mx.array:
    """Return the numbers that `encode` stored, float32 of this shape, to within its precision."""
    size = math.prod(shape)
    values = mx.pad(dynamic_map(signed)[codes], (0, -size % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)
    return (values * scales[:, None]).flatten()[:size].reshape(shape)
