"""exp, and what is made of it, for MLX on CPUs.

MLX's CPU backend on Linux takes exp one element at a time (12 ns each); in a training step that is
a third of the time. The usual range reduction and a polynomial, written as MLX array operations,
are 3 times as fast, since additions and products are vectorized. On other devices, and for other
dtypes than float32, the reference is used.
"""

import mlx.core as mx
import mlx.nn as nn

_LOG2_E = 1.4426950408889634
# ln 2 in two parts: n * _LN2_HIGH is exact in float32 for every n in range (Cody and Waite 1980)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp(r) = 1 + r + r^2 p(r) on [-ln 2 / 2, ln 2 / 2]; coefficients of Cephes' expf
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def _by_polynomial(x: mx.array) -> bool:
    return x.dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


def exp(x: mx.array) -> mx.array:
    """e to the power of x. It has no gradient of its own: callers know theirs.

    Semantics: mx.exp(x), within 4e-7 relative for -87 <= x <= 88; clipped to that range.

    Args: x: any shape and float dtype.   Returns: the same shape and dtype.
    """
    if not _by_polynomial(x):
        return mx.exp(x)
    x = mx.clip(x, -87.0, 88.0)
    n = mx.round(x * _LOG2_E)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = r * _POLYNOMIAL[0] + _POLYNOMIAL[1]
    for coefficient in _POLYNOMIAL[2:]:
        p = p * r + coefficient
    power_of_two = ((n.astype(mx.int32) + 127) << 23).view(mx.float32)
    return (p * (r * r) + (r + 1)) * power_of_two


@mx.custom_function
def _swiglu(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    sigmoid = mx.reciprocal(exp(-gate) + 1)
    return gate * sigmoid * up, sigmoid


@_swiglu.vjp
def _swiglu_vjp(primals, cotangents, outputs):
    (gate, up), ct, sigmoid = primals, cotangents[0], outputs[1]
    silu = gate * sigmoid
    return ct * up * (sigmoid + silu * (1 - sigmoid)), ct * silu


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """The gated unit of SwiGLU (https://arxiv.org/abs/2002.05202).

    Semantics: gate * sigmoid(gate) * up

    Args: gate, up: the same shape, any float dtype.   Returns: the same.
    """
    if not _by_polynomial(gate):
        return nn.silu(gate) * up
    return _swiglu(gate, up)[0]
