"""Rows of bytes by number: in memory up to a limit, and in a file that other runs can use.

A row of the file counts if its digest fits: what is damaged, half-written or of another run is
ignored.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..errors import PackError
from ..files import exclusive_writer

_DIGEST_BYTES = 16


class StateStore:
    """Rows of known sizes, each stored or not yet. Threads may share it.

    Without ``file`` they live in memory alone. ``key`` is a hash (hex) of all that they depend on.
    ``warn`` is called if writing to the file ends while rows are put; those that are there stay.
    """

    def __init__(
        self,
        row_bytes: np.ndarray,
        memory_limit: int,
        file: Path | None = None,
        key: str = "",
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.memory_limit = memory_limit
        self.memory_bytes = 0  # of the rows in memory now
        self.is_on_disk = False  # whether rows are put into the file
        self.note = ""  # why they are not

        self._warn = warn
        self._in_memory: dict[int, np.ndarray] = {}
        self._sizes = row_bytes.astype(np.int64)
        self._ends = len(row_bytes) * _DIGEST_BYTES + np.cumsum(self._sizes)
        self._key = bytes.fromhex(key)

        self._lock = threading.RLock()
        self._open = ExitStack()
        self._file: int | None = None
        self._digests = np.zeros((len(row_bytes), _DIGEST_BYTES), np.uint8)
        self._verified = np.zeros(len(row_bytes), bool)

        if file is not None:
            self._open_file(file)

    @property
    def total_bytes(self) -> int:
        return int(self._sizes.sum())

    @property
    def most_memory_bytes(self) -> int:
        """Bytes in memory once all rows are put, about."""
        return min(self.total_bytes, self.memory_limit)

    def stored(self) -> np.ndarray:
        """Return the numbers of the rows that the file claims; `get` checks them."""
        return np.flatnonzero(self._digests.any(axis=1))

    def get(self, row: int) -> np.ndarray | None:
        """Return a row's bytes, uint8; None if it is not stored."""
        with self._lock:
            if row in self._in_memory:
                return self._in_memory[row]
            if self._file is None or not self._digests[row].any():
                return None

            data = self._read(row)
            if data is None:
                self._digests[row] = 0
            else:
                self._remember(row, data)
            return data

    def put(self, row: int, data: np.ndarray) -> None:
        """Store a row's bytes, uint8 and contiguous, as far as there is room."""
        with self._lock:
            self._remember(row, data)
            if not self.is_on_disk:
                return
            digest = self._digest(row, data)
            try:
                self._write(data, self._ends[row] - self._sizes[row])
                self._write(digest, row * _DIGEST_BYTES)
            except OSError as error:  # a full disk must not stop a run
                self._stop_writing(error)
                return

            self._digests[row] = digest
            self._verified[row] = True

    def has_room(self, rows: Sequence[int]) -> bool:
        """Return whether these rows would be stored if they were put now."""
        needed = int(self._sizes[list(rows)].sum())
        return self.is_on_disk or self.memory_bytes + needed <= self.memory_limit

    def forget(self) -> None:
        with self._lock:
            self._in_memory.clear()
            self.memory_bytes = 0
            self._digests[:] = 0
            self._verified[:] = False
            if self.is_on_disk:
                try:
                    self._write(self._digests.reshape(-1), 0)
                except OSError as error:
                    self._stop_writing(error)

    def close(self) -> None:
        with self._lock:
            self._close_file()
            self._in_memory.clear()

    def _remember(self, row: int, data: np.ndarray) -> None:
        if row not in self._in_memory and self.memory_bytes + data.nbytes <= self.memory_limit:
            self._in_memory[row] = data.copy()  # of its own: it may be part of a batch
            self.memory_bytes += data.nbytes

    def _stop_writing(self, error: OSError) -> None:
        self.note = f"no longer kept on disk ({error.strerror or error})"
        self.is_on_disk = False
        self._warn(self.note)

    def _open_file(self, file: Path) -> None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows may be private
            self._open.enter_context(exclusive_writer(file))
            self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)

            size = int(self._ends[-1])
            if os.fstat(self._file).st_size != size:
                os.ftruncate(self._file, 0)
                os.ftruncate(self._file, size)
            os.utime(file)
            os.preadv(self._file, [self._digests], 0)

            self.is_on_disk = True
        except PackError:
            self.note = "not kept on disk (another run uses it, or the folder is read-only)"
        except OSError as error:
            self.note = f"not kept on disk ({error.strerror or error})"

        if not self.is_on_disk:
            self._digests[:] = 0
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._open.close()

    def _digest(self, row: int, data: np.ndarray) -> np.ndarray:
        salt = row.to_bytes(8, "little")
        digest = hashlib.blake2b(data.data, digest_size=_DIGEST_BYTES, key=self._key, salt=salt)
        return np.frombuffer(digest.digest(), np.uint8)

    def _read(self, row: int) -> np.ndarray | None:
        data = np.empty(self._sizes[row], np.uint8)
        at = 0
        start = int(self._ends[row] - self._sizes[row])

        try:
            while at < len(data):
                count = os.preadv(self._file, [data[at:]], start + at)
                if not count:
                    return None
                at += count
        except OSError:
            return None

        if not self._verified[row]:
            if not np.array_equal(self._digest(row, data), self._digests[row]):
                return None
            self._verified[row] = True
        return data

    def _write(self, data: np.ndarray, start: int) -> None:
        at = 0
        while at < len(data):
            at += os.pwrite(self._file, data[at:].data, int(start) + at)
