"""Runs a compiled kernel: buffers with red zones, stacks for the threads, one pass over the grid.

The structures mirror those of runtime/runtime.cpp.
"""

import ctypes
import mmap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .report import KernelFault, Report

RED_ZONE = 4096
STACK = 128 * 1024
MAX_THREADS = 1024
ARENA = 128 * 1024
ORDERS = ("forward", "reverse", "shuffled")
_CELL = 32  # bytes of a note on one byte of memory
_KINDS = (
    "",
    "bounds",
    "race",
    "uninitialised",
    "divergence",
    "lane",
    "alignment",
    "undefined",
    "threadgroup memory",
    "stack",
)

_u32, _u64, _address = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class _Region(ctypes.Structure):
    _fields_ = [
        ("base", _address),
        ("size", _u64),
        ("name", ctypes.c_char_p),
        ("cells", _address),
        ("unwritten", _u64),
        ("kind", _u32),
        ("initialised", _u32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("regions", ctypes.POINTER(_Region)),
        ("entry", _address),
        ("arguments", ctypes.POINTER(_address)),
        ("stacks", _address),
        ("stack_size", _u64),
        ("arena", _address),
        ("arena_cells", _address),
        ("arena_size", _u64),
        ("threadgroup_limit", _u64),
        ("seed", _u64),
        ("accesses", _u64),
        ("counters", _u64 * 3),
        ("threadgroup_bytes", _u64),
        ("region_count", _u32),
        ("grid", _u32 * 3),
        ("group", _u32 * 3),
        ("whole_groups", _u32),
        ("order", _u32),
        ("fault", _u32),
        ("message", ctypes.c_char * 1000),
    ]


@dataclass
class Buffer:
    """Memory that the kernel gets: bytes before and after, and what it may do with them."""

    name: str
    data: bytes
    output: bool = False
    initialised: bool = True
    unwritten: int = 0


@cache
def _library(path: Path) -> ctypes.CDLL:
    # Mathematical functions come from the process; not every Python is linked with them.
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


@cache
def _memory(size: int, purpose: str) -> tuple[mmap.mmap, int]:
    """Zeroed pages that stay; ``purpose`` keeps two of one size apart."""
    pages = mmap.mmap(-1, size)
    return pages, _address_of(pages)


def _address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def run(
    path: Path,
    kernel: str,
    buffers: list[Buffer],
    grid: tuple[int, int, int],
    group: tuple[int, int, int],
    *,
    whole_groups: bool,
    order: str,
    threadgroup_limit: int,
    report: Report,
) -> None:
    """Runs all threads in one order; fills the outputs' ``data`` and ``unwritten``, and counts."""
    places, at = [], RED_ZONE
    for buffer in buffers:
        places.append(at)
        at += -(-(len(buffer.data) + RED_ZONE) // RED_ZONE) * RED_ZONE
    pages = mmap.mmap(-1, at)
    cells = mmap.mmap(-1, max(1, _CELL * sum(len(b.data) for b in buffers if b.output)))
    base, cell = _address_of(pages), _address_of(cells)

    regions = (_Region * len(buffers))()
    for region, buffer, place in zip(regions, buffers, places, strict=True):
        size = len(buffer.data)
        pages[place : place + size] = buffer.data
        region.base, region.size, region.name = base + place, size, buffer.name.encode()
        region.kind, region.initialised = int(buffer.output), int(buffer.initialised)
        if buffer.output:
            region.cells = cell
            cell += _CELL * size

    library = _library(path)
    launch = _Launch()
    launch.regions = regions
    launch.entry = ctypes.cast(library.emu_entry, _address)
    launch.arguments = (_address * len(buffers))(*(base + place for place in places))
    launch.stacks, launch.stack_size = _memory(MAX_THREADS * STACK, "stacks")[1], STACK
    launch.arena, launch.arena_size = _memory(ARENA, "arena")[1], ARENA
    launch.arena_cells = _memory(ARENA * _CELL, "cells")[1]
    launch.threadgroup_limit = threadgroup_limit
    launch.region_count = len(buffers)
    launch.grid, launch.group = (_u32 * 3)(*grid), (_u32 * 3)(*group)
    launch.whole_groups, launch.order = int(whole_groups), ORDERS.index(order)
    library.emu_run(ctypes.byref(launch))
    if launch.fault:
        raise KernelFault(_KINDS[launch.fault], kernel, launch.message.decode(errors="replace"))
    for region, buffer, place in zip(regions, buffers, places, strict=True):
        if buffer.output:
            buffer.data = pages[place : place + len(buffer.data)]
            buffer.unwritten = region.unwritten
    report.accesses, report.threadgroup_bytes = launch.accesses, launch.threadgroup_bytes
    report.half_operations, report.bfloat_operations, report.roundings = launch.counters
