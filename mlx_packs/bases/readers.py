"""Formats of single files that are base models; each becomes an ordinary checkpoint folder.

To add one: its functions in a package here, and an entry in `READERS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .gguf.folder import checkpoint_folder
from .gguf.header import is_gguf


@dataclass(frozen=True)
class Reader:
    """One format of files.

    Attributes:
        name: for people.
        matches: whether a file is named or begins as one.
        folder: returns the checkpoint folder of a file, and writes it if it is not there.
    """

    name: str
    matches: Callable[[Path], bool]
    folder: Callable[[Path], Path]


READERS = (Reader("GGUF", is_gguf, checkpoint_folder),)


def reader_of(path: Path) -> Reader | None:
    """Return the reader of a file; None if its format is not read."""
    return next((reader for reader in READERS if reader.matches(path)), None)
