"""The rate at which the disk of the user's cache reads large files."""

import fcntl
import os
import tempfile
import time

from ..cache import Cache
from .sizes import remember_disk_rate

_BYTES = 256 << 20
_BLOCK = 16 << 20


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
    remember_disk_rate(rate)
    return rate


def _rate(descriptor: int) -> float:
    content = os.urandom(_BLOCK)
    for _ in range(0, _BYTES, _BLOCK):
        os.write(descriptor, content)
    os.fsync(descriptor)
    _leave_page_cache(descriptor)

    start = time.perf_counter()
    for offset in range(0, _BYTES, _BLOCK):
        os.pread(descriptor, _BLOCK, offset)
    return _BYTES / (time.perf_counter() - start)


def _leave_page_cache(descriptor: int) -> None:
    """Let the next reads come from the disk, where the system can be told so."""
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
