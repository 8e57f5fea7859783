"""Transformer blocks that read their frozen weights from files whenever they are computed.

Between calls the arrays of such a block are hollow: NaN of their shape and dtype, in a few bytes.
A call fills them with lazy reads, builds the graph of the block and empties them again. MLX reads
when it computes, ahead of the block before, and frees the weights after their last use. With
activation checkpointing by blocks (nn/recompute.py) the backward pass calls a block again, which
reads again. So about two blocks of weights are in memory at a time.
"""

import functools
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import mlx.nn as nn

from ..display import size
from ..errors import BaseChanged, ReadFailed
from ..nn.surgery import block_prefixes
from ..reading import read_header
from ..runtime import mx
from ..terminal import short
from .disk import disk_rate

_OPEN_FILES = 4096  # each read of a block holds one until it is computed; macOS allows 256

_PUT_BACK = "Put the former file back."

# what tells two states of a file apart: size, time of change in ns, inode
FileState = tuple[int, int, int]


@dataclass(frozen=True)
class StoredBlock:
    """Where the frozen arrays of a block are stored.

    Attributes:
        arrays: The arrays of the model by their names in a file, by file.
        states: The state of each file when the base was loaded.
    """

    arrays: Mapping[Path, Mapping[str, mx.array]]
    states: Mapping[Path, FileState]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for array in self._all())

    def stored_bytes(self) -> int:
        """Bytes in the files."""
        total = 0
        for file, of_file in self.arrays.items():
            header, _ = read_header(file)
            spans = (header[name]["data_offsets"] for name in of_file)
            total += sum(stop - start for start, stop in spans)
        return total

    def _all(self) -> Iterator[mx.array]:
        for of_file in self.arrays.values():
            yield from of_file.values()

    def fill(self) -> None:
        """Let the arrays be lazy reads; whoever holds one of them sees its weights."""
        for file, of_file in self.arrays.items():
            stored = lazy_read(file, self.states[file])
            for name, array in of_file.items():
                array[...] = stored[name].astype(array.dtype)

    def empty(self) -> None:
        """Let the arrays be hollow."""
        for array in self._all():
            empty(array)


def state_of(file: Path) -> FileState:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def lazy_read(file: Path, expected: FileState) -> dict[str, mx.array]:
    """Return the arrays of a file, which are read when they are computed."""
    with _unchanged(file, expected):
        return mx.load(str(file))


@contextmanager
def open_unchanged(file: Path, expected: FileState) -> Iterator[IO[bytes]]:
    with _unchanged(file, expected), open(file, "rb") as opened:
        yield opened


@contextmanager
def _unchanged(file: Path, expected: FileState) -> Iterator[None]:
    """Raise `BaseChanged` if a file is not what it was, or cannot be read any more."""
    try:
        if state_of(file) != expected:
            raise BaseChanged(f"{file}: changed while the base is in use. {_PUT_BACK}")
        yield
    except (OSError, RuntimeError, ValueError) as error:  # the last of a short read
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise BaseChanged(f"{file}: cannot be read any more ({reason}). Put it back.") from None


def empty(array: mx.array) -> None:
    """Let an array be hollow: of its shape and dtype, in a few bytes.

    Its numbers are NaN, so that no result hides that a hollow weight was used.
    """
    is_floating = mx.issubdtype(array.dtype, mx.floating)
    value = float("nan") if is_floating else mx.iinfo(array.dtype).max
    array[...] = mx.broadcast_to(mx.array(value, array.dtype), array.shape)


