"""Files of tensors: safetensors, written atomically and read with checks."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import PackError
from .files import replace_file, write_errors
from .filesystem import temporary
from .reading import FLOATS, read_header
from .runtime import dtype_name, mx

DTYPES = {  # of MLX, and how safetensors calls them
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


def read_tensors(file: Path) -> dict[str, mx.array]:
    """Return the adapters of a safetensors file; a value that is not finite is an error."""
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


def save_tensors(file: Path, tensors: dict, metadata: Mapping[str, str] | None = None) -> None:
    """Write MLX arrays as safetensors, in the order of their names; the header has ``metadata``."""
    try:
        entries = {"format": "mlx", **(metadata or {})}
        mx.save_safetensors(str(file), dict(sorted(tensors.items())), entries)
    except RuntimeError as error:
        raise PackError(f"{file}: cannot be written ({error}).", "unwritable") from None

    try:
        read_header(file)
    except PackError:  # MLX does not report it: the file is shorter than its header states
        raise PackError(
            f"{file}: cannot be written whole (the disk or a quota is full).", "unwritable"
        ) from None


def write_tensors(
    file: Path,
    outline: dict,
    tensors: Iterable[tuple[str, mx.array]],
    kind: str = "mlx",
) -> None:
    """Write safetensors atomically and one tensor at a time; none stays in memory.

    ``outline`` has lazy arrays of the shapes and dtypes to come, by name; ``tensors`` come in any
    order; ``kind`` is ``mlx`` or ``pt``, whose conventions the names follow.
    """
    # wide dtypes first, so that each is aligned
    names = sorted(outline, key=lambda name: (-outline[name].dtype.size, name))
    header: dict = {"__metadata__": {"format": kind}}
    end = 0
    for name in names:
        begin = end
        end += outline[name].nbytes
        dtype = DTYPES[dtype_name(outline[name].dtype)]
        shape = list(outline[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with write_errors(file), temporary(file, Path.touch) as partial:
        with partial.open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in tensors:
                begin, end = header[name]["data_offsets"]
                assert tensor.dtype == outline[name].dtype and tensor.nbytes == end - begin
                f.seek(8 + len(text) + begin)
                f.write(tensor.flatten().view(mx.uint8))
        replace_file(partial, file)


def check_written(file: Path, tensors: Mapping[str, mx.array], where: Path) -> None:
    """Read tensors back one by one; a PackError unless each equals what was to be written."""
    written = mx.load(str(file))
    for name, tensor in tensors.items():
        if not mx.array_equal(written.pop(name), tensor).item():
            fault = f"{name} reads back other numbers than were written. Check the disk."
            raise PackError(fault, "unwritable", where=where)
