"""Formats of single files that are base models; each becomes an ordinary checkpoint folder.

To add one: its functions in a package here, and an entry in `READERS`; or a package of its own,
whose entry point names a `Reader`.
"""

import logging
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config.choices import Table
from ..errors import PackError
from .gguf.header import is_gguf

_log = logging.getLogger("mlx_packs")
_logged: set[str] = set()  # faults of packages, each of which is logged once


@dataclass(frozen=True)
class Reader:
    """One format of files.

    Attributes:
        name: for people.
        matches: whether a file is named or begins as one.
        code: the function that returns the checkpoint folder of a file, and writes it if it is
            not there; ``module:name``, imported when it is needed.
        suffixes: endings of the names of its files, in lower case, by which a file is known that
            is not there.
    """

    name: str
    matches: Callable[[Path], bool]
    code: str
    suffixes: tuple[str, ...] = ()

    def folder(self, file: Path) -> Path:
        return pkgutil.resolve_name(self.code)(file)


READERS = (Reader("GGUF", is_gguf, "mlx_packs.bases.gguf.folder:checkpoint_folder", (".gguf",)),)


def reader_of(path: Path) -> Reader | None:
    """None if the format is not read."""
    return next((reader for reader in _readers() if reader.matches(path)), None)


def names_file(base: str) -> bool:
    """Whether a name of a base is the name of a file that a reader reads."""
    return any(base.lower().endswith(reader.suffixes) for reader in _readers())


def _readers() -> Iterator[Reader]:
    """The readers here and of installed packages; a faulty package is logged."""
    yield from READERS
    for plugin, *_ in pkgutil.resolve_name(Table.installed)("readers").values():
        try:
            yield plugin.facts(Reader)
        except PackError as error:
            if error.message not in _logged:
                _log.warning("%s", error.message)
                _logged.add(error.message)
