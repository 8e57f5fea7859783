"""The embedded base with dense weights, for runs that need no other."""

from functools import cache

from mlx_packs.nn.quantized import apply_matmul_path
from mlx_packs.packs.base import Base, load_base


@cache
def dense_tiny() -> Base:
    """Return the embedded base, loaded once; tests leave it as it was.

    Runs with the matmul path ``dense`` load nothing and convert no weight, a third of their time.
    """
    base = load_base("tiny")
    apply_matmul_path(base.model, "dense")
    return base
