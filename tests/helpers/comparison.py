"""Comparison of lists of arrays: outputs of an op, or its gradients."""

from collections.abc import Sequence

from mlx_packs.runtime import mx


def all_close(
    results: Sequence[mx.array],
    expected: Sequence[mx.array],
    rtol: float = 1e-4,
    atol: float = 1e-4,
) -> bool:
    """Whether arrays have the shapes of others, and are close to them."""
    return all(
        one.shape == other.shape and mx.allclose(one, other, rtol=rtol, atol=atol).item()
        for one, other in zip(results, expected, strict=True)
    )
