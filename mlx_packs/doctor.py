"""What this machine is and how fast it multiplies: the first thing to paste into a bug report."""

import platform
import time

from . import runtime
from .runtime import mx


def matmul_gflops(rows: int = 512, inner: int = 1024, columns: int = 2048) -> float:
    """Measured rate of fp32 products on the default device, best of three."""
    a = mx.random.normal((rows, inner), key=mx.random.key(0))
    b = mx.random.normal((inner, columns), key=mx.random.key(1))
    mx.eval(a, b)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best / 1e9


def examine() -> dict:
    """Device, versions, BLAS, memory and kernels of this machine."""
    return {
        "device": runtime.device_name(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": runtime.versions(),
        "blas": {
            "library": runtime.BLAS.name,
            "bound": runtime.BLAS.bound,
            "note": runtime.BLAS.note,
            "threads": runtime.BLAS.threads,
            "gflops": matmul_gflops(),
        },
        "memory": {
            "total_gb": runtime.total_memory() / 1e9,
            "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        },
        "kernels": [],
    }
