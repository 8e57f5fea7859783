"""Atomic writes: files and folders appear under their name only when they are complete."""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .errors import PackError
from .reading import read_header

if TYPE_CHECKING:
    import mlx.core as mx


TINY_FOLDER = Path(__file__).parent / "tiny"  # the bundled base, data set and recipe
_DTYPES = {  # of MLX, and how safetensors calls them
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
CACHE_VARIABLE = "MLX_PACKS_CACHE"


def cache_folder(part: str) -> Path | None:
    """Return ``$MLX_PACKS_CACHE/<part>``; None if the variable is ``off``."""
    named = os.environ.get(CACHE_VARIABLE) or "~/.cache/mlx_packs"
    return None if named == "off" else Path(named).expanduser() / part


@contextmanager
def atomic_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``, renamed to it on success, removed on failure.

    Without ``replace`` an existing ``path`` is an error.
    """
    if path.exists() and not replace:
        raise PackError(f"{path}: already exists. Choose another path.", "exists")
    if path.is_symlink():  # the link stays, and leads to what is written
        path = path.resolve()
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    _sync(file)
            replace_folder(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(partial: Path, path: Path) -> None:
    """Rename a finished folder to ``path``; the one that it replaces stays on failure."""
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    try:
        if path.exists():
            os.rename(path, old)
        os.rename(partial, path)
    except BaseException:  # an interruption too
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def exclusive_writer(path: Path) -> Iterator[None]:
    """Let one process at a time write ``path``, by a lock file beside it; others do not wait."""
    lock = path.with_name(f".{path.name}.lock")
    with _locked(lock, path):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _locked(lock: Path, path: Path) -> IO:
    """Open the lock file and lock it until it is closed."""
    while True:
        with write_errors(path):
            file = lock.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # who had the lock may have removed this file since it was opened here
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                return file
        except BlockingIOError:
            file.close()
            raise PackError(
                f"{path}: another process is writing it. Wait for it, or choose another path.",
                "busy",
            ) from None
        except FileNotFoundError:
            pass
        except OSError:
            return file  # a file system without locks
        file.close()


@contextmanager
def write_errors(path: Path, flag: str | None = None) -> Iterator[None]:
    """Raise errors of the system as those of a path that cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise PackError(f"{path}: cannot be written ({reason}).", "unwritable", flag) from None


def _sync(file: Path) -> None:
    with file.open("rb") as f:
        os.fsync(f.fileno())


def atomic_write(path: Path, text: str) -> None:
    """Write a text file atomically."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with write_errors(path):
            partial.write_text(text, encoding="utf-8")
            _sync(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file."""
    with write_errors(path), path.open("a", encoding="utf-8") as f:
        f.write(line + "\n")


def remove_unused(folder: Path, pattern: str, days: int) -> None:
    """Remove the files of a cache that no run has used for some days."""
    oldest = time.time() - days * 24 * 3600
    for file in folder.glob(pattern):
        with suppress(OSError):  # another process was faster
            if file.stat().st_mtime < oldest:
                file.unlink()


def make_folder(path: Path) -> None:
    """Create a folder and those above it."""
    with write_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def to_json(value: object) -> str:
    """Return indented JSON, which people and diffs can read."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n"


def is_hub_id(name: str) -> bool:
    """Return whether a name can be that of a model or data set on the Hub: ``owner/name``."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII) is not None


def save_tensors(file: Path, tensors: dict, metadata: Mapping[str, str] | None = None) -> None:
    """Write MLX arrays as safetensors, in the order of their names; the header has ``metadata``."""
    from .runtime import mx

    try:
        entries = {"format": "mlx", **(metadata or {})}
        mx.save_safetensors(str(file), dict(sorted(tensors.items())), entries)
    except RuntimeError as error:
        raise PackError(f"{file}: cannot be written ({error}).", "unwritable") from None
    # MLX does not report a full disk: the file is then shorter than its header states
    read_header(file)


def write_tensors(
    file: Path, outline: dict, tensors: Iterable[tuple[str, "mx.array"]], kind: str = "mlx"
) -> None:
    """Write safetensors atomically and one tensor at a time; none stays in memory.

    ``outline`` has lazy arrays of the shapes and dtypes to come, by name; ``tensors`` come in any
    order; ``kind`` is ``mlx`` or ``pt``, whose conventions the names follow.
    """
    from .runtime import mx

    # wide dtypes first, so that each is aligned
    names = sorted(outline, key=lambda name: (-outline[name].dtype.size, name))
    header: dict = {"__metadata__": {"format": kind}}
    end = 0
    for name in names:
        begin, end = end, end + outline[name].nbytes
        dtype = _DTYPES[dtype_name(outline[name])]
        shape = list(outline[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
    try:
        with write_errors(file):
            with partial.open("wb") as f:
                f.write(len(text).to_bytes(8, "little") + text)
                for name, tensor in tensors:
                    begin, end = header[name]["data_offsets"]
                    assert tensor.dtype == outline[name].dtype and tensor.nbytes == end - begin
                    f.seek(8 + len(text) + begin)
                    f.write(tensor.flatten().view(mx.uint8))
                os.fsync(f.fileno())
            os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def dtype_name(tensor: "mx.array") -> str:
    """Return the dtype of a tensor without its module: ``bfloat16``."""
    return str(tensor.dtype).removeprefix("mlx.core.")
