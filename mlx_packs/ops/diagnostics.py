"""Diagnostics: this machine, its rates, and whether every kernel is right and faster on it.

The first thing to paste into a bug report.
"""

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from .. import chips, runtime
from ..runtime import mx
from . import (
    _backend,
    dispatch,
    grouped_lora_kernel,
    lora_qmv_kernel,
    multi_lora_kernel,
    nf4_kernel,
)
from ._backend import Instance
from ._check import Check, Op, examine
from .profile import profile

OPS = (grouped_lora_kernel, lora_qmv_kernel, multi_lora_kernel, nf4_kernel)
# In one evaluation: an evaluation alone takes 0.25 ms on a Mac (ml-explore/mlx#4265), more than
# most calls.
COPIES = 64


def kernel_instances() -> list[Instance]:
    """Return the usual instances for `examine_kernel`."""
    return [instance for op in OPS for instance in op.instances()]


def examine_kernel(instance: Instance) -> dict:
    """Compare a kernel instance with its reference: on small inputs and on real sizes, then times.

    ``max_error`` is relative to the largest number, over outputs and gradients of small inputs. The
    times are of one call among `COPIES`, forward, since gradients are plain MLX's or take as long;
    ``choice`` is the faster, which `KernelSpec.choose` takes from now on.
    Without a GPU the reference itself is compared with float64, and timed only in float32: half
    precision on a CPU is far slower.
    """
    backend = dispatch.forced() or dispatch.detect()
    max_error = fault = None
    times: dict[str, float | str] = {}

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
        if backend != "reference":
            fault = fault or examine(workload).fault
            if fault is None:
                times = _measure(backend, instance, workload)
        elif workload.inputs[0].dtype == mx.float32:
            times["reference_us"] = _microseconds(workload.reference, workload, copies=1)
    except Exception as error:  # compilers and devices raise what they like
        fault = f"{type(error).__name__}: {' '.join(str(error).split())}"

    return {
        "op": instance.op,
        "instance": instance.name,
        "backend": backend,
        "max_error": max_error,
        "ok": fault is None,
        "fault": fault,
        **dict.fromkeys(("kernel_us", "reference_us", "choice")),
        **times,
    }


def _measure(backend: str, instance: Instance, workload: Check) -> dict[str, float | str]:
    """Return the times of a correct kernel and of its reference; they decide from now on."""
    kernel, plain = (_microseconds(op, workload) for op in (workload.kernel, workload.reference))
    _backend.keep_measured(backend, (instance.op, *instance.call), kernel, plain)
    choice = "reference"
    if kernel < plain:
        choice = backend
    return {"kernel_us": kernel, "reference_us": plain, "choice": choice}


def _microseconds(op: Op, workload: Check, copies: int | None = None) -> float:
    """Return the time of a call, one of many independent ones, each on inputs of its own."""
    copies = copies or COPIES
    inputs = [[v + 0 for v in workload.inputs] for _ in range(copies)]
    mx.eval(inputs)
    return 1e6 * chips.least_seconds(lambda: [op(*values) for values in inputs]) / copies


def examine_machine() -> dict:
    """Device, versions, BLAS and memory of this machine; measured and stored rates of a GPU."""
    system = [platform.system(), platform.release(), platform.machine()]
    if mac := platform.mac_ver()[0]:
        system.append(f"macOS {mac}")

    return {
        "device": runtime.device_name(),
        "chip": None if runtime.on_cpu() else asdict(chips.measure()),
        "system": " ".join(system),
        "versions": dict(runtime.versions()),
        "blas": {
            "library": runtime.BLAS.name,
            "bound": runtime.BLAS.bound,
            "note": runtime.BLAS.note,
            "threads": runtime.BLAS.threads,
            "streams": profile().streams,
            "gflops": 1e3 * chips.product_tflops(mx.float32),
        },
        "memory": {
            "total_gb": runtime.total_memory() / 1e9,
            "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        },
    }


def examine_all(instances: Sequence[Instance], advance: Callable[[], None]) -> dict:
    """Return the machine and each kernel instance, ``kernels``; call ``advance`` after each."""
    report = examine_machine() | {"kernels": []}
    for instance in instances:
        report["kernels"].append(examine_kernel(instance))
        advance()
    return report
