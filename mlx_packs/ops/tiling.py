"""Sizes of the pieces that large operations are computed in."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..runtime import on_cpu


@dataclass(frozen=True)
class Tiling:
    """Sizes of the pieces on one kind of device."""

    slice_weights: int  # of a quantized matrix, which are dense at a time
    score_bytes: int  # of one block of attention scores
    logit_bytes: int  # of one slice of logits
    slice_rows: int = 128  # rows of a slice are a multiple: complete blocks of up to 256 weights
    stream_work: int = 1 << 22  # multiplications that are worth a stream: a tenth of a millisecond
    least_queries: int = 32  # queries of a block of scores are a multiple
    block_keys: int = 512  # on a CPU the most keys of a block of scores where there are several
    block_bytes: int = 1 << 20  # of such a block: it stays in the cache
    least_columns: int = 256  # of a slice of logits
    elements: int = 1 << 18  # of an array of single elements that is computed by rows: 1 MB
    streams: int | None = None  # on a CPU; None for what the machine allows


CPU = Tiling(slice_weights=1 << 20, score_bytes=2 << 20, logit_bytes=1 << 20)
GPU = Tiling(slice_weights=1 << 26, score_bytes=64 << 20, logit_bytes=128 << 20)

_forced: Tiling | None = None


def tiling() -> Tiling:
    """Return the sizes for MLX's default device."""
    return _forced or (CPU if on_cpu() else GPU)


@contextmanager
def forced_tiling(sizes: Tiling) -> Iterator[None]:
    """Compute in pieces of these sizes, on every device."""
    global _forced
    before, _forced = _forced, sizes
    try:
        yield
    finally:
        _forced = before


def tiles(count: int, size: int) -> int:
    """Return how many tiles of a size cover a count."""
    return -(-count // size)
