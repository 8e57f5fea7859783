"""The library that multiplies matrices on CPUs: OpenBLAS instead of the BLAS of MLX's wheel.

The CPU wheel of MLX on Linux ships the reference BLAS (1 to 5 GFLOP/s where OpenBLAS reaches 200).
All have functions of the same names and ABI, so three entries of libmlx's jump table are replaced.
An entry is kept only if products through it are right; otherwise MLX stays as it was linked.

The jump table of a loaded library has the addresses of the functions that it calls (ELF64, System V
gABI, chapters 4 and 5). Nothing here trusts what it reads: every read is checked against the mapped
memory, every count against the table that it counts, so that an unknown layout is an ElfError and
never a crash.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..terminal import echo

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
Reader = Callable[[int, int], bytes]  # (address, size) -> exactly so many bytes, or an ElfError

_EM_MACHINES = {"x86_64": 62, "aarch64": 183}
_JUMP_SLOTS = {"x86_64": 7, "aarch64": 1026}  # R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT
_HEADER = 64  # bytes
_PROGRAM_HEADER = 56
_SYMBOL = 24
_RELOCATION = 24
_PT_DYNAMIC = 2
_DT_NULL = 0
_DT_PLTRELSZ = 2
_DT_STRTAB = 5
_DT_SYMTAB = 6
_DT_RELA = 7
_DT_STRSZ = 10
_DT_SYMENT = 11
_DT_PLTREL = 20
_DT_JMPREL = 23
_MOST_TAGS = 4096
_MOST_RELOCATIONS = 1 << 20


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


class ElfError(ValueError):
    """The memory is not that of a loaded ELF64 library for this processor."""


class Segment(NamedTuple):
    """A mapped range of a process's memory; ``offset`` is that of its first byte in ``file``."""

    start: int
    end: int
    permissions: str
    offset: int
    file: tuple[str, str, str]  # device, inode, path

    @property
    def path(self) -> str:
        """The file's path, also of one that an upgrade has replaced since it was loaded."""
        return self.file[2].removesuffix(" (deleted)")


def parse_maps(text: str) -> list[Segment]:
    """Return the mapped ranges that a ``/proc/PID/maps`` lists."""
    segments = []
    for line in text.splitlines():
        addresses, permissions, offset, device, inode, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        file = (device, inode, path[0] if path else "")
        segments.append(Segment(start, end, permissions, int(offset, 16), file))
    return segments


def own_maps() -> list[Segment]:
    return parse_maps(Path("/proc/self/maps").read_text())


def library_segments(name: str, maps: Iterable[Segment]) -> list[Segment]:
    """Return the ranges of a library by its file's name; ElfError unless one file is loaded."""
    segments = [s for s in maps if Path(s.path).name == name]
    files = {segment.file for segment in segments}

    if len(files) != 1:
        raise ElfError(f"{name} is loaded {len(files)} times")
    return segments


def covers(segments: Iterable[Segment], address: int, size: int, permission: str) -> bool:
    """Return whether one of the ranges has ``size`` bytes from an address, with a permission."""
    return any(
        segment.start <= address and address + size <= segment.end
        for segment in segments
        if permission in segment.permissions
    )


def memory_reader(segments: Iterable[Segment]) -> Reader:
    """Return a reader of this process's memory, bounded by ranges that may be read."""
    ranges: list[list[int]] = []
    for segment in sorted(s for s in segments if "r" in s.permissions):
        if ranges and ranges[-1][1] == segment.start:
            ranges[-1][1] = segment.end
        else:
            ranges.append([segment.start, segment.end])

    def read(address: int, size: int) -> bytes:
        if size < 0 or not any(start <= address and address + size <= end for start, end in ranges):
            raise ElfError(f"{size} bytes at {address:#x} are not the library's")
        return ctypes.string_at(address, size)

    return read


