"""The cost of a launch: bytes against bandwidth, operations against rates, the launch itself.

    seconds = wait + max(bytes / bandwidth, cached bytes / cache rate, operations / rate)

summed over launches. Those of one level need nothing of each other, and MLX lets Metal run them at
once: all but the first wait a quarter of the time. The tables in kernels/*/README.md are printed
from it; the rules by which an op chooses where nothing was measured (`slower` in ops/*_kernel.py)
are those that cost least by it on Macs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mlx_packs.chips import Chip

# Shares of the nominal rates that are reached; those of memory and of products are in chips.py.
VECTOR_REACHED = 0.30  # our kernels: multiply-adds on operands in threadgroup memory
CACHE_FACTOR = 3.0  # rate of the last-level cache over that of memory
BESIDE = 0.25  # of a launch's wait, for one that runs beside another; assumed
_PLAIN_TILE = 32  # columns that MLX's products compute at least, where they have many rows


@dataclass(frozen=True)
class Launch:
    """One kernel of a plan: bytes from and to memory, bytes read again from cache, operations."""

    what: str
    bytes: float
    flops: float = 0.0
    cached_bytes: float = 0.0
    matmul: bool = False  # one of MLX's matrix products, at the matrix rate
    beside: bool = False  # of the level of the launch before it


def level(launches: Sequence[Launch]) -> list[Launch]:
    """Return launches that need nothing of each other, as one level."""
    return [replace(launch, beside=i > 0) for i, launch in enumerate(launches)]


def product(what: str, itemsize: int, rows: int, depth: int, columns: int) -> Launch:
    """Return MLX's product of arrays [rows, depth] and [depth, columns]."""
    numbers = rows * depth + depth * columns + rows * columns
    computed = max(columns, _PLAIN_TILE) if rows >= _PLAIN_TILE else columns
    return Launch(what, itemsize * numbers, 2 * rows * depth * computed, matmul=True)


def casts(what: str, itemsize: int, counts: Iterable[int]) -> list[Launch]:
    """Return casts of arrays of so many numbers between float32 and a dtype; none to itself."""
    if itemsize >= 4:
        return []
    return [Launch(what, (4 + itemsize) * count) for count in counts]


def seconds(plan: Sequence[Launch], chip: Chip) -> float:
    """Return the expected seconds of a plan's launches, one level after the other."""
    total = 0.0
    for launch in plan:
        memory = launch.bytes / chip.bytes_per_s
        cached = launch.cached_bytes / (chip.bandwidth_gb_s * 1e9 * CACHE_FACTOR)

        rate = chip.products_per_s if launch.matmul else 1e12 * chip.vector_tflops * VECTOR_REACHED

        total += max(memory, cached, launch.flops / rate)

        wait = chip.launch_us * 1e-6
        if launch.beside:
            wait *= BESIDE
        total += wait
    return total
