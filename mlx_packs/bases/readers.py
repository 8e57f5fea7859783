"""Formats of single files that are base models; each becomes an ordinary checkpoint folder.

To add one: its functions in a package here, and an entry in `READERS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..late import load
from .gguf.header import is_gguf


@dataclass(frozen=True)
class Reader:
    """One format of files.

    Attributes:
        name: for people.
        matches: whether a file is named or begins as one.
        code: the function that returns the checkpoint folder of a file, and writes it if it is
            not there; it is loaded when it is needed.
    """

    name: str
    matches: Callable[[Path], bool]
    code: str

    def folder(self, file: Path) -> Path:
        """Return the checkpoint folder of a file."""
        return load(self.code)(file)


READERS = (Reader("GGUF", is_gguf, "bases.gguf.folder:checkpoint_folder"),)


def reader_of(path: Path) -> Reader | None:
    """Return the reader of a file; None if its format is not read."""
    return next((reader for reader in READERS if reader.matches(path)), None)