def jump_slots(read: Reader, base: int, machine: str, names: Collection[str]) -> dict[str, int]:
    """Return the addresses of the jump-table entries for functions of some names.

    The library is at ``base``, and ``machine`` is the processor as `platform.machine` has it.
    Functions that the library does not call by its jump table are left out; another layout is an
    ElfError.
    """
    if machine not in _EM_MACHINES:
        raise ElfError(f"no binding for {machine}")

    tags = _dynamic_tags(read, base, _EM_MACHINES[machine])

    def located(tag: int) -> int:
        # glibc adds the base to the addresses in memory; others leave them as they are in the file
        if tags[tag] >= base:
            return tags[tag]
        return base + tags[tag]

    strings, symbols, relocations = (located(t) for t in (_DT_STRTAB, _DT_SYMTAB, _DT_JMPREL))
    count, rest = divmod(tags[_DT_PLTRELSZ], _RELOCATION)
    if rest or count > _MOST_RELOCATIONS:
        raise ElfError(f"its jump table has {tags[_DT_PLTRELSZ]} bytes of relocations")

    encoded = {name.encode() + b"\0": name for name in names}
    longest = max(map(len, encoded), default=0)
    slots: dict[str, int] = {}
    table = read(relocations, count * _RELOCATION)

    for offset, info, _ in struct.iter_unpack("<QQq", table):
        if info & 0xFFFFFFFF != _JUMP_SLOTS[machine]:
            continue
        (name_at,) = struct.unpack("<I", read(symbols + (info >> 32) * _SYMBOL, 4))
        if name_at >= tags[_DT_STRSZ]:
            raise ElfError("a symbol's name is not in the table of names")

        text = read(strings + name_at, min(longest, tags[_DT_STRSZ] - name_at))
        name = encoded.get(text[: text.find(b"\0") + 1])
        if name is None:
            continue

        if name in slots or offset % 8:
            raise ElfError(f"{name} has no jump-table entry of its own")
        slots[name] = base + offset

    return slots


def _dynamic_tags(read: Reader, base: int, machine: int) -> dict[int, int]:
    """Return the dynamic section of a library as {tag: value}, with the tags that are needed."""
    header = read(base, _HEADER)
    if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        raise ElfError("it is not an ELF64 library")

    kind, of_machine = struct.unpack_from("<HH", header, 16)
    (table,) = struct.unpack_from("<Q", header, 32)
    entry_size, entries = struct.unpack_from("<HH", header, 54)
    if (kind, of_machine, entry_size) != (3, machine, _PROGRAM_HEADER):
        raise ElfError(f"it is of another kind: {kind}, {of_machine}, {entry_size}")

    dynamic = None
    for at in range(entries):
        program_header = read(base + table + at * _PROGRAM_HEADER, _PROGRAM_HEADER)
        if struct.unpack_from("<I", program_header)[0] == _PT_DYNAMIC:
            dynamic = struct.unpack_from("<16xQ16xQ", program_header)
            break
    if dynamic is None:
        raise ElfError("it has no dynamic section")

    address, size = dynamic
    if size // 16 > _MOST_TAGS:
        raise ElfError(f"its dynamic section has {size} bytes")

    tags: dict[int, int] = {}
    for tag, value in struct.iter_unpack("<QQ", read(base + address, size // 16 * 16)):
        if tag == _DT_NULL:
            break
        tags[tag] = value

    needed = {_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_PLTREL, _DT_JMPREL}
    if missing := needed - set(tags):
        raise ElfError(f"its dynamic section lacks {sorted(missing)}")
    if (tags[_DT_SYMENT], tags[_DT_PLTREL]) != (_SYMBOL, _DT_RELA):
        raise ElfError("its symbols or relocations are of another size")
    return tags


def gemm_slots() -> dict[str, ctypes.c_uint64]:
    """Return the entries of libmlx's jump table for matrix products, by name; or raise ElfError."""
    maps = own_maps()
    library = library_segments(_LIBRARY, maps)
    base = next((s.start for s in library if s.offset == 0), None)
    if base is None:
        raise ElfError(f"{_LIBRARY} is not mapped from its beginning")

    reader = memory_reader(library)
    addresses = jump_slots(reader, base, platform.machine(), _DTYPES)
    if _SGEMM not in addresses:
        raise ElfError(f"{_LIBRARY} does not call {_SGEMM} by its jump table")

    for name, address in addresses.items():
        if not covers(library, address, 8, "w"):
            raise ElfError(f"the jump table of {_LIBRARY} cannot be written")
        function = int.from_bytes(reader(address, 8), "little")
        if not covers(maps, function, 1, "x"):
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
