"""The gated delta rule: the recurrence of Qwen3-Next and Qwen3.5 by chunks, with its gradient.

Semantics, for each head: S_t = a_t S_(t-1) + b_t (v_t - a_t S_(t-1) k_t) k_t^T;  y_t = S_t q_t,
with the decay a_t = exp(log_decay_t) and the learning rate b_t = beta_t. Yang et al. 2024, "Gated
Delta Networks" (https://arxiv.org/abs/2412.06464).

Autodiff of a loop over tokens keeps every state. Here a chunk of C tokens is a few products: with
the decay c_t from the beginning of the chunk, what all of its tokens add to the state is
D = (I + L)^-1 (b V - b c K S^T), where L[t, s] = b_t c_t / c_s (k_t k_s) below the diagonal. All of
this but the states is computed for every chunk at once; then the states follow each other, three
launches a chunk. Segments of chunks keep the state that they begin with, and the backward pass
computes them again. On Metal MLX's own kernels compute a segment on chips with matrix units.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import dispatch

CHUNK = 64  # tokens of a chunk, a power of two
SEGMENT_BYTES = 512 << 20  # that a segment may have in flight
_STEP_STATES = 5  # arrays of a state's size that autodiff keeps of a token

Arrays = Sequence[mx.array]
Segment = Callable[..., list[mx.array]]


class RecurrenceSizes(NamedTuple):
    """The sizes that the cost and the memory of a call depend on."""

    rows: int
    length: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of all rows and heads."""
        return 4 * self.rows * self.value_heads * self.key_width * self.value_width

    @property
    def in_flight(self) -> int:
        """Numbers that a token of one head has in flight in the backward pass of its segment.

        They are rows of chunks, of keys and values, and its part of states (as measured).
        """
        width = max(self.key_width, self.value_width)
        return 15 * CHUNK + 21 * width + 7 * self.key_width * self.value_width // CHUNK


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> list[mx.array]:
    """Return outputs and the last state, token by token, with autodiff's gradient."""
    repeats = v.shape[2] // q.shape[2]
    dtype = q.dtype
    q, k, v, beta, log_decay = widened(q, k, v, beta, log_decay)
    q = mx.repeat(q, repeats, 2)
    k = mx.repeat(k, repeats, 2)
    decay = mx.exp(log_decay)
    decay = decay[..., None, None] if decay.ndim == 3 else decay[..., None, :]

    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t]
        prediction = (state * k[:, t, :, None]).sum(-1)
        added = (v[:, t] - prediction) * beta[:, t, :, None]
        state = state + added[..., None] * k[:, t, :, None]
        outputs.append((state * q[:, t, :, None]).sum(-1))

    return [mx.stack(outputs, axis=1).astype(dtype), state]


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the outputs of the gated delta rule and the last state; all inputs get gradients.

    Args:
        q: queries [B, T, Hk, Dk].
        k: keys [B, T, Hk, Dk]; key head i serves value heads i Hv / Hk and following.
        v: values [B, T, Hv, Dv].
        log_decay: at most 0, [B, T, Hv], or [B, T, Hv, Dk] for a decay of its own in each column.
        beta: learning rates [B, T, Hv].
        state: [B, Hv, Dv, Dk] in float32, by default zeros.
        mask: boolean [B, T]; a token that is False leaves the state as it is, and its output is 0.

    Returns:
        Outputs [B, T, Hv, Dv] in the dtype of q, and the state after the last token.
    """
    if state is None:
        wide = mx.float64 if q.dtype == mx.float64 else mx.float32
        state = mx.zeros((v.shape[0], v.shape[2], v.shape[3], k.shape[3]), wide)

    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0)
        shown = mask.reshape(*mask.shape, *[1] * (log_decay.ndim - 2))
        log_decay = mx.where(shown, log_decay, 0)

    sizes = RecurrenceSizes(*q.shape[:3], v.shape[2], k.shape[3], v.shape[3])
    compute, token_bytes = _engine(sizes, log_decay.ndim == 4)
    tokens = _segment_tokens(token_bytes)

    outputs = []
    for start in range(0, sizes.length, tokens):
        cut = [x[:, start : start + tokens] for x in (q, k, v, log_decay, beta)]
        output, state = compute(*cut, state)
        outputs.append(output)

    output = mx.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]
    if mask is not None:
        output = mx.where(mask[..., None, None], output, 0)
    return output, state


def working_bytes(sizes: RecurrenceSizes) -> int:
    """Return the bytes that the backward pass of a call has in flight at most."""
    token_bytes = 4 * sizes.rows * sizes.value_heads * sizes.in_flight
    return token_bytes * min(sizes.length, _segment_tokens(token_bytes))


def _segment_tokens(token_bytes: int) -> int:
    """Return the tokens of a segment, whole chunks if they are more than one."""
    tokens = max(1, SEGMENT_BYTES // token_bytes)
    if tokens > CHUNK:
        tokens = tokens // CHUNK * CHUNK
    return tokens


def _engine(sizes: RecurrenceSizes, by_column: bool) -> tuple[Segment, int]:
    """Return the implementation of a segment, and the bytes that each token has in flight."""
    if by_column:
        return _recomputed(reference), _STEP_STATES * sizes.state_bytes

    kernels = dispatch.kernels("gated_delta")
    if kernels is not None and kernels.choose(sizes) != "reference":
        return kernels.fused, sizes.state_bytes
    return _recomputed(_chunked), 4 * sizes.rows * sizes.value_heads * sizes.in_flight


def _recomputed(compute: Segment) -> Segment:
    """Return a segment that keeps only its inputs; the backward pass computes it again.

    The second computation waits for the gradient of the result, so that one segment is in memory
    at a time.
    """
    segment = mx.custom_function(compute)

    @segment.vjp
    def backward(primals: Arrays, cotangents: Arrays, _: Arrays) -> list[mx.array]:
        cotangents = list(cotangents)
        return mx.vjp(compute, mx.depends(list(primals), cotangents), cotangents)[1]

    return segment


def widened(*arrays: mx.array) -> list[mx.array]:
    """Return arrays in float32, or float64 where they are."""
    return [x if x.dtype == mx.float64 else x.astype(mx.float32) for x in arrays]


def _chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> list[mx.array]:
    """Return outputs and the last state of a segment of any length, from products of chunks.

    Arrays are [chunks, B, Hk, Hv / Hk, tokens of a chunk, width]: a chunk is contiguous.
    """
    batch, length, key_heads, _ = q.shape
    dtype = q.dtype
    value_heads = v.shape[2]
    chunk = min(CHUNK, 1 << (length - 1).bit_length())

    def cut(x: mx.array) -> mx.array:
        x = mx.pad(x, [(0, 0), (0, -length % chunk), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(batch, -1, chunk, key_heads, x.shape[2] // key_heads, *x.shape[3:])
        return x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim))

    q, k, v, beta, log_decay = map(cut, widened(q, k, v, beta, log_decay))
    beta = beta[..., None]
    keys = k.swapaxes(-1, -2)
    since = mx.exp(mx.cumsum(log_decay, axis=-1))[..., None]
    between = _decays_between(log_decay)
    until = between[..., -1, :, None]

    lower = beta * (k @ keys) * between * mx.array(np.tri(chunk, k=-1, dtype=np.float32))
    solved, _ = _solve(lower, mx.concatenate([beta * v, beta * since * k], axis=-1))
    of_values, of_state = mx.split(solved, [v.shape[-1]], axis=-1)

    state = state.reshape(batch, key_heads, -1, *state.shape[2:])
    added, states, state = _scan(of_values, of_state, k * until, since[..., -1:, :], state)

    output = (q * since) @ states.swapaxes(-1, -2) + ((q @ keys) * between) @ added
    output = output.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, value_heads, v.shape[-1])
    state = state.reshape(batch, value_heads, *state.shape[3:])
    return [output[:, :length].astype(dtype), state]


def _decays_between(log_decay: mx.array) -> mx.array:
    """Return the decays [..., C, C] from token s to token t of a chunk, 0 where s is later.

    Each is a sum of its own: the difference of two sums loses the small behind the large.
    """
    size = log_decay.shape[-1]
    seen, after = (mx.array(np.tri(size, k=k, dtype=bool)) for k in (0, -1))
    sums = mx.cumsum(mx.where(after, log_decay[..., None], 0), axis=-2)
    return mx.exp(mx.where(seen, sums, -mx.inf))


@functools.cache
def _blocks_below(size: int) -> list[np.ndarray]:
    """Return masks [C, C] of the blocks below the diagonal that are merged, one for each level."""
    places = np.arange(size)
    levels = [places >> level for level in range(size.bit_length() - 1)]
    return [(at[:, None] % 2 == 1) & (at[None] == at[:, None] - 1) for at in levels]


def _inverse(lower: mx.array) -> mx.array:
    """Return (I + lower)^-1 of strictly lower triangular matrices [..., C, C], C a power of two.

    Blocks on the diagonal are merged in pairs: the inverse of [[A, 0], [B, D]] has
    -D^-1 B A^-1 below. It is as accurate as substitution, where a series of powers is not.
    """
    size = lower.shape[-1]
    inverse = mx.broadcast_to(mx.array(np.eye(size, dtype=np.float32)), lower.shape)

    for level, mask in enumerate(_blocks_below(size)):
        below = mx.where(mx.array(mask), lower, 0)
        if level == 0:
            inverse = inverse - below
        else:
            inverse = mx.addmm(inverse, inverse @ below, inverse, alpha=-1.0)

    return inverse


@mx.custom_function
def _solve(lower: mx.array, right: mx.array) -> list[mx.array]:
    """Return x of (I + lower) x = right, and the inverse."""
    inverse = _inverse(lower)
    return [inverse @ right, inverse]


@_solve.vjp
def _solve_backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> list[mx.array]:
    solved, inverse = outputs
    of_right = inverse.swapaxes(-1, -2) @ cotangents[0]
    return [-of_right @ solved.swapaxes(-1, -2), of_right]


@mx.custom_function
def _scan(
    of_values: mx.array, of_state: mx.array, keys: mx.array, decay: mx.array, state: mx.array
) -> list[mx.array]:
    """Return what each chunk adds [N, ..., C, Dv], the states before them, and the last state.

    Semantics: added = of_values - of_state @ state^T;  state = decay * state + added^T @ keys
    """
    added = []
    states = []
    state = state[None]

    chunks = map(_by_chunk, (of_values, of_state, keys, decay))
    for u, w, k, kept in zip(*chunks, strict=True):
        states.append(state)
        added.append(mx.addmm(u, w, state.swapaxes(-1, -2), alpha=-1.0))
        state = mx.addmm(kept * state, added[-1].swapaxes(-1, -2), k)

    return [mx.concatenate(added), mx.concatenate(states), state[0]]


def _by_chunk(x: mx.array) -> list[mx.array]:
    """Return views of the chunks; an index would copy each."""
    return mx.split(x, x.shape[0])


@_scan.vjp
def _scan_backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> list[mx.array]:
    _, of_state, keys, decay, _ = primals
    added, states, _ = outputs
    of_added, of_states, of_last = cotangents

    gradient = of_last[None]
    by_added = []  # gradients of what each chunk adds
    by_state = []  # gradients of the state after each chunk

    chunks = map(_by_chunk, (of_added, of_states, of_state, keys, decay))
    for d_added, d_state, w, k, kept in reversed(list(zip(*chunks, strict=True))):
        by_state.insert(0, gradient)
        by_added.insert(0, mx.addmm(d_added, k, gradient.swapaxes(-1, -2)))
        carried = kept * gradient + d_state
        gradient = mx.addmm(carried, by_added[0].swapaxes(-1, -2), w, alpha=-1.0)

    by_added = mx.concatenate(by_added)
    by_state = mx.concatenate(by_state)
    of_decay = (by_state * states).sum(axis=(-2, -1), keepdims=True)
    return [by_added, -by_added @ states, added @ by_state, of_decay, gradient[0]]
