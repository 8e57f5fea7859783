"""What LoRA can begin with, instead of A at random and B zero: factors of the frozen weight.

Each takes a weight [O, D] in float32, a rank R and the scale s of the adapter, and returns A [D, R]
and B [R, O] in float32.
"""

from ..runtime import mx

Factors = tuple[mx.array, mx.array]
_EXACT = 512  # of the smaller side; larger weights take a randomized decomposition
_MORE = 16  # columns that it samples beyond the rank
_PASSES = 8


def principal_factors(weight: mx.array, rank: int, scale: float) -> Factors:
    """Return the factors whose product with s is the best approximation of that rank.

    Semantics: U diag(S) V^T = W;  A = V sqrt(S / s), B = sqrt(S / s) U^T, of the largest R.

    PiSSA: https://arxiv.org/abs/2404.02948. LoftQ, of what quantization loses:
    https://arxiv.org/abs/2310.08659
    """
    u, s, vt = _decomposed(weight, rank)
    root = mx.sqrt(s / scale)
    return vt.T * root, root[:, None] * u.T


def orthonormal_factors(weight: mx.array, rank: int, scale: float) -> Factors:
    """Return the first columns of Q as B, and the first rows of R as A, where Q R = W.

    OLoRA: https://arxiv.org/abs/2406.01775
    """
    q, _ = mx.linalg.qr(weight[:, :rank], stream=mx.cpu)
    return weight.T @ q, q.T


def _decomposed(weight: mx.array, rank: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return the largest singular values [R] with U [O, R] and V^T [R, D].

    Large weights by subspace iteration from random columns (https://arxiv.org/abs/0909.4061, 4.4).
    """
    if min(weight.shape) <= max(_EXACT, rank + _MORE):
        u, s, vt = mx.linalg.svd(weight, stream=mx.cpu)
        return u[:, :rank], s[:rank], vt[:rank]
    columns = mx.random.normal((weight.shape[1], rank + _MORE), key=mx.random.key(0))
    q = _orthonormal(weight @ columns)
    for _ in range(_PASSES):
        q = _orthonormal(weight @ _orthonormal(weight.T @ q))
    u, s, vt = mx.linalg.svd(q.T @ weight, stream=mx.cpu)
    return (q @ u)[:, :rank], s[:rank], vt[:rank]


def _orthonormal(columns: mx.array) -> mx.array:
    return mx.linalg.qr(columns, stream=mx.cpu)[0]
