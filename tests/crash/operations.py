"""Kill this process at one of its file operations, which are counted as they come."""

import builtins
import fcntl
import io
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

MOMENTS = ("before", "after", "torn")  # of an operation; torn: half of what it writes is there
_IN_OS = "rename replace unlink remove rmdir mkdir fsync truncate ftruncate pwrite utime".split()


class Operations:
    """The kinds of the operations so far; at number ``at``, from 1, the process ends by SIGKILL."""

    def __init__(self, at: int = 0, moment: str = "before"):
        self.at, self.moment = at, moment
        self.kinds: list[str] = []
        self._lock = threading.Lock()

    def watch(self) -> "Operations":
        """Put a watch in the place of every function that changes files."""
        from mlx_packs import filesystem
        from mlx_packs.runtime import mx

        for name in _IN_OS:
            self._replace(os, name)
        self._replace(filesystem, "exchange")
        self._replace(fcntl, "flock")
        self._replace(shutil, "copyfile", _copy_half)
        self._replace(mx, "save_safetensors", _save_half)
        self._replace(pathlib.Path, "write_text", _write_half)
        self._replace(os, "open", counts=lambda _, flags=0, *__, **___: flags & os.O_CREAT)
        opened = self._watched("open", io.open, None, _opens_for_writing)
        io.open = builtins.open = opened
        return self

    def _replace(self, owner: object, name: str, torn: Callable | None = None, **options) -> None:
        setattr(owner, name, self._watched(name, getattr(owner, name), torn, **options))

    def _watched(
        self,
        kind: str,
        call: Callable,
        torn: Callable | None = None,
        counts: Callable[..., object] = lambda *_, **__: True,
    ) -> Callable:
        def watched(*args, **kwargs):
            if not counts(*args, **kwargs):
                return call(*args, **kwargs)

            with self._lock:
                self.kinds.append(kind)
                is_here = len(self.kinds) == self.at

            if is_here and self.moment == "before":
                _die()
            if is_here and self.moment == "torn" and torn:
                torn(call, *args, **kwargs)
                _die()

            try:
                return call(*args, **kwargs)
            finally:  # an operation that fails counts too
                if is_here:
                    _die()

        return watched


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _opens_for_writing(_: object, mode: str = "r", *__, **___) -> bool:
    return bool(set(mode) & set("wax+"))


def _write_half(call: Callable, path: Path, text: str, *args, **kwargs) -> None:
    call(path, text[: len(text) // 2], *args, **kwargs)


def _save_half(call: Callable, file: str, *args) -> None:
    call(file, *args)
    os.truncate(file, os.path.getsize(file) // 2)


def _copy_half(call: Callable, source: Path, target: Path, **_: object) -> None:
    data = Path(source).read_bytes()
    Path(target).write_bytes(data[: len(data) // 2])
