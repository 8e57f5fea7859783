"""The implementations of the training benchmarks, by the names that records call them."""

import contextlib
from collections.abc import Callable, Iterator

from mlx_packs.bench.implementations import Adapters, MlxLmTrainer
from mlx_packs.packs.base import Base

from . import patched, stock

STOCK = "mlx-lm stock"
SAME_BLAS = "mlx-lm with our BLAS"
PATCHED = "mlx-lm patched"


def ours_name(matmul_path: str, recompute: str) -> str:
    """Return the name of one of our implementations in records."""
    suffix = "" if recompute == "none" else f", recompute {recompute}"
    return f"mlx_packs {matmul_path}{suffix}"


def mlx_lm(load: Callable[[], Base], adapters: Adapters) -> MlxLmTrainer:
    """Return mlx-lm's trainer, which trains on its own batches and on those of `patched.with_targets`."""
    return MlxLmTrainer(load, adapters, patched.loss)


@contextlib.contextmanager
def conditions(trainer: MlxLmTrainer, is_patched: bool, reference_blas: bool) -> Iterator[None]:
    """Run stock MLX; its buffer cache is kept between steps, or emptied as in stock mlx-lm."""
    trainer.args.clear_cache_threshold = patched.KEEP_CACHE if is_patched else 0
    with stock.mlx(reference_blas=reference_blas):
        yield
