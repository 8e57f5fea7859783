"""The library that multiplies matrices on CPUs: OpenBLAS or MKL, not the BLAS of MLX's wheel.

The CPU wheel of MLX on Linux ships the reference BLAS (1 to 5 GFLOP/s where OpenBLAS reaches 200).
All have functions of the same names and ABI, so three entries of libmlx's jump table are replaced.
An entry is kept only if products through it are right; otherwise MLX stays as it was linked.

The jump table of a loaded library has the addresses of the functions that it calls (ELF64, System V
gABI, chapters 4 and 5). The loader, which has read the same tables, says where they are.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..cores import blas_threads
from ..terminal import echo

BLAS_VARIABLE = "MLX_PACKS_BLAS"
SLOW = "slow, about 40 times"
_CPUS = Path("/proc/cpuinfo")
_LIBRARY = "libmlx.so"
_SYSTEM_BLAS = ("libopenblas.so.0", "libblis.so.4", "libmkl_rt.so.3", "libmkl_rt.so.2")
_SGEMM = "cblas_sgemm"
_DTYPES = {  # of the products that libmlx computes by each function
    _SGEMM: (mx.float32, np.float32),
    "cblas_dgemm": (mx.float64, np.float64),
    "cblas_cgemm": (mx.complex64, np.complex64),
}

# Functions that get and set the threads of a library, and its variable
_THREADS = (
    ("openblas_get_num_threads", "openblas_set_num_threads", "OPENBLAS_NUM_THREADS"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads", "MKL_NUM_THREADS"),
)

_JUMP_SLOTS = {"x86_64": 7, "aarch64": 1026}  # R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT
_RTLD_DI_LINKMAP = 2
_SYMBOL = 24  # bytes
_DT_NULL = 0
_DT_PLTRELSZ = 2
_DT_STRTAB = 5
_DT_SYMTAB = 6
_DT_JMPREL = 23


@dataclass(frozen=True)
class Blas:
    """The library that multiplies fp32 matrices on the CPU, and why that one."""

    name: str
    bound: bool
    note: str
    threads: int | None = None


def _candidates() -> list[tuple[str, str]]:
    """Return (library file, symbol prefix) in the order to try: MKL first on Intel's processors."""
    setting = os.environ.get(BLAS_VARIABLE, "auto")
    if setting not in ("auto", ""):
        return [(setting, ""), (setting, "scipy_")]

    is_intel = "GenuineIntel" in _CPUS.read_text()
    mkl = _files_of("mkl", "libmkl_rt.so.*") if is_intel else []
    openblas = _files_of("scipy-openblas32", "libscipy_openblas*.so")
    return [
        *((file, "") for file in mkl),
        *((file, "scipy_") for file in openblas),
        *((name, "") for name in _SYSTEM_BLAS),
    ]


def _files_of(package: str, pattern: str) -> list[str]:
    """Return the files of an installed package whose names match a pattern."""
    with suppress(PackageNotFoundError):
        files = distribution(package).files or []
        return sorted(str(file.locate()) for file in files if fnmatch(file.name, pattern))
    return []


def _libraries() -> Iterator[tuple[str, dict[str, int], int | None]]:
    """Yield name, addresses and threads of the libraries that have all matrix products."""
    for name, prefix in _candidates():
        try:
            library = ctypes.CDLL(name)
            functions = {symbol: getattr(library, prefix + symbol) for symbol in _DTYPES}
        except (OSError, AttributeError):
            continue

        addresses = {s: ctypes.cast(f, ctypes.c_void_p).value or 0 for s, f in functions.items()}
        yield name, addresses, _set_threads(library, prefix)


def _set_threads(library: ctypes.CDLL, prefix: str) -> int | None:
    """Let the library use half of the cores, unless the user chose its threads; return how many.

    Threads of a BLAS wait for each other by spinning: with as many threads as cores, any other busy
    program makes a product 20 times slower (benchmarks/LOG.md). A fixed number also keeps runs
    repeatable, since the split of a product changes its last bits.
    """
    for get, change, variable in _THREADS:
        with suppress(AttributeError):
            get_threads = getattr(library, prefix + get)
            if threads := blas_threads(variable):
                getattr(library, prefix + change)(threads)
            return int(get_threads())
    return None


class ElfError(ValueError):
    """The jump table of a loaded library cannot be found, or not be written."""


class LoadedLibrary(ctypes.Structure):
    """What the loader knows of a library: ``struct link_map`` of link.h."""


