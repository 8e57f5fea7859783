"""The cost of a launch: bytes against bandwidth, operations against rates, the launch itself.

    seconds = launch + max(bytes / bandwidth, cached bytes / cache rate, operations / rate)

summed over launches, since each waits for the one before it. It decides between kernels and plain
MLX where nothing was measured; the tables in kernels/*/README.md are printed from it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from ..runtime import mx

# Shares of the nominal rates that are reached.
BANDWIDTH_REACHED = 0.75
MATMUL_REACHED = 0.70  # MLX's matrix products
VECTOR_REACHED = 0.30  # our kernels: multiply-adds on operands in threadgroup memory
CACHE_FACTOR = 3.0  # rate of the last-level cache over that of memory


@dataclass(frozen=True)
class Chip:
    """Nominal rates of a device (the makers' figures; Apple's for the largest GPU of the name)."""

    name: str
    bandwidth_gb_s: float
    vector_tflops: float  # float32 multiply-adds
    matrix_tflops: float  # what a matrix product can use
    launch_us: float  # of a kernel that waits for the one before it


# On M1 to M4 simdgroup matrices run on the ordinary ALUs. The launch of Macs was measured on an M3
# Ultra (ml-explore/mlx#4521); that of the H200 is assumed.
CHIPS = (
    Chip("Apple M1", 68, 2.6, 2.6, 2.75),
    Chip("Apple M2 Pro", 200, 6.8, 6.8, 2.75),
    Chip("Apple M3 Max", 400, 14.2, 14.2, 2.75),
    Chip("Apple M4 Max", 546, 18.4, 18.4, 2.75),
    Chip("NVIDIA H200", 4800, 67, 990, 2.0),
)
_LIKE = (("Max", "M3 Max"), ("Ultra", "M4 Max"), ("Pro", "M2 Pro"), ("Apple", "M1"))


@dataclass(frozen=True)
class Launch:
    """One kernel of a plan: bytes from and to memory, bytes read again from cache, operations."""

    what: str
    bytes: float
    flops: float = 0.0
    cached_bytes: float = 0.0
    matmul: bool = False  # one of MLX's matrix products, at the matrix rate


def product(what: str, itemsize: int, rows: int, depth: int, columns: int) -> Launch:
    """Return MLX's product of arrays [rows, depth] and [depth, columns]."""
    numbers = rows * depth + depth * columns + rows * columns
    return Launch(what, itemsize * numbers, 2 * rows * depth * columns, matmul=True)


def casts(what: str, itemsize: int, counts: Iterable[int]) -> list[Launch]:
    """Return casts of arrays of so many numbers between float32 and a dtype; none to itself."""
    return [Launch(what, (4 + itemsize) * count) for count in counts] if itemsize < 4 else []


def seconds(plan: Sequence[Launch], chip: Chip) -> float:
    """Return the expected seconds of a plan's launches, one after the other."""
    total = 0.0
    for launch in plan:
        memory = launch.bytes / (chip.bandwidth_gb_s * 1e9 * BANDWIDTH_REACHED)
        cached = launch.cached_bytes / (chip.bandwidth_gb_s * 1e9 * CACHE_FACTOR)
        rate = chip.vector_tflops * VECTOR_REACHED
        if launch.matmul:
            rate = chip.matrix_tflops * MATMUL_REACHED
        total += chip.launch_us * 1e-6 + max(memory, cached, launch.flops / (rate * 1e12))
    return total


@cache
def chip_here() -> Chip:
    """Return the table's chip for this machine: the same name, else one of proportional rates."""
    return chip_named(str(mx.device_info().get("device_name", "")))


def chip_named(name: str) -> Chip:
    """Return the table's chip that is, or stands for, a device of this name."""
    by_name = {chip.name: chip for chip in CHIPS}
    if name in by_name:
        return by_name[name]
    if "Apple" not in name:
        return by_name["NVIDIA H200"]
    likeness = next((like for part, like in _LIKE if part in name), "M1")
    return by_name[f"Apple {likeness}"]
