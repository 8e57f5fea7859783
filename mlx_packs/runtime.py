"""The process around MLX: OpenBLAS on Linux CPUs, memory limits and readings.

Every module of this package that computes imports this one, so that the switches below are in force
before the first array exists.
"""

import atexit
import functools
import os
import platform
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import numpy as np

from . import late

_CPU_CACHE_BYTES = 128 << 20
_GPU_CACHE_SHARE = 1 / 8  # of the memory: less than `memory.plan.verdict` leaves free
_MEMORY_LIMITS = [  # of a container, by cgroups 2 and 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]

_PROCESS = os.getpid()  # that loaded MLX, whose threads a fork of it lacks
BLAS = late.load(late.CPU_PARTS["blas"])()


@atexit.register
def _finish() -> None:
    """Wait for what MLX still computes (mlx-lm begins a token that may not be needed).

    Otherwise the process would unload the BLAS while MLX's thread uses it, which then crashes.
    """
    if os.getpid() != _PROCESS:  # the streams of a fork are the parent's
        return
    with suppress(RuntimeError):  # a stream of a thread that has ended, where there is nothing
        mx.synchronize()
    if generate := sys.modules.get("mlx_lm.generate"):
        mx.synchronize(generate.generation_stream)


COMPILES = sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu)
if not COMPILES:
    # On a CPU mx.compile calls g++ for every fused kernel: half a minute before the first step,
    # for 3 % less time a step (benchmarks/LOG.md). Steps run uncompiled there.
    mx.disable_compile()


def is_traced(array: mx.array) -> bool:
    """Return whether ``array`` has no value because `mx.compile` traces the function it is in."""
    try:
        np.array(array, copy=None)
    except ValueError:
        return True
    return False


def set_random_state(key: mx.array) -> None:
    high, low = key.tolist()
    mx.random.seed((high << 32) | low)  # the state is a key, and seed(n) sets it to key(n)


_assumed: str | None = None


@contextmanager
def assumed_device(kind: str | None) -> Iterator[None]:
    """Plan as if MLX computed on a ``cpu`` or a ``gpu`` by default; None changes nothing."""
    global _assumed
    before = _assumed
    _assumed = kind or before
    try:
        yield
    finally:
        _assumed = before


def is_assumed() -> bool:
    """Return whether a run is planned for another device than this one."""
    return _assumed is not None


def on_cpu() -> bool:
    if _assumed is not None:
        return _assumed == "cpu"
    return mx.default_device() == mx.Device(mx.cpu)


def on_cuda() -> bool:
    return not on_cpu() and not mx.metal.is_available()


def dtype_name(dtype: mx.Dtype) -> str:
    """Return ``bfloat16`` for ``mx.bfloat16``."""
    return str(dtype).removeprefix("mlx.core.")


def device_name() -> str:
    """Return the chip, as MLX has it, and what computes on it: ``Apple M3 Max (metal)``."""
    info = mx.device_info()
    kind = "metal" if mx.metal.is_available() else "cuda"
    if on_cpu():
        kind = "cpu"
    return f"{info.get('device_name', platform.processor() or 'unknown')} ({kind})"


def total_memory() -> int:
    """Return the bytes of memory of MLX's device; on Macs what Metal recommends to use at most."""
    info = {} if on_cpu() else mx.device_info()
    # Metal's name and CUDA's
    limit = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return int(limit or host_memory())


def metal_share(memory: int) -> int:
    """Return the most of a Mac's memory that Metal recommends to use, in bytes.

    Two thirds below 36 GB, three quarters from there: ``recommendedMaxWorkingSetSize`` as users of
    llama.cpp log it (11.45e9 bytes of 16 GiB, 17.18e9 of 24, 22.91e9 of 32, 28.99e9 of 36).
    """
    return memory * 2 // 3 if memory < 36 << 30 else memory * 3 // 4


def host_memory() -> int:
    """Return the bytes of host memory that this process may use; a container may limit them."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text()))
    return min(limits)


def cache_limit() -> int:
    """Return the bytes of freed buffers that MLX may keep for reuse in a run.

    A process is at most that much larger than its arrays. MLX's own limit is 32 MB on Linux CPUs,
    where steps then ask the system for the same pages again and again (benchmarks/LOG.md), and
    nearly all memory on Macs.
    """
    return _CPU_CACHE_BYTES if on_cpu() else int(_GPU_CACHE_SHARE * total_memory())


@contextmanager
def memory_limits(cache_bytes: int = 0) -> Iterator[None]:
    """Set MLX's memory limits for a run, and restore them when it ends, however it ends.

    The buffer cache is limited to `cache_limit`, or ``cache_bytes`` if that is more. On Macs what
    the run uses stays resident (wired), up to what Metal recommends.
    """
    with ExitStack() as restored:
        cache = mx.set_cache_limit(max(cache_limit(), cache_bytes))
        restored.callback(mx.set_cache_limit, cache)

        recommended = mx.device_info().get("max_recommended_working_set_size")
        if recommended and mx.metal.is_available() and not on_cpu():
            restored.callback(mx.set_wired_limit, mx.set_wired_limit(recommended))
            restored.callback(mx.synchronize)

        yield


def peak_process_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions that runs, packs and bases record; nobody changes them."""
    from importlib.metadata import PackageNotFoundError, version

    packages = {"python": platform.python_version()}
    for name in ("mlx-packs", "mlx", "mlx-lm", "transformers", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "source tree"
    return packages
