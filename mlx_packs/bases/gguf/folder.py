"""The checkpoint folder of a GGUF file, kept in the cache while the file stays as it is."""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from ...errors import PackError
from ...files import atomic_folder, atomic_write, cache_folder
from ...reading import check_regular, read_json

_RECORD = "gguf.source"  # what the folder was written from; no *.json, so that nobody copies it
_FORMAT = "mlx_packs gguf 2"
_DAYS = 30  # after which a folder that nobody used is removed


def checkpoint_folder(path: Path) -> Path:
    """It is written if it is not there; PackError if the file cannot be used as a base model."""
    from .checkpoint import Conversion  # which loads MLX

    path = path.resolve()
    try:
        check_regular(path)
    except OSError as error:
        raise PackError(
            f"{path}: cannot be read ({error.strerror}).", "not-found", "model"
        ) from None

    cached = cache_folder("gguf") or _folder_of_process()
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    folder = cached / f"{path.stem[:80]}-{digest[:12]}"

    state = _state(path)
    if _recorded(folder) == state:
        with suppress(OSError):
            os.utime(folder / _RECORD)
        return folder

    conversion = Conversion.of(path)

    _remove_unused(cached)
    with atomic_folder(folder, replace=True) as partial:
        conversion.write(partial)
        if _state(path) != state:
            raise PackError(
                f"{path}: changed while it was read. Wait until it is written.", "unreadable"
            )
        atomic_write(partial / _RECORD, json.dumps(state))
    return folder


def _state(path: Path) -> list:
    """What changes when the bytes of a file do."""
    facts = path.stat()
    return [_FORMAT, str(path), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def _recorded(folder: Path) -> list | None:
    try:
        return read_json(folder / _RECORD, list)
    except (OSError, PackError):
        return None


@cache
def _folder_of_process() -> Path:
    """Removed with this process, for who has no cache."""
    folder = Path(tempfile.mkdtemp(prefix="mlx_packs-gguf-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _remove_unused(cached: Path) -> None:
    oldest = time.time() - _DAYS * 24 * 3600
    for record in cached.glob(f"*/{_RECORD}"):
        with suppress(OSError):
            if record.stat().st_mtime < oldest:
                shutil.rmtree(record.parent, ignore_errors=True)
