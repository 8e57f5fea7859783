"""MLX's memory in tests."""

import gc
from collections.abc import Callable

from mlx_packs.runtime import mx


def active_bytes() -> int:
    """Bytes of the arrays that are alive, without those that earlier tests left to be collected."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def peak_bytes(compute: Callable, *inputs: object) -> int:
    """The most bytes that a computation takes beside its inputs and all else that is alive."""
    mx.eval(inputs)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(compute())
    return mx.get_peak_memory() - before
