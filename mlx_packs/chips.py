"""Rates and features of GPUs; measured where the table has no entry.

Rates of the table are the makers' figures, Apple's for the largest GPU that a name is sold with.
What was measured on this machine (`measure`) is preferred to them.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from .runtime import mx, on_cpu

# Shares of nominal rates that programs reach: copies 0.70 to 0.85 (locara.dev), products of MLX and
# PyTorch 0.64 to 0.78 (pytorch/torch-performance-test-data#65, device-benchmarks#7).
BANDWIDTH_REACHED = 0.75
MATMUL_REACHED = 0.70
# Of a dense product's rate that MLX's quantized one reaches on GPUs (mlx-lm PRs 406 and 1569)
QUANTIZED_REACHED = 0.9

_KIND = "rates"
_RATES = ("copied_gb_s", "float32_tflops", "float16_tflops", "bfloat16_tflops", "launch_us")
_NATIVE = 0.8  # bfloat16 is native if its products reach this share of float16's rate
_REPEATS = 3
_CHAIN = 500  # operations, each of which waits for the one before


@dataclass(frozen=True)
class Chip:
    """Nominal rates of a GPU.

    Attributes:
        name: as `mlx.core.device_info` has it.
        gpu_cores: of the largest GPU of that name; None where it is not known.
        bandwidth_gb_s: of its memory.
        vector_tflops: float32 multiply-adds, each counted as two operations.
        matrix_tflops: the rate of products in float16; more than ``vector_tflops`` where matrix
            units compute them.
        native_bf16: whether bfloat16 is computed as fast as float16.
        launch_us: microseconds of a kernel that waits for the one before it.
        measured: whether the rates are from this machine.
    """

    name: str
    gpu_cores: int | None
    bandwidth_gb_s: float
    vector_tflops: float
    matrix_tflops: float
    native_bf16: bool = True
    launch_us: float = 2.75
    measured: bool = False

    @property
    def bytes_per_s(self) -> float:
        """Bytes of memory that a program reads and writes in a second."""
        return 1e9 * self.bandwidth_gb_s * BANDWIDTH_REACHED

    @property
    def products_per_s(self) -> float:
        """Operations of dense products of matrices that a program reaches in a second."""
        return 1e12 * self.matrix_tflops * MATMUL_REACHED

    def quantized_share(self, mode: str) -> float:
        """Return the share of a dense product's rate that quantized ones reach, both directions.

        MLX 0.32.4 has kernels for matrix units (M5) of both directions of affine weights, but of
        other formats only of x @ W.T: the gradient x @ W runs on the ordinary units.
        """
        if mode == "affine" or not self.matrix_units:
            return QUANTIZED_REACHED
        backward = self.matrix_tflops / self.vector_tflops  # times as long as the forward direction
        return QUANTIZED_REACHED * 2 / (1 + backward)

    @property
    def matrix_units(self) -> bool:
        """Whether products run on dedicated units (M5's neural accelerators, tensor cores)."""
        return self.matrix_tflops > 2 * self.vector_tflops


def _mac(name: str, cores: int, bandwidth: float, tflops: float, matrix: float = 1.0) -> Chip:
    generation = int(name[1])
    return Chip(f"Apple {name}", cores, bandwidth, tflops, matrix * tflops, generation >= 3)


# Cores and bandwidth: Apple's newsroom and data sheets (support.apple.com/specs). Where a name is
# sold with two memories (M3 Max 300 and 400, M4 Max 410 and 546, M5 Max 460 and 614 GB/s) the
# larger. float32: Apple for M1 and M2; huggingface.js#1044 for M3 and M4, #2033 for M5.
# M5: "over 4x the peak GPU compute for AI" of M4, by a neural accelerator in each core (Apple);
# MLX uses them in products. On M1 to M4 simdgroup matrices run on the ordinary ALUs.
# bfloat16 is emulated on M1 and M2 (jundot/omlx#3277; ml-explore/mlx#4216: 4-bit products on an M1
# Max take 1.8 times as long as in float16). There is no M4 Ultra, and no M5 Ultra at this writing.
# A launch on Macs was measured on an M3 Ultra (ml-explore/mlx#4521), NVIDIA's is assumed.
_M5 = 4 * 18.4 / 22.8
CHIPS = {
    chip.name: chip
    for chip in (
        _mac("M1", 8, 68, 2.6),
        _mac("M1 Pro", 16, 200, 5.2),
        _mac("M1 Max", 32, 400, 10.4),
        _mac("M1 Ultra", 64, 800, 21.0),
        _mac("M2", 10, 100, 3.6),
        _mac("M2 Pro", 19, 200, 6.8),
        _mac("M2 Max", 38, 400, 13.6),
        _mac("M2 Ultra", 76, 800, 27.2),
        _mac("M3", 10, 100, 4.1),
        _mac("M3 Pro", 18, 150, 7.4),
        _mac("M3 Max", 40, 400, 14.2),
        _mac("M3 Ultra", 80, 819, 28.4),
        _mac("M4", 10, 120, 4.6),
        _mac("M4 Pro", 20, 273, 9.2),
        _mac("M4 Max", 40, 546, 18.4),
        _mac("M5", 10, 153, 5.7, _M5),
        _mac("M5 Pro", 20, 307, 11.4, _M5),
        _mac("M5 Max", 40, 614, 22.8, _M5),
        Chip("NVIDIA H100 80GB HBM3", 132, 3350, 67, 990, launch_us=2.0),
        Chip("NVIDIA H200", 132, 4800, 67, 990, launch_us=2.0),
    )
}


def chip(name: str | None = None) -> Chip | None:
    """Return the table's entry for a GPU, by default this machine's; None if it has none."""
    return CHIPS.get(_name() if name is None else name)


@cache
def chip_here() -> Chip:
    """Return MLX's default device: measured before, by the table, or measured now (one second)."""
    return known_chip() or measure()


def known_chip() -> Chip | None:
    """Return this machine's device, measured before or by the table; None if neither is known."""
    from .measurements import recall  # which reads and writes files

    rates = recall(_KIND, {"name": _name()}) or {}
    if rates.keys() != set(_RATES):
        return chip()
    return _measured(**rates)


def measure() -> Chip:
    """Measure the rates of MLX's default device, and remember them for `chip_here`."""
    from .measurements import remember

    products = [product_tflops(dtype) for dtype in (mx.float32, mx.float16, mx.bfloat16)]
    rates = dict(zip(_RATES, [_copied_gb_s(), *products, _launch_us()], strict=True))
    remember(_KIND, {"name": _name()}, rates)
    chip_here.cache_clear()
    return _measured(**rates)


def _measured(
    copied_gb_s: float,
    float32_tflops: float,
    float16_tflops: float,
    bfloat16_tflops: float,
    launch_us: float,
) -> Chip:
    """Return the nominal rates behind measured ones, which are the share that programs reach."""
    name = _name()
    half = max(float16_tflops, bfloat16_tflops)

    measured = Chip(
        name,
        None,
        copied_gb_s / BANDWIDTH_REACHED,
        float32_tflops / MATMUL_REACHED,
        half / MATMUL_REACHED,
        bfloat16_tflops >= _NATIVE * float16_tflops,
        launch_us,
        measured=True,
    )

    if (listed := chip(name)) is None:
        return measured

    # its matrix units may compute products in float32 too
    return replace(
        measured,
        gpu_cores=listed.gpu_cores,
        vector_tflops=min(measured.vector_tflops, listed.vector_tflops),
        native_bf16=listed.native_bf16,
    )


def _copied_gb_s() -> float:
    """Return the rate of reading and writing arrays that are larger than any cache."""
    count = 64 << 20
    dtype = mx.float16
    if on_cpu():
        count = 8 << 20
        dtype = mx.float32

    arrays = [mx.full((count,), float(i), dtype) for i in range(4)]
    mx.eval(arrays)

    moved = 2 * sum(array.nbytes for array in arrays)
    return moved / least_seconds(lambda: [a + 1 for a in arrays]) / 1e9


def product_tflops(dtype: mx.Dtype) -> float:
    """Return the measured rate of products of matrices on the default device."""
    size = 256 if on_cpu() else 2048
    arrays = [mx.random.normal((size, size), key=mx.random.key(i)).astype(dtype) for i in range(4)]
    mx.eval(arrays)
    seconds = least_seconds(lambda: [a @ arrays[0] for a in arrays])
    return 2 * len(arrays) * size**3 / seconds / 1e12


def _launch_us() -> float:
    """Return the microseconds of an operation on one number that waits for the one before it."""
    one = mx.array([1.0])
    best = math.inf
    for _ in range(_REPEATS + 1):
        value = one
        for _ in range(_CHAIN):
            value = value + one
        start = time.perf_counter()
        mx.eval(value)
        best = min(best, time.perf_counter() - start)

    return 1e6 * best / _CHAIN


def least_seconds(compute: Callable[[], list]) -> float:
    """Return the least time of a few evaluations, after one that is not counted."""
    mx.eval(compute())

    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        mx.eval(compute())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _name() -> str:
    return str(mx.device_info().get("device_name", ""))
