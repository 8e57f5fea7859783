"""The process around MLX: a real BLAS on Linux CPUs, memory limits and readings.

Every module of this package that computes imports this one, so that the switches below are in force
before the first array exists.
"""

import atexit
import ctypes
import os
import platform
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

BLAS_VARIABLE = "MLX_PACKS_BLAS"
_SYSTEM_BLAS = ("libopenblas.so.0", "libblis.so.4", "libmkl_rt.so.2")
_GEMM_SYMBOLS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_CPU_CACHE_BYTES = 128 << 20
_GPU_CACHE_SHARE = 1 / 8  # of the memory: less than `memory.plan.fit` leaves free
_MEMORY_LIMITS = [  # of a container, by cgroups 2 and 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]
_JUMP_SLOT = {"x86_64": 7, "aarch64": 1026}  # R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT


@dataclass(frozen=True)
class Blas:
    """The library that multiplies fp32 matrices on the CPU, and why that one."""

    name: str
    bound: bool
    note: str
    threads: int | None = None


def _candidates() -> list[tuple[str, str]]:
    """Return (library file, symbol prefix) in the order to try."""
    wanted = os.environ.get(BLAS_VARIABLE, "auto")
    if wanted not in ("auto", ""):
        return [(wanted, ""), (wanted, "scipy_")]
    system = [(name, "") for name in _SYSTEM_BLAS]
    try:
        import scipy_openblas32
    except ImportError:
        return system
    folder = Path(scipy_openblas32.get_lib_dir())
    return [(str(p), "scipy_") for p in sorted(folder.glob("libscipy_openblas*.so"))] + system


def _open_blas() -> tuple[str, list[int], int | None] | None:
    """Return name, addresses and threads of the first library that has all matrix products."""
    for name, prefix in _candidates():
        try:
            library = ctypes.CDLL(name)
            functions = [getattr(library, prefix + symbol) for symbol in _GEMM_SYMBOLS]
        except (OSError, AttributeError):
            continue
        addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions]
        return name, addresses, _set_threads(library, prefix)
    return None


