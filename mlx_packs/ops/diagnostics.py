"""What this machine is, how fast it multiplies, and whether every kernel is right on it.

The first thing to paste into a bug report.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from .. import runtime
from ..runtime import mx
from . import _backend, grouped_lora, multi_lora, nf4
from ._check import Check, Instance, examine
from .streams import stream_count

OPS = (grouped_lora, multi_lora, nf4)
_REPEATS = 5


def matmul_gflops() -> float:
    """Measured rate of fp32 products on the default device, best of three."""
    rows, inner, columns = 512, 1024, 2048
    a = mx.random.normal((rows, inner), key=mx.random.key(0))
    b = mx.random.normal((inner, columns), key=mx.random.key(1))
    mx.eval(a, b)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best / 1e9


def kernel_instances() -> list[Instance]:
    """Return every instance for `examine_kernel`."""
    return [instance for op in OPS for instance in op.instances()]


def examine_kernel(instance: Instance) -> dict:
    """Compare a kernel instance with its reference: errors on small inputs, time on real sizes.

    ``max_error`` is relative to the largest number, over outputs and gradients; the times are
    medians of the forward pass. Without a GPU the reference itself is compared with float64, and
    timed in float32 alone: half precision on a CPU is far slower.
    """
    backend = _backend.forced() or _backend.detect()
    max_error = fault = kernel_us = reference_us = None
    try:
        checks = instance.checks(backend)
        if backend == "reference":  # no error of a plain op is forgiven but rounding
            checks = [replace(c, kernel=c.reference, exact=False, alone=True) for c in checks]
        findings = [examine(check) for check in checks]
        fault = next((f.fault for f in findings if f.fault is not None), None)
        errors = [finding.max_error for finding in findings]
        if all(map(math.isfinite, errors)):
            max_error = max(errors)
        workload = instance.workload(backend)
        if backend != "reference" or workload.inputs[0].dtype == mx.float32:
            reference_us = _microseconds(workload.reference, workload)
        if backend != "reference" and fault is None:
            kernel_us = _microseconds(workload.kernel, workload)
    except Exception as error:  # compilers and devices raise what they like
        fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {
        "op": instance.op,
        "instance": instance.name,
        "backend": backend,
        "max_error": max_error,
        "ok": fault is None,
        "fault": fault,
        "kernel_us": kernel_us,
        "reference_us": reference_us,
    }


def _microseconds(op: Callable, workload: Check) -> float:
    mx.eval(op(*workload.inputs))
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        mx.eval(op(*workload.inputs))
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def examine_machine() -> dict:
    """Device, versions, BLAS and memory of this machine."""
    system = [platform.system(), platform.release(), platform.machine()]
    if mac := platform.mac_ver()[0]:
        system.append(f"macOS {mac}")
    return {
        "device": runtime.device_name(),
        "system": " ".join(system),
        "versions": runtime.versions(),
        "blas": {
            "library": runtime.BLAS.name,
            "bound": runtime.BLAS.bound,
            "note": runtime.BLAS.note,
            "threads": runtime.BLAS.threads,
            "streams": stream_count(),
            "gflops": matmul_gflops(),
        },
        "memory": {
            "total_gb": runtime.total_memory() / 1e9,
            "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        },
    }


def examine_all(advance: Callable[[], None] = lambda: None) -> dict:
    """Return the machine and each kernel instance, ``kernels``; call ``advance`` after each."""
    report = examine_machine() | {"kernels": []}
    for instance in kernel_instances():
        report["kernels"].append(examine_kernel(instance))
        advance()
    return report
