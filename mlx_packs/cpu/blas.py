"""The library that multiplies matrices on CPUs: OpenBLAS instead of the BLAS of MLX's wheel.

The CPU wheel of MLX on Linux ships the reference BLAS (1 to 5 GFLOP/s where OpenBLAS reaches 200).
All have functions of the same names and ABI, so three entries of libmlx's jump table are replaced.
An entry is kept only if products through it are right; otherwise MLX stays as it was linked.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..terminal import echo
from . import elf
from .elf import ElfError

BLAS_VARIABLE = "MLX_PACKS_BLAS"
SLOW = "slow, about 40 times"
_LIBRARY = "libmlx.so"
_SYSTEM_BLAS = ("libopenblas.so.0", "libblis.so.4", "libmkl_rt.so.2")
_SGEMM = "cblas_sgemm"
_DTYPES = {  # of the products that libmlx computes by each function
    _SGEMM: (mx.float32, np.float32),
    "cblas_dgemm": (mx.float64, np.float64),
    "cblas_cgemm": (mx.complex64, np.complex64),
}


@dataclass(frozen=True)
class Blas:
    """The library that multiplies fp32 matrices on the CPU, and why that one."""

    name: str
    bound: bool
    note: str
    threads: int | None = None


def _candidates() -> list[tuple[str, str]]:
    """Return (library file, symbol prefix) in the order to try."""
    setting = os.environ.get(BLAS_VARIABLE, "auto")
    if setting not in ("auto", ""):
        return [(setting, ""), (setting, "scipy_")]

    system = [(name, "") for name in _SYSTEM_BLAS]
    try:
        import scipy_openblas32
    except ImportError:
        return system

    folder = Path(scipy_openblas32.get_lib_dir())
    return [(str(p), "scipy_") for p in sorted(folder.glob("libscipy_openblas*.so"))] + system


def _open_blas() -> tuple[str, dict[str, int], int | None] | None:
    """Return name, addresses and threads of the first library that has all matrix products."""
    for name, prefix in _candidates():
        try:
            library = ctypes.CDLL(name)
            functions = {symbol: getattr(library, prefix + symbol) for symbol in _DTYPES}
        except (OSError, AttributeError):
            continue

        addresses = {s: ctypes.cast(f, ctypes.c_void_p).value or 0 for s, f in functions.items()}
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


def gemm_slots() -> dict[str, ctypes.c_uint64]:
    """Return the entries of libmlx's jump table for matrix products, by name; or raise ElfError."""
    maps = elf.own_maps()
    library = elf.library_segments(_LIBRARY, maps)
    base = next((s.start for s in library if s.offset == 0), None)
    if base is None:
        raise ElfError(f"{_LIBRARY} is not mapped from its beginning")

    reader = elf.memory_reader(library)
    addresses = elf.jump_slots(reader, base, platform.machine(), _DTYPES)
    if _SGEMM not in addresses:
        raise ElfError(f"{_LIBRARY} does not call {_SGEMM} by its jump table")

    for name, address in addresses.items():
        if not elf.covers(library, address, 8, "w"):
            raise ElfError(f"the jump table of {_LIBRARY} cannot be written")
        function = int.from_bytes(reader(address, 8), "little")
        if not elf.covers(maps, function, 1, "x"):
            raise ElfError(f"the entry of {name} points to no code")

    return {name: ctypes.c_uint64.from_address(address) for name, address in addresses.items()}


def _is_right(symbol: str) -> bool:
    """Return whether products by a function are right: of integers, exact in any order."""
    dtype, numpy_dtype = _DTYPES[symbol]
    draw = np.random.default_rng()  # no product of before, left in memory, can pass
    a, b = (draw.integers(-8, 8, size).astype(numpy_dtype) for size in ((35, 17), (17, 29)))
    if np.iscomplexobj(a):
        a = a - 2j * a[::-1]
        b = b + 1j * b[:, ::-1]
    expected = a @ b

    try:
        x = mx.array(a, dtype=dtype)
        y = mx.array(b, dtype=dtype)
        rows = mx.contiguous(x.T).T  # stored transposed
        columns = mx.contiguous(y.T).T
        products = [x @ y, rows @ y, x @ columns, mx.addmm(-(x @ y), x, y, alpha=2, beta=1)]
        return all(np.array_equal(np.array(product), expected) for product in products)
    except (RuntimeError, ValueError):
        return False


def _proven(slots: dict[str, ctypes.c_uint64], addresses: dict[str, int]) -> list[str]:
    """Point the entries to other functions; return those that were proven, the rest is undone."""
    proven = []
    for symbol, slot in slots.items():
        before = slot.value
        slot.value = addresses[symbol]
        if _is_right(symbol):
            proven.append(symbol)
        else:
            slot.value = before
    return proven


def _in_a_thread(compute: Callable[[], list[str]]) -> list[str]:
    """Return what a thread that ends computes, so that this one may still fork."""
    unused = not mx.get_peak_memory()

    def compute_and_end() -> list[str]:
        with mx.stream(mx.new_stream(mx.cpu)):
            result = compute()
        mx.clear_streams()
        return result

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(compute_and_end).result()
    if unused:
        mx.clear_cache()
        mx.reset_peak_memory()
    return result


def bind() -> Blas:
    """Bind libmlx's matrix products to an optimized BLAS, if possible, and return which it is."""
    if sys.platform != "linux":
        return Blas("Accelerate", False, "MLX's own on this system")
    if os.environ.get(BLAS_VARIABLE) == "off":
        return Blas("reference", False, f"{BLAS_VARIABLE}=off")

    try:
        slots = gemm_slots()
    except (ElfError, OSError, ValueError) as error:
        return Blas("as linked", False, f"{SLOW}: {error}")

    library = _open_blas()
    if library is None:
        hint = "none found (pip install scipy-openblas32, or apt install libopenblas0)"
        if named := os.environ.get(BLAS_VARIABLE, "auto").removeprefix("auto"):
            hint = f"{BLAS_VARIABLE}={named} has no CBLAS or cannot be loaded"
            echo(f"mlx_packs: {hint}; matrix products will be slow.", err=True)
        return Blas("reference", False, f"{SLOW}: {hint}")

    name, addresses, threads = library
    proven = _in_a_thread(lambda: _proven(slots, addresses))
    if _SGEMM not in proven:
        return Blas("reference", False, f"{SLOW}: {name} gave a wrong product and was unbound")

    beside = ""
    if rest := [symbol for symbol in slots if symbol not in proven]:
        beside = f", but for {', '.join(rest)}: a wrong product"
    return Blas(Path(name).name, True, f"bound from {name}{beside}", threads)
