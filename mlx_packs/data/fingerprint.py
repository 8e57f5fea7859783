"""A hash of the content of rows, by which a resumed run knows them again."""

import hashlib
import json
from collections.abc import Iterable

from .formats import Row

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=str)


def canonical_line(row: Row) -> bytes:
    """Return a row as the line of JSON that is hashed, however its file is written."""
    return _CANONICAL.encode(row.value).encode(errors="surrogatepass") + b"\n"


class Fingerprint:
    """A hash of rows in their order, whatever file they are in and however it is written."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, row: Row) -> None:
        """Add a row."""
        self.update(canonical_line(row))

    def update(self, lines: bytes | memoryview) -> None:
        """Add the lines of some rows (`canonical_line`)."""
        self._digest.update(lines)

    def hexdigest(self) -> str:
        """Return the hash of all rows so far."""
        return self._digest.hexdigest()


def fingerprint(rows: Iterable[Row]) -> str:
    """Return the hash of rows."""
    result = Fingerprint()
    for row in rows:
        result.add(row)
    return result.hexdigest()
