"""The largest singular values of a weight, or of what adapters add to one."""

from ..runtime import mx

Factors = tuple[mx.array, mx.array]  # A [D, R] and B [R, O], in float32

EXACT = 512  # of the smaller side; larger weights take a randomized decomposition
_MORE = 16  # columns that it samples beyond the rank
_PASSES = 8


def principal_factors(weight: mx.array, rank: int, scale: float) -> Factors:
    """Return the factors whose product with s is the best approximation of that rank.

    Semantics: U diag(S) V^T = W;  A = V sqrt(S / s), B = sqrt(S / s) U^T, of the largest R.

    PiSSA: https://arxiv.org/abs/2404.02948. LoftQ, of what quantization loses:
    https://arxiv.org/abs/2310.08659
    """
    u, s, vt = largest_singular(weight, rank)
    root = mx.sqrt(s / scale)
    return vt.T * root, root[:, None] * u.T


def factors_of_rank(a: mx.array, b: mx.array, rank: int) -> Factors:
    """Return the factors of at most that rank nearest to A [D, r] B [r, O], which is never made.

    Semantics: Q_a R_a = A, Q_b R_b = B^T;  U diag(S) V^T = R_a R_b^T;
        A' = Q_a U sqrt(S), B' = sqrt(S) V^T Q_b^T, of the largest S
    """
    q_a, r_a = mx.linalg.qr(a, stream=mx.cpu)
    q_b, r_b = mx.linalg.qr(b.T, stream=mx.cpu)
    u, s, vt = mx.linalg.svd(r_a @ r_b.T, stream=mx.cpu)
    root = mx.sqrt(s[:rank])
    return q_a @ (u[:, :rank] * root), (root[:, None] * vt[:rank]) @ q_b.T


def largest_singular(weight: mx.array, rank: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return the largest singular values [R] with U [O, R] and V^T [R, D], always the same.

    Large weights by subspace iteration from random columns (https://arxiv.org/abs/0909.4061, 4.4).
    """
    if min(weight.shape) <= max(EXACT, rank + _MORE):
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