LoadedLibrary._fields_ = [
    ("base", ctypes.c_size_t),
    ("path", ctypes.c_char_p),
    ("dynamic", ctypes.c_void_p),
    ("next", ctypes.POINTER(LoadedLibrary)),
]


def loaded_library(name: str) -> LoadedLibrary:
    """Return a library by its file's name; ElfError unless one of that name is loaded."""
    loader = ctypes.CDLL(None)
    loader.dlopen.restype = ctypes.c_void_p
    program = ctypes.c_void_p(loader.dlopen(None, os.RTLD_LAZY))
    entry = ctypes.POINTER(LoadedLibrary)()
    if loader.dlinfo(program, _RTLD_DI_LINKMAP, ctypes.byref(entry)):
        raise ElfError("the loader does not list its libraries")

    libraries = []
    while entry:
        library = entry.contents
        if Path(os.fsdecode(library.path)).name == name:
            libraries.append(library)
        entry = library.next
    if len(libraries) != 1:
        raise ElfError(f"{name} is loaded {len(libraries)} times")
    return libraries[0]


def jump_slots(library: LoadedLibrary, machine: str, names: Collection[str]) -> dict[str, int]:
    """Return the addresses of the jump-table entries for functions of some names.

    ``machine`` is the processor as `platform.machine` has it. Functions that the library does not
    call by its jump table are left out.
    """
    if machine not in _JUMP_SLOTS:
        raise ElfError(f"no binding for {machine}")

    tags: dict[int, int] = {}
    address = library.dynamic
    while (tag := ctypes.c_int64.from_address(address).value) != _DT_NULL:
        tags[tag] = ctypes.c_uint64.from_address(address + 8).value
        address += 16

    tables = [tags.get(tag, 0) for tag in (_DT_STRTAB, _DT_SYMTAB, _DT_JMPREL)]
    if min(tables) < library.base:  # absent, or not relocated as glibc does
        raise ElfError("its tables are not where glibc has them")
    strings, symbols, relocations = tables

    slots = {}
    by_bytes = {name.encode(): name for name in names}
    table = ctypes.string_at(relocations, tags[_DT_PLTRELSZ])
    for offset, info, _ in struct.iter_unpack("<QQq", table):
        if info & 0xFFFFFFFF == _JUMP_SLOTS[machine]:
            place = ctypes.c_uint32.from_address(symbols + (info >> 32) * _SYMBOL).value
            if name := by_bytes.get(ctypes.string_at(strings + place)):
                slots[name] = library.base + offset
    return slots


def permissions_at(address: int) -> str:
    """Return how this process may use its memory at an address, as ``r-xp``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _ = line.split(maxsplit=2)
        start, end = (int(each, 16) for each in addresses.split("-"))
        if start <= address < end:
            return permissions
    return ""


def gemm_slots() -> dict[str, ctypes.c_uint64]:
    """Return the entries of libmlx's jump table for matrix products, by name; or raise ElfError."""
    addresses = jump_slots(loaded_library(_LIBRARY), platform.machine(), _DTYPES)
    if _SGEMM not in addresses:
        raise ElfError(f"{_LIBRARY} does not call {_SGEMM} by its jump table")

    slots = {}
    for name, address in addresses.items():
        if "w" not in permissions_at(address):
            raise ElfError(f"the jump table of {_LIBRARY} cannot be written")
        slots[name] = ctypes.c_uint64.from_address(address)
        if "x" not in permissions_at(slots[name].value):
            raise ElfError(f"the entry of {name} points to no code")
    return slots


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
    except (ElfError, OSError, AttributeError) as error:
        return Blas("as linked", False, f"{SLOW}: {error}")

    wrong = ""
    for name, addresses, threads in _libraries():
        proven = _in_a_thread(partial(_proven, slots, addresses))
        if _SGEMM in proven:
            beside = ""
            if rest := [symbol for symbol in slots if symbol not in proven]:
                beside = f", but for {', '.join(rest)}: a wrong product"
            return Blas(Path(name).name, True, f"bound from {name}{beside}", threads)
        wrong = name
        echo(f"mlx_packs: {name} gave a wrong product and is not used.", err=True)

    if wrong:
        return Blas("reference", False, f"{SLOW}: {wrong} gave a wrong product and was unbound")
    hint = "none found (pip install scipy-openblas32, or apt install libopenblas0)"
    if named := os.environ.get(BLAS_VARIABLE, "auto").removeprefix("auto"):
        hint = f"{BLAS_VARIABLE}={named} has no CBLAS or cannot be loaded"
        echo(f"mlx_packs: {hint}; matrix products will be slow.", err=True)
    return Blas("reference", False, f"{SLOW}: {hint}")