def _set_threads(library: ctypes.CDLL, prefix: str) -> int | None:
    """Let OpenBLAS use half of the cores, unless OPENBLAS_NUM_THREADS is set.

    Its threads wait for each other by spinning: with as many threads as cores, any other busy
    program makes a product 20 times slower (benchmarks/LOG.md). A fixed number also keeps runs
    repeatable, since the split of a product changes its last bits.
    """
    try:
        get = getattr(library, prefix + "openblas_get_num_threads")
        if "OPENBLAS_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0))
            getattr(library, prefix + "openblas_set_num_threads")(max(1, cores // 2))
        return int(get())
    except AttributeError:
        return None


def _libmlx_maps() -> list[tuple[int, int, str, int]]:
    """Return (start, end, permissions, file offset) of the mapped parts of libmlx.so."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if fields[-1].endswith("/libmlx.so"):
            start, end = (int(a, 16) for a in fields[0].split("-"))
            maps.append((start, end, fields[1], int(fields[2], 16)))
    return maps


def _gemm_slots(base: int, jump_slot: int) -> dict[str, ctypes.c_uint64]:
    """Return where libmlx.so stores the addresses of the BLAS functions that it calls.

    Reads the ELF64 dynamic section in memory (System V gABI, chapter 5): DT_JMPREL lists
    relocations of 24 bytes {offset, symbol << 32 | type, addend}; DT_SYMTAB, DT_STRTAB name them.
    """

    def word(address: int) -> int:
        return ctypes.c_uint64.from_address(address).value

    def located(address: int) -> int:
        return address if address > base else base + address

    entry_size, entries = struct.unpack("<HH", ctypes.string_at(base + 54, 4))
    headers = [base + word(base + 32) + i * entry_size for i in range(entries)]
    pt_dynamic = next((h for h in headers if ctypes.c_uint32.from_address(h).value == 2), None)
    if pt_dynamic is None:
        return {}
    tags: dict[int, int] = {}
    at = base + word(pt_dynamic + 16)
    while tag := word(at):
        tags[tag] = word(at + 8)
        at += 16
    if not {2, 5, 6, 23} <= set(tags):
        return {}
    strings, symbols, relocations = located(tags[5]), located(tags[6]), located(tags[23])
    slots = {}
    for at in range(relocations, relocations + tags[2], 24):
        info = word(at + 8)
        if info & 0xFFFFFFFF != jump_slot:
            continue
        name_at = ctypes.c_uint32.from_address(symbols + (info >> 32) * 24).value
        name = ctypes.string_at(strings + name_at).decode()
        if name in _GEMM_SYMBOLS:
            slots[name] = ctypes.c_uint64.from_address(base + word(at))
    return slots


def _product_is_right() -> bool:
    """Return whether a small product of integers, exact in float32 in any order, is right."""
    a = mx.arange(35 * 17, dtype=mx.float32).reshape(35, 17) % 7
    b = mx.arange(17 * 29, dtype=mx.float32).reshape(17, 29) % 5
    expected = (a[:, :, None] * b[None]).sum(axis=1)
    return bool(mx.array_equal(mx.matmul(a, b, stream=mx.cpu), expected).item())


def _bind_blas() -> Blas:
    """Point libmlx's matrix products at a real BLAS.

    The CPU wheel of MLX on Linux ships the reference BLAS (1 to 5 GFLOP/s where OpenBLAS reaches
    200). The functions have the same names and the same ABI everywhere, so replacing three entries
    of libmlx's jump table is enough; it needs no compiler, no LD_PRELOAD and no import order.
    """
    if sys.platform != "linux":
        return Blas("Accelerate", False, "MLX's own on this system")
    if os.environ.get(BLAS_VARIABLE) == "off":
        return Blas("reference", False, f"{BLAS_VARIABLE}=off")
    jump_slot = _JUMP_SLOT.get(platform.machine())
    if jump_slot is None:
        return Blas("reference", False, f"no binding for {platform.machine()}")
    library = _open_blas()
    if library is None:
        hint = "none found (pip install scipy-openblas32, or apt install libopenblas0)"
        if named := os.environ.get(BLAS_VARIABLE, "auto").removeprefix("auto"):
            hint = f"{BLAS_VARIABLE}={named} has no CBLAS or cannot be loaded"
            print(f"mlx_packs: {hint}; matrix products will be slow.", file=sys.stderr)
        return Blas("reference", False, f"slow: {hint}")
    name, addresses, threads = library
    maps = _libmlx_maps()
    base = min((start for start, _, _, offset in maps if offset == 0), default=None)
    slots = _gemm_slots(base, jump_slot) if base is not None else {}
    writable = [(start, end) for start, end, permissions, _ in maps if permissions[1] == "w"]
    if set(slots) != set(_GEMM_SYMBOLS) or not all(
        any(start <= ctypes.addressof(slot) < end for start, end in writable)
        for slot in slots.values()
    ):
        return Blas("as linked", False, "this build of MLX has no writable jump table for BLAS")
    before = {symbol: slot.value for symbol, slot in slots.items()}
    for symbol, address in zip(_GEMM_SYMBOLS, addresses, strict=True):
        slots[symbol].value = address
    if not _product_is_right():
        for symbol, address in before.items():
            slots[symbol].value = address
        return Blas("reference", False, f"{name} gave a wrong product and was unbound")
    return Blas(Path(name).name, True, f"bound from {name}", threads)


BLAS = _bind_blas()


@atexit.register
def _finish() -> None:
    """Wait for what MLX still computes (mlx-lm begins a token that may not be needed).

    Otherwise the process would unload the BLAS while MLX's thread uses it, which then crashes.
    """
    mx.synchronize()
    if generate := sys.modules.get("mlx_lm.generate"):
        mx.synchronize(generate.generation_stream)


COMPILES = sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu)
if not COMPILES:
    # On a CPU mx.compile calls g++ for every fused kernel: half a minute before the first step,
    # for 3 % less time a step (benchmarks/LOG.md). Steps run uncompiled there.
    mx.disable_compile()


def is_traced(array: mx.array) -> bool:
    """Return whether ``array`` has no value because `mx.compile` is tracing the function it is in."""
    try:
        np.array(array, copy=None)
    except ValueError:
        return True
    return False


_assumed: str | None = None


@contextmanager
def assumed_device(kind: str | None) -> Iterator[None]:
    """Plan as if MLX computed on a ``cpu`` or a ``gpu`` by default; None changes nothing."""
    global _assumed
    before, _assumed = _assumed, kind or _assumed
    try:
        yield
    finally:
        _assumed = before


def is_assumed() -> bool:
    """Return whether a run is planned for another device than this one."""
    return _assumed is not None


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU by default."""
    if _assumed is not None:
        return _assumed == "cpu"
    return mx.default_device() == mx.Device(mx.cpu)


def device_name() -> str:
    """Return the name of the chip, as MLX has it."""
    info = mx.device_info()
    kind = "cpu" if on_cpu() else ("metal" if mx.metal.is_available() else "cuda")
    return f"{info.get('device_name', platform.processor() or 'unknown')} ({kind})"


def processor_name() -> str:
    """Return the name of the chip as the system has it, without MLX: ``Apple M3 Max``."""
    if sys.platform != "darwin":
        return platform.processor()
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def total_memory() -> int:
    """Return the bytes of memory of MLX's device; on Macs what Metal recommends to use at most."""
    info = {} if on_cpu() else mx.device_info()
    # Metal's name and CUDA's
    known = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return int(known or host_memory())


def host_memory() -> int:
    """Return the bytes of memory of this process beside a GPU's own; a container may limit it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text()))
    return min(limits)


def cache_limit() -> int:
    """Return the bytes of freed buffers that MLX may keep for reuse in a run.

    A process is at most so much larger than its arrays. MLX's own limit is 32 MB on Linux CPUs,
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
    """Return the largest resident size that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    packages = {"python": platform.python_version()}
    for name in ("mlx-packs", "mlx", "mlx-lm", "transformers", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "source tree"
    return packages
