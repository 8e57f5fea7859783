"""MLX's own kernels of the gated delta rule, and when they compute a segment."""

import functools
from typing import NamedTuple

import mlx.core as mx

from ..chips import chip_here
from ._backend import KernelSpec
from ._check import Check, normal
from .gated_delta import RecurrenceSizes, reference, widened
from .profile import gradient_has, profile


class _Instance(NamedTuple):
    """The parameters of one kernel that MLX compiled."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int


def choose(sizes: RecurrenceSizes) -> str:
    """Return the backend of a call: ``metal`` where MLX has kernels for it, else ``reference``."""
    instance = _Instance(*sizes[2:])
    supported = has_fused_gradient(*instance)
    return SPEC.choose(instance, sizes.rows * sizes.length, sizes, supported)


@functools.cache
def has_fused_gradient(key_heads: int, value_heads: int, key_width: int, value_width: int) -> bool:
    """Return whether the gradient of MLX's own op is one primitive, not a loop, on this device."""
    if not profile().has_fused_kernels:
        return False

    q = mx.zeros((1, 2, key_heads, key_width))
    v = mx.zeros((1, 2, value_heads, value_width))
    gates = mx.ones(v.shape[:3])
    state = mx.zeros((1, value_heads, value_width, key_width))

    def outputs(*arrays: mx.array) -> list[mx.array]:
        return list(mx.fast.gated_delta_update(*arrays))

    primals = [q, q, v, gates, gates, state]
    return gradient_has("GatedDeltaUpdateVJP", outputs, primals, [v, state])


def checks(_: str, instance: _Instance) -> list[Check]:
    """Return inputs for which MLX's kernels are compared with the loop over tokens."""
    heads = instance.value_heads
    width = instance.value_width

    q, k = (
        normal((2, 37, instance.key_heads, instance.key_width), seed) / instance.key_width**0.5
        for seed in (0, 1)
    )

    v = normal((2, 37, heads, width), 2)
    gates = normal((2, 37, 2 * heads), 3)
    log_decay, beta = mx.split(mx.sigmoid(gates), 2, axis=-1)
    state = normal((2, heads, width, instance.key_width), 4)

    return [Check("tokens", fused, reference, [q, k, v, -log_decay, beta, state], alone=True)]


def fused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> list[mx.array]:
    """Return the result of MLX's kernels; in float32, since they round decays to the dtype of q."""
    dtype = q.dtype
    q, k, v, beta, log_decay = widened(q, k, v, beta, log_decay)
    output, state = mx.fast.gated_delta_update(q, k, v, mx.exp(log_decay), beta, state)
    return [output.astype(dtype), state]


def slower(*_: object) -> bool:
    """Return whether products of chunks are expected to be faster than MLX's kernels.

    The backward pass of these stores the state of every token and reads it again; on chips with
    matrix units it stores one in 256 tokens.
    """
    return not chip_here().matrix_units


SPEC = KernelSpec("gated_delta", checks, slower)
