"""How this device cuts large operations, and what it computes with: plain MLX, unless it is a CPU.

The profile of a CPU is in the package `cpu`, which is only loaded where it is needed.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

from .. import late, runtime

Piece = TypeVar("Piece")


@dataclass(frozen=True)
class Profile:
    """Sizes of pieces, and plain MLX, as a GPU computes."""

    slice_weights: int = 1 << 26  # of a quantized matrix, which are dense at a time
    score_bytes: int = 64 << 20  # of one block of attention scores
    logit_bytes: int = 128 << 20  # of one slice of logits
    slice_rows: int = 128  # rows of a slice are a multiple: complete blocks of up to 256 weights
    least_queries: int = 32  # queries of a block of scores are a multiple
    least_columns: int = 256  # of a slice of logits
    streams: int = 1  # pieces that are computed at once
    dtype: mx.Dtype | None = None  # of all activations; None: of the base's
    has_fused_kernels: bool = True  # MLX may fuse attention with its gradient, and cross-entropy
    saves_passes: bool = True  # over activations, by more work on the factors of adapters
    elements: float = math.inf  # of a piece of an array of single elements
    tree_inputs: float = math.inf  # of a tree that is computed in one pass (nn/prefix.py)
    attention: type | None = None  # the class that computes it by blocks, if not `BlockAttention`

    def rounds(
        self, pieces: Iterable[Piece]
    ) -> Iterator[list[tuple[AbstractContextManager, Piece]]]:
        """Yield pieces with their streams, as many at a time as there are streams."""
        for piece in pieces:
            yield [(nullcontext(), piece)]

    def slice_size(self, shape: tuple[int, int], rows: int) -> int:
        """Return how many rows of [O, D] are dense at a time in a product with inputs [rows, D]."""
        multiple = self.slice_rows
        return max(1, self.slice_weights // shape[1] // multiple) * multiple

    def score_block(self, pair_bytes: int, length: int, keys_length: int) -> tuple[int, int]:
        """Return the queries and keys of a block, where a pair has scores of ``pair_bytes``."""
        return self.whole_queries(self.score_bytes // (pair_bytes * keys_length)), keys_length

    def whole_queries(self, fitting: int) -> int:
        """Return the queries of a block where so many would fit."""
        return max(self.least_queries, fitting // self.least_queries * self.least_queries)

    def cuts_scores(self, heads: int, length: int) -> bool:
        """Return whether `ops.attention` replaces MLX's outside training, for T x T scores."""
        return False

    def exp(self, x: mx.array) -> mx.array:
        """Return e to the power of x, without a gradient: callers know theirs."""
        return mx.exp(x)

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        """Return the gated unit of SwiGLU (https://arxiv.org/abs/2002.05202), in any float dtype.

        Semantics: gate * sigmoid(gate) * up, all of one shape
        """
        return _swiglu(gate, up)

    def gelu(self, x: mx.array) -> mx.array:
        """Return the unit of BERT (https://arxiv.org/abs/1606.08415), in any float dtype.

        Semantics: x * (1 + erf(x / sqrt(2))) / 2
        """
        return nn.gelu(x)

    def matmul(self, x: mx.array, weight: mx.array) -> mx.array:
        """Return x @ weight.T, [..., O] of [..., D] and [O, D]."""
        return x @ weight.T

    def dequantize(
        self,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        group_size: int,
        bits: int,
        mode: str,
        dtype: mx.Dtype | None = None,
    ) -> mx.array:
        """Return `mx.dequantize`'s result, bit-identical; on a CPU by twice its memory."""
        how = {"group_size": group_size, "bits": bits, "mode": mode}
        return mx.dequantize(weight, scales, biases, **how, dtype=dtype)


GPU = Profile()

_forced: Profile | None = None


def profile() -> Profile:
    """Return the profile of MLX's default device."""
    if _forced is not None:
        return _forced
    if runtime.on_cpu():
        return late.load(late.CPU_PARTS["profile"])
    return GPU


@contextmanager
def forced_profile(chosen: Profile) -> Iterator[None]:
    """Compute by this profile on every device."""
    global _forced
    before = _forced
    _forced = chosen
    try:
        yield
    finally:
        _forced = before


def gradient_has(
    primitive: str, op: Callable[..., list[mx.array]], primals: list, cotangents: list
) -> bool:
    """Return whether the gradient of an op has a primitive: its graph is laid out, not computed."""
    _, gradients = mx.vjp(op, primals, cotangents)
    graph = io.StringIO()
    mx.export_to_dot(graph, *gradients)
    return primitive in graph.getvalue()


def tiles(count: int, size: int) -> int:
    """Return how many tiles of a size cover a count."""
    return -(-count // size)


@mx.custom_function
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@_swiglu.vjp
def _swiglu_vjp(
    primals: Sequence[mx.array], cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    # After the gradient: a compiled step would keep silu(gate) from the forward pass instead. No
    # value is used twice, so that each of the two gradients is one kernel there, in float32.
    gate, up = mx.depends(list(primals), cotangent)
    (again,) = mx.depends([primals[0]], cotangent)

    wide = gate.astype(mx.float32)
    twice = again.astype(mx.float32)
    slope = mx.sigmoid(wide) * (1 + wide * mx.sigmoid(-wide))
    d_gate = (cotangent * up).astype(mx.float32) * slope
    d_up = cotangent.astype(mx.float32) * (twice * mx.sigmoid(twice))
    return d_gate.astype(gate.dtype), d_up.astype(up.dtype)
