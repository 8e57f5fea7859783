"""Measurements of this device, stored for later runs in the user's cache folder.

A measurement is one JSON file, found by its kind, by what was measured, and by every fact of
the machine that a time depends on. Concurrent runs write the same file, each atomically; a file
that cannot be read, or has another key, counts as none.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from . import __version__, runtime
from .errors import PackError
from .files import atomic_write, cache_folder, remove_unused, to_json
from .reading import read_json
from .runtime import mx

_discarding = False
_FORMAT = "mlx_packs measurement 1"
_DAYS = 90  # after which an unused measurement is removed


def device() -> dict:
    """Return the facts of this machine and its software on which a measured time depends."""
    blas = runtime.BLAS
    return {
        "name": runtime.device_name(),
        "cores": os.cpu_count(),
        "memory": runtime.total_memory(),
        "mlx": mx.__version__,
        "mlx_packs": __version__,
        "blas": [blas.name, blas.threads],
    }


def recall(kind: str, of: Mapping) -> dict | None:
    """Return an earlier measurement of this device; None if there is none.

    Args:
        kind: what was measured, such as ``matmul-path``; part of a file's name.
        of: all that the result depends on besides the device: shapes, dtypes. Values are JSON.
    """
    key = _key(kind, of)
    if (file := _file(key)) is None or not file.is_file():
        return None

    try:
        content = read_json(file)
        os.utime(file)
    except (PackError, OSError):
        return None

    result = content.pop("result", None)
    if content != key or not isinstance(result, dict):
        return None
    return result


def remember(kind: str, of: Mapping, result: Mapping) -> None:
    """Keep a result (JSON) for `recall`; a folder that cannot be written is left alone."""
    key = _key(kind, of)
    if _discarding or (file := _file(key)) is None:
        return

    with suppress(PackError, OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(file, to_json({**key, "result": result}))
        remove_unused(file.parent, "*.json", _DAYS)


@contextmanager
def discarded() -> Iterator[None]:
    """Store no measurements in a context, for a machine that something else slows down."""
    global _discarding
    before = _discarding
    _discarding = True
    try:
        yield
    finally:
        _discarding = before


def _key(kind: str, of: Mapping) -> dict:
    """Return the key of a measurement, in the form in which JSON reads it back."""
    return json.loads(json.dumps({"format": _FORMAT, "kind": kind, "device": device(), "of": of}))


def _file(key: Mapping) -> Path | None:
    folder = cache_folder("measurements")
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{key['kind']}-{digest[:16]}.json"
