"""Calls of the file system beyond Python's own: exchanged names, durable writes, locks."""

import ctypes
import errno
import fcntl
import os
import sys
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_AT_FDCWD = -100  # Linux: names are relative to the current folder
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES}


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if kernel or file system cannot.

    Raises:
        OSError: it could, but one of the names does not exist or may not be changed.
    """
    call = _exchange_on_macos if sys.platform == "darwin" else _exchange_on_linux
    code = call(os.fsencode(one), os.fsencode(other))
    if code in _CANNOT_EXCHANGE:
        return False
    if code:
        raise OSError(code, os.strerror(code), str(one), None, str(other))
    return True


def _exchange_on_linux(one: bytes, other: bytes) -> int:
    """Return the errno of ``renameat2(RENAME_EXCHANGE)``; 0 if it worked."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc has it since 2.28
    if call is None:
        return errno.ENOSYS
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return ctypes.get_errno() if call(_AT_FDCWD, one, _AT_FDCWD, other, _EXCHANGE) else 0


def _exchange_on_macos(one: bytes, other: bytes) -> int:
    """Return the errno of ``renamex_np(RENAME_SWAP)``, which APFS has; 0 if it worked."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renamex_np", None)
    if call is None:
        return errno.ENOSYS
    call.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint)
    return ctypes.get_errno() if call(one, other, _EXCHANGE) else 0


def sync(path: Path, through_drive: bool = True) -> None:
    """Write a file, or the names in a folder, to the medium.

    On macOS ``fsync`` ends in the drive's cache; ``through_drive`` has the drive empty it, which
    takes milliseconds and covers all that was written before.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if not (through_drive and _fully_synced(descriptor)):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # folders cannot be synced everywhere
        if not path.is_dir() or error.errno not in _CANNOT_SYNC:
            raise


def _fully_synced(descriptor: int) -> bool:
    """Return whether ``F_FULLFSYNC`` of macOS worked, which not every file system has."""
    command = getattr(fcntl, "F_FULLFSYNC", None)
    try:
        return command is not None and fcntl.fcntl(descriptor, command) != -1
    except OSError:
        return False


def sync_tree(folder: Path) -> None:
    """Write a folder with all that is in it to the medium; the drive empties its cache once."""
    inside = [path for path in folder.rglob("*") if not path.is_symlink()]
    paths = [folder, *sorted(inside, key=Path.is_file)]
    for path in paths:
        sync(path, through_drive=path is paths[-1])


def lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; return False on a file system without locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def is_named(descriptor: int, path: Path) -> bool:
    """Return whether an open file or folder still has a name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
