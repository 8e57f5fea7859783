"""The jump table of a loaded library: addresses of the functions that it calls (ELF64, Linux).

Nothing here trusts what it reads: every read is checked against the mapped memory, every count
against the table that it counts, so that an unknown layout is an ElfError and never a crash.
System V gABI, chapters 4 and 5.
"""

import ctypes
import struct
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

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
