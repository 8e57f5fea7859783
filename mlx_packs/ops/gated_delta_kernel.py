"""MLX's own kernels of the gated delta rule: when they compute a segment, and what they cost."""

import functools
from typing import NamedTuple

import mlx.core as mx

from ..chips import chip_here
from ._backend import KernelSpec, Plans
from ._check import Check, normal
from ._cost import Launch
from .gated_delta import CHUNK, RecurrenceSizes, reference, widened
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
    reason = "MLX has no kernel for these heads" if not has_fused_gradient(*instance) else None
    return SPEC.choose(instance, sizes.rows * sizes.length, sizes, reason)


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


def plans(_: _Instance, __: int, sizes: RecurrenceSizes) -> Plans:
    """Return the launches, forward and backward, of our products and of MLX's kernels.

    MLX's backward pass stores the state of every token and reads it again, and adds the gradients
    of q and k up in memory; on chips with matrix units it stores a state in 256 tokens.
    """
    rows, length, _, heads, wide, narrow = sizes
    all_tokens = rows * heads * length
    within = 2 * CHUNK * (5 * wide + 2 * narrow + 2 * CHUNK * CHUNK.bit_length())

    flops = 3 * all_tokens * (within + 6 * wide * narrow)
    ours = [Launch("products", 10 * all_tokens * sizes.in_flight, flops, matmul=True)]
    ours += [Launch("states", 0.0)] * (10 * -(-length // CHUNK))

    cached = 256 if chip_here().matrix_units else 1
    states = sizes.state_bytes * length // cached
    arrays = 4 * all_tokens * (2 * wide + 3 * narrow)
    steps = 20 * all_tokens * wide * narrow

    theirs = [
        Launch("forward", arrays, steps // 3),
        Launch("states", arrays + states, steps // 3),
        Launch("gradients", 2 * arrays + states, steps, 2 * states),
    ]
    return ours, theirs


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


SPEC = KernelSpec("gated_delta", checks, plans)
