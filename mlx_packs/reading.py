"""Bounded readers of files that somebody else wrote.

Only regular files are opened; size, depth and numbers are limited before they cost anything; every
fault is one line that names the file. Hashes of files, and of JSON that contains its own, let
reading notice damage.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .errors import PackError, file_errors, library_errors

FLOATS = ("F32", "F16", "BF16")  # dtypes of adapters and of dense weights
DOCUMENT_BYTES = 64 << 20  # of a JSON file; the index of a base with 140,000 tensors has 15 MB
YAML_BYTES = 256 << 10  # PyYAML reads about 0.1 MB/s
HEADER_BYTES = 100_000_000  # of a safetensors header, as the safetensors library has it
SEAL = "sha256"  # the key of the hash in JSON that is sealed
_LINE_BYTES = 1 << 20  # of a line of a file that grows
_DEPTH = 100  # levels of nested mappings and lists
_CONTAINERS = 2_000_000  # mappings and lists of a document; 64 bytes each at least
_DIGITS = 100  # of an integer; all such are floats, too
_AXES = 32  # of a tensor
_YAML_NODES = 100_000  # values of a YAML file, those behind an alias counted each time
DTYPE_BITS = {  # of a number of each dtype of safetensors
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(file: Path, limit: int | None = None) -> int:
    """Return the size of a file; a link is followed.

    Raises:
        PackError: it is no regular file, or larger than ``limit``.
        OSError: there is none.
    """
    return _checked_size(file, os.stat(file), limit)


def _checked_size(file: Path, facts: os.stat_result, limit: int | None) -> int:
    if not stat.S_ISREG(facts.st_mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(facts.st_mode)), "no file")
        raise PackError(f"is {kind}. Put a regular file in its place.", "unreadable", where=file)

    if limit is not None and facts.st_size > limit:
        raise PackError(
            f"has {facts.st_size:,} bytes, but at most {limit:,} are read of such a file.",
            "unreadable",
            where=file,
        )

    return facts.st_size


def open_regular(file: Path, limit: int | None = None) -> IO[bytes]:
    """Open a regular file for reading, as `check_regular` checks it; never waits for a pipe."""
    check_regular(file, limit)

    # it may have been replaced meanwhile, so what was opened is checked, too
    opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb")
    try:
        _checked_size(file, os.fstat(opened.fileno()), limit)
    except BaseException:
        opened.close()
        raise
    return opened


def read_text(file: Path, limit: int = DOCUMENT_BYTES) -> str:
    """Return the text of a UTF-8 file of at most ``limit`` bytes."""
    with open_regular(file, limit) as f:
        content = f.read(limit + 1)

    if len(content) > limit:  # it grew meanwhile
        raise PackError(f"{file}: is being written. Wait for that.", "unreadable")
    return decode(content, str(file))


def decode(content: bytes, where: str) -> str:
    """Return UTF-8 bytes as text, without a byte order mark; errors call them ``where``."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PackError(
            f"{where}: is not UTF-8 (byte {error.start}). Save it as UTF-8.", "unreadable"
        ) from None


@dataclass(frozen=True)
class Tail:
    """Complete lines of a growing file: which file it is, and where in it they end.

    Lines that are whole replace those that the reader has; others follow them.
    """

    lines: list[bytes]
    file: str = ""
    end: int = 0
    is_whole: bool = True


def tail(path: Path, file: str = "", start: int = 0, most: float = DOCUMENT_BYTES) -> Tail:
    """Return the complete lines from ``start`` of ``file``, or of the last ``most`` bytes.

    A file that was replaced or cut is read anew; one that is missing has no lines. An incomplete
    last line is left for the next call.
    """
    try:
        opened = open_regular(path)
    except FileNotFoundError:
        return Tail([])
    with opened:
        return tail_of(opened, file, start, most)


def tail_of(
    opened: IO[bytes], file: str = "", start: int = 0, most: float = DOCUMENT_BYTES
) -> Tail:
    """Return what `tail` does, of an open file, which may have no name any more."""
    facts = os.fstat(opened.fileno())
    continues = file == str(facts.st_ino) and start <= facts.st_size
    first = start if continues else 0
    is_cut = facts.st_size - first > most
    if is_cut:
        first = facts.st_size - int(most)
    opened.seek(first)
    block = opened.read(facts.st_size - first)

    end = block.rfind(b"\n") + 1
    lines = block[:end].split(b"\n")[is_cut:-1]
    if not end and len(block) > _LINE_BYTES:  # it is skipped, not read again and again
        end = len(block)
    return Tail(lines, str(facts.st_ino), first + end, is_cut or not continues)


