"""Atomic writes: files and folders appear under their name only when they are complete."""

import errno
import glob
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from . import filesystem
from .errors import PackError
from .filesystem import OLD, discard, hidden_name, lock_text, sweep, temporary
from .terminal import escaped

TINY_FOLDER = Path(__file__).parent / "tiny"  # the bundled base, data set and recipe
CACHE_VARIABLE = "MLX_PACKS_CACHE"
_ATTEMPTS = 20  # to replace a folder that other processes replace, too
_SWEEP_S = 0.05  # for which a process that looks for dead locks may hold a lock
_OVERTAKEN = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)


def cache_folder(part: str) -> Path | None:
    """Return ``$MLX_PACKS_CACHE/<part>``; None if the variable is ``off``."""
    setting = os.environ.get(CACHE_VARIABLE) or "~/.cache/mlx_packs"
    if setting == "off":
        return None
    return Path(setting).expanduser() / part


@contextmanager
def atomic_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``, which gets that name on success.

    At every instant ``path`` is the old folder or the new one, complete; a process that is killed
    leaves what the next one removes. Without ``replace`` an existing ``path`` is an error.
    """
    if path.exists() and not replace:
        raise PackError(f"{path}: already exists. Choose another path.", "exists")

    if path.is_symlink():  # the link stays, and leads to what is written
        path = path.resolve()

    make_folder(path.parent)
    with write_errors(path), temporary(path, Path.mkdir) as partial:
        yield partial
        replace_folder(partial, path)


def replace_folder(partial: Path, path: Path) -> None:
    """Give a finished folder the name ``path``, durably; then remove the one that had it.

    The names are exchanged atomically. If kernel or file system cannot do that, the old folder is
    moved to a hidden name first; it stays on failure. What a killed process moved is removed, too.
    """
    filesystem.sync_tree(partial)

    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            old = _put_in_place(partial, path)
            break
        except OSError as error:  # another writer was faster, as long as the new folder is there
            if error.errno not in _OVERTAKEN or not partial.exists() or not attempts_left:
                raise

    filesystem.sync(path.parent)
    if old is not None:
        for folder in {old, *path.parent.glob(f".{glob.escape(path.name)}.{OLD}-*")}:
            with suppress(OSError):
                discard(folder, path)


def _put_in_place(partial: Path, path: Path) -> Path | None:
    """Rename a folder to ``path``; return where the folder is now that had this name, if any."""
    if not path.exists():
        os.rename(partial, path)
        return None
    if filesystem.exchange(partial, path):
        return partial

    old = hidden_name(path, OLD)
    try:
        os.rename(path, old)
        os.rename(partial, path)
    except BaseException:  # an interruption too
        if old.exists():
            if path.exists():  # another writer's folder, which replaces the old one as well
                discard(old, path)
            else:
                os.rename(old, path)
        raise
    return old


@contextmanager
def exclusive_writer(path: Path, busy: str | None = None) -> Iterator[None]:
    """Let one process at a time write ``path``, by a lock file beside it; others do not wait.

    What dead processes left in that folder is removed first, their lock files too. Others get a
    PackError with the message ``busy``, or one that names the path.
    """
    if busy is None:
        busy = f"{path}: another process is writing it. Wait for it, or choose another path."

    lock = lock_of(path)
    with _locked(lock, path, busy):
        try:
            sweep(path.parent)
            yield
        finally:
            lock.unlink(missing_ok=True)


def lock_of(path: Path) -> Path:
    """Return the lock file that `exclusive_writer` holds while it writes a path."""
    return path.with_name(f".{path.name}.lock")


def _locked(lock: Path, path: Path, busy: str) -> IO:
    """Open the lock file and lock it until it is closed."""
    start = time.monotonic()

    while True:
        with write_errors(path):
            file = lock.open("ab", buffering=0)
        try:
            has_lock = filesystem.lock(file.fileno())
            # the last holder of the lock may have removed this file since it was opened here
            if not has_lock or filesystem.is_named(file.fileno(), lock):
                with suppress(OSError):  # it works on a full disk too
                    file.truncate(0)
                    file.write(lock_text())
                return file

        except BlockingIOError:
            if time.monotonic() - start > _SWEEP_S:
                file.close()
                raise PackError(busy, "busy") from None
            time.sleep(0.005)

        file.close()


@contextmanager
def write_errors(path: Path, flag: str | None = None) -> Iterator[None]:
    """Turn an OSError into a PackError that names the path which cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise PackError(f"{path}: cannot be written ({reason}).", "unwritable", flag) from None


def atomic_write(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Write a file atomically and durably; parts of a text need not be in memory at once."""
    with write_errors(path), temporary(path, Path.touch) as partial:
        if isinstance(content, bytes):
            partial.write_bytes(content)
        else:
            with partial.open("w", encoding="utf-8") as f:
                f.writelines([content] if isinstance(content, str) else content)
        replace_file(partial, path)


def replace_file(partial: Path, path: Path) -> None:
    filesystem.sync(partial)
    os.replace(partial, path)
    filesystem.sync(path.parent)


def append_line(path: Path, line: str) -> None:
    with write_errors(path), path.open("a", encoding="utf-8") as f:
        f.write(line + "\n")


def free_bytes(path: Path) -> int | None:
    """Return the free bytes of the disk that a path is on, or will be; None if unknown."""
    path = path.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    with suppress(OSError):
        return shutil.disk_usage(existing).free
    return None


def make_folder(path: Path) -> None:
    """Create a folder and those above it, durably."""
    with write_errors(path):
        created = []
        for folder in (path, *path.parents):
            if folder.exists():
                break
            created.append(folder)

        path.mkdir(parents=True, exist_ok=True)
        for folder in created:
            filesystem.sync(folder.parent)


def to_json(value: object) -> str:
    """Return indented JSON, which people and diffs can read, and terminals can show."""
    return escaped(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False)) + "\n"


def is_hub_id(name: str) -> bool:
    """Return whether a name can name a model or data set on the Hub: ``owner/name``."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII) is not None


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern of files, such as ``DIR/*.jsonl``."""
    is_local = not name.startswith("hf:")  # which may end in a slice: hf:owner/name[:1000]
    return is_local and glob.has_magic(name) and not os.path.exists(os.path.expanduser(name))
