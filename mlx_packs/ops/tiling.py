"""Sizes of the pieces that large operations are computed in."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..runtime import on_cpu


@dataclass(frozen=True)
class Tiling:
    """Sizes of the pieces on one kind of device.

    Attributes:
        slice_weights: Weights of a quantized matrix that are dense at a time.
        score_bytes: Of one block of attention scores.
        logit_bytes: Of one slice of logits.
        slice_rows: Rows of a slice are a multiple of this, so that blocks of up to 256 weights are
            complete for every even width.
        stream_work: Multiplications that are worth a stream: a tenth of a millisecond.
        least_queries: Queries of a block of scores are a multiple of this.
        block_keys: On a CPU the most keys of a block of scores where there are several.
        block_bytes: Of such a block: it stays in the cache.
        least_columns: Of a slice of logits.
        elements: Of an array of single elements that is computed by rows: 1 MB.
        streams: CPU streams; None for what the machine allows.
    """

    slice_weights: int
    score_bytes: int
    logit_bytes: int
    slice_rows: int = 128
    stream_work: int = 1 << 22
    least_queries: int = 32
    block_keys: int = 512
    block_bytes: int = 1 << 20
    least_columns: int = 256
    elements: int = 1 << 18
    streams: int | None = None


CPU = Tiling(slice_weights=1 << 20, score_bytes=2 << 20, logit_bytes=1 << 20)
GPU = Tiling(slice_weights=1 << 26, score_bytes=64 << 20, logit_bytes=64 << 20)

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
