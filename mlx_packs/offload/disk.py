"""The rate at which this machine's disk reads large files, and what that means for a plan."""

import fcntl
import os
import re
import tempfile
import time
from pathlib import Path

from ..cache import Cache
from ..display import size
from ..macos import output
from ..measurements import recall, remember
from ..terminal import short
from .sizes import BlocksOnDisk

ASSUMED_RATE = 2.5e9  # bytes per second of a Mac's SSD
_SLOW_RATE = 100e6
_KIND = "disk-rate"
_BYTES = 256 << 20
_BLOCK = 16 << 20
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afpfs", "webdav", "fuse.sshfs", "9p")


def disk_rate() -> float:
    """Return the bytes per second that were measured on this machine, else `ASSUMED_RATE`."""
    measured = recall(_KIND, {})
    return measured["bytes_per_s"] if measured else ASSUMED_RATE


def plan_line(blocks: BlocksOnDisk) -> str:
    """Return how much of a base is on disk, and how long a step reads."""
    rate = disk_rate()
    seconds = short(blocks.step_bytes / rate)
    line = (
        f"{blocks.on_disk} of {blocks.blocks} blocks stay on disk; a step reads "
        f"{size(blocks.step_bytes)}, {seconds} s at {size(rate)}/s"
    )
    if blocks.micro_batches > 1:
        line += f"; {_how_read(blocks)}"
    if rate < _SLOW_RATE:
        line += f"; the disk is slow: each step may wait {seconds} s for it"
    return line


def _how_read(blocks: BlocksOnDisk) -> str:
    if blocks.together:
        return f"its {blocks.micro_batches} micro-batches pass each block together"

    line = f"each of its {blocks.micro_batches} micro-batches reads the blocks"
    if blocks.together_bytes is not None:
        line += f", as to pass them together uses {size(blocks.together_bytes)} more memory"
    return line


def remote_note(file: Path) -> str | None:
    """Return a warning if a file of a base is not on a disk of this machine, else None."""
    file = file.resolve()
    place = None
    if "Mobile Documents" in file.parts:
        place = "in iCloud Drive, which may remove it from this machine"
    elif _filesystem(file) in _NETWORK:
        place = "on a network volume"
    if place is None:
        return None
    return f"{file.name}: is {place}; each step reads it. Copy the base to this machine's disk"


def _filesystem(file: Path) -> str:
    """Return the type of the file system of a file; empty if it is not known."""
    # Linux: DEVICE on FOLDER type TYPE (...); macOS: DEVICE on FOLDER (TYPE, ...)
    lines = re.findall(r"^.* on (/.*?) (?:type ([\w.]+) )?\((\w+)", output(["mount"]) or "", re.M)
    types = {Path(folder): kind or first for folder, kind, first in lines}
    return next((types[folder] for folder in file.parents if folder in types), "")


def examine_disk() -> float | None:
    """Return the bytes per second of reading a new file, and remember it for plans.

    None if the cache is off or cannot be written.
    """
    try:
        if (folder := Cache("blocks", days=30).make()) is None:
            return None
        with tempfile.TemporaryFile(dir=folder) as file:
            rate = _rate(file.fileno())
    except OSError:
        return None
    remember(_KIND, {}, {"bytes_per_s": rate})
    return rate


def _rate(descriptor: int) -> float:
    content = os.urandom(_BLOCK)
    for _ in range(0, _BYTES, _BLOCK):
        os.write(descriptor, content)
    os.fsync(descriptor)
    # the next reads come from the disk, where the system can be told so
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    start = time.perf_counter()
    for offset in range(0, _BYTES, _BLOCK):
        os.pread(descriptor, _BLOCK, offset)
    return _BYTES / (time.perf_counter() - start)
