"""The exponential and error functions, SwiGLU and GELU, of float32 arrays on CPUs.

MLX's CPU backend on Linux takes exp one element at a time (12 ns each), and erf in 26 ns; in a
training step that is a third of the time, in an encoder half. The usual range reduction and
rational functions, written as MLX array operations, are 3 to 6 times as fast, since additions and
products are vectorized. All is float32, and `exp` and `exp2` have no gradient: callers know theirs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import mlx.core as mx

# Maps pieces to groups of them, each with its stream.
Rounds = Callable[[Iterable[int]], Iterator[list[tuple[AbstractContextManager, int]]]]
_LOG2_E = 1.4426950408889634
_LN_2 = 1 / _LOG2_E
# ln 2 in two parts: n * _LN2_HIGH is exact in float32 for every n in range (Cody and Waite 1980)
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
# 1.5 * 2^23: a float32 of up to 2^22 that it is added to is rounded, and is in the low bits
_ROUNDING = 12582912.0
# Lowest exponent of 2. What attention masks gets 2^-64, which is nothing beside the 1 of the
# largest score, and whose products with values and gradients are normal numbers. Those of 2^-126
# are not, and a product of matrices with them takes an Intel processor 4 times as long.
_LOWEST = -64.0
# exp(r) = (u + r) / (u - r) with u = r coth(r / 2) = 2 + r^2 / 6 - r^4 / 360 + ...; the same for
# 2^r, whose u has been divided by ln 2. On [-ln 2 / 2, ln 2 / 2] three terms are right to 3e-8.
_NATURAL = (2.0, 1 / 6, -1 / 360)
_BINARY = (2 * _LOG2_E, _LN_2 / 6, -(_LN_2**3) / 360)
# erf(x) = x P(x^2) / Q(x^2) within 2e-8 for |x| <= 3.95, where it is 1 to float32: coefficients of
# both from the lowest, by reweighted least squares.
_ERF_END = 3.95
_ERF_P = (1.128379007, 0.1940286378, 0.05320593955, 0.003916947831, 2.875809255e-4, 2.011657924e-6)
_ERF_Q = (1.0, 0.505284897, 0.1155876601, 0.01526999235, 0.001198088557, 3.783777996e-5)


def exp(x: mx.array) -> mx.array:
    """Return e to the power of x within 4e-7 relative for -44 <= x <= 88; x is clipped to that."""
    x = mx.clip(x, _LOWEST * _LN_2, 88.0)
    rounded = x * _LOG2_E + _ROUNDING
    n = rounded - _ROUNDING
    return _scaled(x - n * _LN2_HIGH - n * _LN2_LOW, rounded, _NATURAL)


def exp2(x: mx.array) -> mx.array:
    """Return 2 to the power of x within 4e-7 relative for -64 <= x <= 127; 2^-64 below."""
    # two thirds of the operations of `exp`
    x = mx.maximum(x, _LOWEST)
    rounded = x + _ROUNDING
    return _scaled(x - (rounded - _ROUNDING), rounded, _BINARY)


def _scaled(r: mx.array, rounded: mx.array, terms: tuple[float, float, float]) -> mx.array:
    """Return exp or 2^ of r times the power of two in the low bits of ``rounded``."""
    square = r * r
    u = (square * terms[2] + terms[1]) * square + terms[0]
    power = ((u + r) / (u - r)).view(mx.int32)
    return (power + (rounded.view(mx.int32) << 23)).view(mx.float32)


def _by_rows(
    function: Callable[..., list[mx.array]],
    count: int,
    arrays: Sequence[mx.array],
    elements: int,
    rounds: Rounds,
) -> list[mx.array]:
    """Return the ``count`` results of a function of single elements, computed by rows of [N, D].

    Rows wait for those before them, so that temporaries stay in the processor's cache.
    """
    rows, width = arrays[0].shape
    step = max(1, elements // width)
    if rows <= step:
        return function(*arrays)

    results = [mx.zeros(arrays[0].shape) for _ in range(count)]
    inputs = list(arrays)
    for group in rounds(range(0, rows, step)):
        parts = []
        for stream, start in group:
            with stream:
                parts.append((start, function(*(a[start : start + step] for a in inputs))))
        for start, part in parts:
            for result, own in zip(results, part, strict=True):
                result[start : start + step] = own
        inputs = mx.depends(arrays, results)
    return results


def _gated(gate: mx.array, up: mx.array) -> list[mx.array]:
    return [gate * mx.reciprocal(exp(-gate) + 1) * up]


def _gated_gradients(gate: mx.array, up: mx.array, cotangent: mx.array) -> list[mx.array]:
    sigmoid = mx.reciprocal(exp(-gate) + 1)
    silu = gate * sigmoid
    return [cotangent * up * (sigmoid + silu * (1 - sigmoid)), cotangent * silu]


def swiglu(gate: mx.array, up: mx.array, elements: int, rounds: Rounds) -> mx.array:
    """Return gate * sigmoid(gate) * up, of any shape, by rows of `elements` on streams.

    ``rounds`` is the profile's.
    """

    @mx.custom_function
    def unit(gate: mx.array, up: mx.array) -> mx.array:
        return _by_rows(_gated, 1, (gate, up), elements, rounds)[0]

    @unit.vjp
    def unit_vjp(
        primals: Sequence[mx.array], cotangent: mx.array, _: mx.array
    ) -> tuple[mx.array, ...]:
        return tuple(_by_rows(_gated_gradients, 2, (*primals, cotangent), elements, rounds))

    flat = (-1, gate.shape[-1])
    return unit(gate.reshape(flat), up.reshape(flat)).reshape(gate.shape)


def _erf(x: mx.array) -> mx.array:
    """Return the error function, within 5e-7."""
    x = mx.clip(x, -_ERF_END, _ERF_END)
    square = x * x

    def polynomial(coefficients: tuple[float, ...]) -> mx.array:
        *others, total = coefficients
        for coefficient in reversed(others):
            total = total * square + coefficient
        return total

    return x * polynomial(_ERF_P) / polynomial(_ERF_Q)


def _normal(x: mx.array) -> mx.array:
    """Return the share of a normal distribution that is below x."""
    return 0.5 + 0.5 * _erf(x * math.sqrt(0.5))


@mx.custom_function
def gelu(x: mx.array) -> mx.array:
    """Return x * (1 + erf(x / sqrt(2))) / 2; the backward keeps only ``x``."""
    return x * _normal(x)


@gelu.vjp
def _gelu_vjp(x: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
    # recomputed from x: keeping it would be a third array as wide as the feed-forward
    density = exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return cotangent * (_normal(x) + x * density)
