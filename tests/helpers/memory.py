"""MLX's memory in tests."""

import gc

from mlx_packs.runtime import mx


def active_bytes() -> int:
    """Bytes of the arrays that are alive, without those that earlier tests left to be collected."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()
