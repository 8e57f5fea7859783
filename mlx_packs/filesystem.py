"""Durable writes, exchanged names and locks; temporary names, and those that dead processes left.

``.NAME.partial-HOST-RANDOM`` is a file or folder that becomes ``NAME``, or was it and is being
removed: it is deleted once nobody uses it. ``.NAME.old-HOST-RANDOM`` was ``NAME`` and is complete:
after a process was killed between two renames it stays until ``NAME`` is replaced again.
``.NAME.lock`` shows that a process writes ``NAME``. Its user holds a lock on it, which ends with
the process. Locks of other hosts may not be visible here (network folders, shared folders of
virtual machines), so their leftovers are kept for a day.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL, OLD = "partial", "old"
_NAME = re.compile(r"\..+\.partial-(?P<host>[0-9a-f]{6})-[0-9a-f]{10}(?:\.safetensors)?")
_STALE_S = 24 * 3600  # after which leftovers of another host are removed
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_AT_FDCWD = -100  # Linux: names are relative to the current folder
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES}


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if kernel or file system cannot.

    Raises:
        OSError: it could, but one of the names does not exist or may not be changed.
    """
    code = _exchange(os.fsencode(one), os.fsencode(other))
    if code in _CANNOT_EXCHANGE:
        return False
    if code:
        raise OSError(code, os.strerror(code), str(one), None, str(other))
    return True


def _exchange(one: bytes, other: bytes) -> int:
    """Return the errno of ``renameat2`` (Linux) or ``renamex_np`` (macOS); 0 if it worked."""
    name, folder = "renameat2", (_AT_FDCWD,)
    if sys.platform == "darwin":
        name, folder = "renamex_np", ()
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)  # glibc has it since 2.28
    if call is None:
        return errno.ENOSYS

    arguments = (*folder, one, *folder, other, _EXCHANGE)
    kinds = {int: ctypes.c_int, bytes: ctypes.c_char_p}
    call.argtypes = [kinds[type(each)] for each in arguments]
    return ctypes.get_errno() if call(*arguments) else 0


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


def is_locked(path: Path) -> bool:
    """Return whether a process of this host, or this one, holds a lock on a file.

    It takes the lock for an instant, for which `files.exclusive_writer` waits.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        lock(descriptor)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_named(descriptor: int, path: Path) -> bool:
    """Return whether an open file or folder still has a name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def hidden_name(path: Path, kind: str, suffix: str = "") -> Path:
    """Return a name beside ``path`` that no other process uses, on any host."""
    return path.with_name(f".{path.name}.{kind}-{_host()}-{secrets.token_hex(5)}{suffix}")


@contextmanager
def temporary(path: Path, create: Callable[[Path], object], suffix: str = "") -> Iterator[Path]:
    """Yield a file or folder beside ``path`` that ``create`` makes; it is removed at the end.

    It is locked meanwhile. What dead processes left in that folder is removed first.
    """
    sweep(path.parent)

    descriptor = None
    while descriptor is None:
        partial = hidden_name(path, PARTIAL, suffix)
        create(partial)
        descriptor = _locked(partial)  # None if another process took it for a leftover

    try:
        yield partial
    finally:
        remove(partial)
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove what dead processes left in a folder, their lock files too."""
    names: list[str] = []
    with suppress(OSError, ValueError):
        names = os.listdir(folder)

    for name in names:
        if match := _NAME.fullmatch(name):
            _remove_dead(folder / name, match["host"])
        elif name.startswith(".") and name.endswith(".lock"):
            _remove_dead(folder / name, None)


def discard(folder: Path, target: Path) -> None:
    """Remove a folder under a temporary name, so that ``target`` never is a half-removed folder."""
    doomed = hidden_name(target, PARTIAL)
    os.rename(folder, doomed)
    remove(doomed)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _remove_dead(path: Path, host: str | None) -> None:
    """Remove a leftover if its process is dead; the text of a lock file names its host."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # another process was faster
        return

    try:
        if host is None:
            match = re.fullmatch(rb"mlx_packs lock ([0-9a-f]{6})\n", os.read(descriptor, 64))
            if match is None:  # another program's
                return
            host = match[1].decode()

        is_unused = (lock(descriptor) and host == _host()) or _age_s(path) > _STALE_S
        if is_unused and is_named(descriptor, path):
            remove(path)
    except OSError:  # a live process has it
        pass
    finally:
        os.close(descriptor)


def lock_text() -> bytes:
    """Return the content of a lock file of this host, which shows that it is this program's."""
    return f"mlx_packs lock {_host()}\n".encode()


def _locked(path: Path) -> int | None:
    """Open and lock a file or folder that was just made; None if it is gone or another's."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with suppress(BlockingIOError):
        lock(descriptor)
        if is_named(descriptor, path):
            return descriptor

    os.close(descriptor)
    return None


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:6]


def _age_s(path: Path) -> float:
    """Return the seconds since a file, or anything in a folder, was last written."""
    times = [path.stat().st_mtime]
    with suppress(OSError):
        times += [file.lstat().st_mtime for file in path.rglob("*")]
    return time.time() - max(times)
