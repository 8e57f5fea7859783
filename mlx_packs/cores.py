"""How many cores and threads this process may use on Linux."""

import os
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
# Cores that a container may use, as microseconds in a period: by cgroups 2, and by cgroups 1.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def usable_cores() -> int:
    """Return the cores of this process, by its affinity and the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    for files in _QUOTAS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            words = " ".join((_GROUPS / name).read_text() for name in files).split()
            quota, period = map(int, words)
            if quota > 0:
                cores = min(cores, -(-quota // period))
    return max(1, cores)


def blas_threads(variable: str) -> int | None:
    """Return the threads that a BLAS gets: half of the cores; None if the user chose them.

    ``variable`` is the library's, such as OPENBLAS_NUM_THREADS; all obey OMP_NUM_THREADS too.
    """
    if os.environ.get(variable) or os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, usable_cores() // 2)
