"""The checkpoint folder of a GGUF file, in the cache while the file stays as it is."""

import hashlib
import os
from pathlib import Path

from ...cache import Cache, key_of
from ...errors import PackError, file_errors
from ...reading import check_regular

_CACHE = Cache("gguf", days=30, is_needed=True)
_FORMAT = "mlx_packs gguf 3"


def checkpoint_folder(path: Path, *, dense_k: bool = False) -> Path:
    """Write it if it is missing, with ``dense_k`` another one; PackError for an unusable file."""
    from .checkpoint import Conversion  # which loads MLX

    path = path.resolve()
    with file_errors(path, code="not-found", flag="model"):
        check_regular(path)

    state = _state(path)

    def write(folder: Path) -> None:
        Conversion.of(path, dense_k=dense_k).write(folder)
        if _state(path) != state:
            raise PackError(
                f"{path}: changed while it was read. Wait until it is written.", "unreadable"
            )

    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    name = f"{path.stem[:80]}-{digest[:12]}"
    if dense_k:
        name += "-dense"
    return _CACHE.folder(name, key_of(state), write)


def _state(path: Path) -> list:
    """What changes when the bytes of a file do."""
    facts = path.stat()
    name = os.fsencode(path).hex()
    return [_FORMAT, name, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
