"""Reading of files: JSON, and tensors as safetensors, each checked as far as it is read."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PackError

if TYPE_CHECKING:
    import mlx.core as mx

FLOATS = ("F32", "F16", "BF16")  # dtypes of adapters and of dense weights


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the content of a JSON file, which must be of a kind: ``dict`` or ``list``."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PackError(f"{file}: is not valid JSON: {error}.", "unreadable") from None
    if not isinstance(content, kind):
        raise PackError(
            f"{file}: must be a {kind.__name__}, but is a {type(content).__name__}.", "unreadable"
        )
    return content


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_header(file: Path) -> tuple[dict[str, dict], int]:
    """Return the header of a safetensors file and the offset at which its data starts.

    The header maps a name to its dtype, shape and data_offsets.

    Raises:
        PackError: the file is truncated or is not safetensors.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise PackError(f"{file}: is truncated or not a safetensors file.", "unreadable")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            if any(not t["dtype"] or min(t["shape"], default=0) < 0 for t in header.values()):
                raise ValueError
            data = max((int(t["data_offsets"][1]) for t in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise PackError(
                f"{file}: is not a safetensors file (its header is not JSON).", "unreadable"
            ) from None
    end = 8 + length + data
    if size < end:
        raise PackError(
            f"{file}: is truncated: {size} bytes of {end}. Copy or download it again.", "unreadable"
        )
    return header, 8 + length


def read_tensors(file: Path) -> dict[str, "mx.array"]:
    """Return the adapters of a safetensors file; a value that is not finite is an error."""
    from .runtime import mx

    header, _ = read_header(file)
    if bad := next((n for n, t in header.items() if t["dtype"] not in FLOATS), None):
        raise PackError(
            f"{file}: {bad} is {header[bad]['dtype']}. Adapters are F32, F16 or BF16.",
            "unsupported",
        )
    try:
        tensors = mx.load(str(file))
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise PackError(f"{file}: cannot be read: {reason}", "unreadable") from None
    for name, tensor in tensors.items():
        if not mx.isfinite(tensor).all().item():
            raise PackError(f"{file}: {name} has NaN or infinite values.", "unreadable")
    return tensors