def json_objects(lines: Iterable[bytes]) -> Iterator[dict]:
    """Yield the JSON objects among lines; others are left out."""
    for line in lines:
        with suppress(ValueError):
            value = parse_json(line.decode("utf-8", "replace"))
            if isinstance(value, dict):
                yield value


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, deeper than 100, or has a value that no type can represent.
    """
    containers = text.count("[") + text.count("{")
    if containers > _CONTAINERS:
        raise ValueError(f"it has more than {_CONTAINERS:,} lists and mappings")

    too_deep = ValueError(f"it is nested more than {_DEPTH} deep")
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise too_deep from None
    if containers > _DEPTH and depth_of(value) > _DEPTH:
        raise too_deep

    # half of a surrogate pair, perhaps without the other half
    if re.search(r"\\u[dD][89a-fA-F]", text):
        _check_unicode(value)
    return value


def _integer(digits: str) -> int:
    _check_digits(digits)
    return int(digits)


def _check_digits(digits: str) -> None:
    if len(digits) > _DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits")


def depth_of(value: Any) -> int:
    """Return how deep lists and mappings are nested, counting to one more than allowed."""
    depth = 0
    level = [value]

    while level and depth <= _DEPTH:
        containers = [item for item in level if isinstance(item, (dict, list))]
        depth += bool(containers)
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container

    return depth


def _check_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"the text has half of a character ({half})") from None


def read_json(file: Path, kind: type = dict, limit: int = DOCUMENT_BYTES) -> Any:
    """Return the content of a JSON file, which must be of a kind: ``dict`` or ``list``."""
    text = read_text(file, limit)
    with file_errors(f"{file}: is not valid JSON"):
        content = parse_json(text)

    if not isinstance(content, kind):
        raise PackError(
            f"{file}: must be a {kind.__name__}, but is a {type(content).__name__}.", "unreadable"
        )
    return content


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file: PyYAML's safe types, and ``1e-5`` is a number."""
    text = read_text(file, YAML_BYTES)

    with library_errors(
        lambda reason: PackError(f"{file}: is not valid YAML: {reason}.", "unreadable")
    ):
        loader = _yaml_loader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {}, 0)
        content = loader.construct_document(node)
        _check_unicode(json.loads(json.dumps(content, default=str, skipkeys=True)))
    return content


def _yaml_loader() -> type:
    """PyYAML's safe loader with the numbers of YAML 1.2: ``1e-5`` is a float everywhere."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def _count_nodes(node: Any, counts: dict[int, int], depth: int) -> int:
    """Return how many values a node expands to; a ValueError if they are too many, or endless."""
    if depth > _DEPTH:
        raise ValueError(f"it is nested more than {_DEPTH} deep")

    if isinstance(node.value, str):
        if node.tag.endswith(":int"):
            _check_digits(node.value)
        return 1

    if id(node) in counts:
        if counts[id(node)] == 0:
            raise ValueError("an alias contains itself")
        return counts[id(node)]

    counts[id(node)] = 0
    parts = []
    for item in node.value:  # of a mapping, a pair of key and value
        parts += item if isinstance(item, tuple) else [item]

    total = 1
    for part in parts:
        total += _count_nodes(part, counts, depth + 1)
        if total > _YAML_NODES:
            raise ValueError(f"it has more than {_YAML_NODES:,} values")

    counts[id(node)] = total
    return total


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(file) as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_header(file: Path) -> tuple[dict[str, dict], int]:
    """Return the header of a safetensors file, by tensor, and the offset at which its data starts.

    The safetensors library checks all of it: known dtypes, offsets that fit the shapes, no
    gap and no overlap.
    """
    header, start, _ = _read_header(file)
    return header, start


def read_metadata(file: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file, which is checked as a whole."""
    return _read_header(file)[2]


def _read_header(file: Path) -> tuple[dict[str, dict], int, dict[str, str]]:
    """Return header, offset of the data, and metadata."""
    from safetensors import safe_open

    def fault(reason: str) -> PackError:
        text = f"is not a complete safetensors file ({reason:.200}). Copy or download it again."
        return PackError(f"{file}: {text}", "unreadable")

    with open_regular(file) as f, library_errors(fault):
        length = int.from_bytes(f.read(8), "little")
        if length > HEADER_BYTES:
            raise ValueError(f"its header has {length:,} bytes, but {HEADER_BYTES:,} are allowed")
        header = parse_json(f.read(length).decode())
        with safe_open(file, "np") as checked:
            metadata = checked.metadata() or {}

        header.pop("__metadata__", None)
        if any(len(tensor["shape"]) > _AXES for tensor in header.values()):
            raise ValueError(f"a tensor has more than {_AXES} axes")
    return header, 8 + length, metadata


def sealed(content: dict) -> dict:
    """Return JSON content with a hash of itself in place of an earlier one."""
    content = json.loads(json.dumps(without_seal(content)))  # as it will be read
    return {**content, SEAL: _digest(content)}


def check_seal(content: dict) -> None:
    """Raise a ValueError if JSON content differs from its hash, or has none."""
    if content.get(SEAL) != _digest(without_seal(content)):
        raise ValueError("it differs from its hash: it was changed or damaged")


def without_seal(content: dict) -> dict:
    return {key: value for key, value in content.items() if key != SEAL}


def _digest(content: dict) -> str:
    """Return a hash of the values in JSON content; order and layout do not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_facts(folder: Path, names: Iterable[str]) -> dict[str, dict]:
    """Return size and SHA-256 of files of a folder by name, as manifests have them."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in names
    }


def check_files(folder: Path, facts: dict[str, dict]) -> None:
    """Raise a ValueError that names the first file of a folder that differs from its facts."""
    for name, expected in facts.items():
        size = (folder / name).stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {expected['bytes']}")
        if sha256(folder / name) != expected["sha256"]:
            raise ValueError(f"{name} differs from its hash")