class OffloadedBlocks:
    """The blocks of a model, of which the first are on disk and the others in memory.

    Args:
        model: The model.
        stored: Where the weights of each block are, in order.
    """

    def __init__(self, model: nn.Module, stored: Sequence[StoredBlock]) -> None:
        self._prefixes = block_prefixes(model)
        self._stored = list(stored)
        self.on_disk = len(stored)
        self.together = False  # whether all micro-batches of an update pass a block at once
        self.bytes_read = 0  # asked for since the base was loaded
        self._stored_bytes: list[int] = []
        self._filled: set[int] = set()  # numbers of blocks that are not hollow now

        model.blocks_on_disk = self
        _allow_open_files(_OPEN_FILES)
        for number, block in enumerate(model.layers):
            block.__class__ = _reading(type(block))
            block.weights_to_read = functools.partial(self._weights, number)
            for module in block.modules():
                module.is_on_disk = True
            stored[number].empty()
            self._stored_bytes.append(stored[number].stored_bytes())

    def count(self, nbytes: int) -> None:
        """Count bytes that are read beside the blocks."""
        self.bytes_read += nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block."""
        return max(stored.nbytes for stored in self._stored)

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of the largest block in its files."""
        return max(self._stored_bytes)

    def to_json(self, seconds: float) -> dict[str, float | int]:
        """Return what a run of ``seconds`` read, as its report has it."""
        return {
            "blocks": len(self._stored),
            "blocks_on_disk": self.on_disk,
            "read_gb": self.bytes_read / 1e9,
            "read_gb_per_s": self.bytes_read / 1e9 / max(seconds, 1e-9),
            # MLX reads while it computes: the part of the time that was lost is not known
            "waited_share_at_most": min(1.0, self.bytes_read / disk_rate() / max(seconds, 1e-9)),
        }

    def token_line(self) -> str:
        """Return a sentence on what a token reads that is generated."""
        nbytes = sum(self._stored_bytes[: self.on_disk])
        seconds = short(nbytes / disk_rate())
        return f"each token reads {size(nbytes)} of the base from disk, about {seconds} s"

    def keep_in_memory(self, count: int) -> None:
        """Read the last ``count`` blocks, which stay in memory from now on."""
        first = len(self._stored) - count
        for stored in self._stored[first : self.on_disk]:
            stored.fill()
            mx.eval(list(stored._all()))
        self.on_disk = min(self.on_disk, first)

    def check_unchanged(self) -> None:
        """Raise `ReadFailed` if a file changed since blocks may have been read from it.

        A file that is gone was read before, or MLX says that it could not be.
        """
        states = {f: state for block in self._stored for f, state in block.states.items()}
        for file, state in states.items():
            with suppress(OSError):
                if state_of(file) != state:
                    raise ReadFailed(f"{file}: changed during a step, which is lost. {_PUT_BACK}")

    @contextmanager
    def readable(self, path: str | None = None) -> Iterator[None]:
        """Return a context in which weights can be read; those that are stay until it ends.

        ``path`` is of a module in a block, for the weights of that block; None is for all.
        """
        with ExitStack() as emptied:
            for number, prefix in enumerate(self._prefixes[: self.on_disk]):
                if path is None or path.startswith(f"{prefix}."):
                    emptied.enter_context(self._filled_block(number))
            yield

    @contextmanager
    def _weights(self, number: int) -> Iterator[None]:
        """Return a context in which a block is computed, or differentiated."""
        if number < self.on_disk and number not in self._filled:
            self.bytes_read += self._stored_bytes[number]
        with self._filled_block(number):
            yield

    @contextmanager
    def _filled_block(self, number: int) -> Iterator[None]:
        if number >= self.on_disk or number in self._filled:
            yield
            return

        stored = self._stored[number]
        stored.fill()
        self._filled.add(number)
        try:
            yield
        finally:
            self._filled.remove(number)
            stored.empty()


@functools.cache
def _reading(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of blocks that read their weights; names and paths of modules stay."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.weights_to_read():
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def weights_readable(model: nn.Module, path: str | None = None) -> AbstractContextManager[None]:
    """Return a context in which weights of a model can be read, as `OffloadedBlocks.readable`."""
    blocks = getattr(model, "blocks_on_disk", None)
    return nullcontext() if blocks is None else blocks.readable(path)


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to ``count``, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(hard, count)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
