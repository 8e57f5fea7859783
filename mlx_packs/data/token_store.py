"""Encoded examples, one after the other in two arrays; large ones are files mapped into memory."""

import copy
import io
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bases.tokenizer import readable_text
from ..cache import Cache, blocks, release
from ..errors import PackError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


TOKENS = Cache("tokens", days=30)
_IN_MEMORY = 4 << 20  # bytes that are no file yet
# After so many reads the pages of mapped arrays are released: each may load 64 KiB or more.
_READS = 512


@dataclass(frozen=True)
class Example:
    """Tokens of one row, or of a piece of it, and which of them are targets."""

    tokens: np.ndarray  # int32 [L]
    target: np.ndarray  # bool [L], True where the token is to be predicted
    where: str  # the row that messages name


class StoredExamples(Sequence):
    """Examples that are built on access from the arrays of a split.

    Args:
        parts: ``ends`` int64 [N], where each of N examples ends; ``rows`` int64 [N], the row that
            it is from; ``target_counts`` int32 [N]; and with one value for each token of all
            examples ``tokens`` int32 and ``target`` bool, True where the token is to be predicted.
        where: Returns the place of a row, for messages.
    """

    def __init__(self, parts: Mapping[str, np.ndarray], where: Callable[[int], str]) -> None:
        self.parts = parts
        self._where = where
        self._tokens = np.asarray(parts["tokens"])
        self._target = np.asarray(parts["target"])
        self._ends = np.asarray(parts["ends"])
        self._starts = np.concatenate([[0], self._ends])[:-1]
        self._rows = parts["rows"]
        self.target_counts = parts["target_counts"]  # supervised tokens of each, int32 [N]
        self._reads = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Example:
        i = range(len(self))[i]
        self._reads += 1

        if self._reads % _READS == 0:
            release(self._tokens)
            release(self._target)

        here = slice(self._starts[i], self._ends[i])
        return Example(self._tokens[here], self._target[here], self._where(int(self._rows[i])))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64 [N]."""
        return self._ends - self._starts

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each example before its first target, int64 [N]."""
        hits = np.flatnonzero(self._target)
        return hits[np.searchsorted(hits, self._starts)] - self._starts

    def select(self, numbers: np.ndarray, lengths: np.ndarray | None = None) -> "StoredExamples":
        """Return some examples, or the first ``lengths`` tokens of each."""
        chosen = copy.copy(self)
        chosen._starts = self._starts[numbers]
        chosen._ends = self._ends[numbers]
        if lengths is not None:
            chosen._ends = chosen._starts + lengths
        chosen._rows = self._rows[numbers]
        chosen.target_counts = self.target_counts[numbers]
        return chosen


class JoinedExamples(Sequence):
    """Several sequences of examples as one, without a copy."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.edges = np.cumsum([0, *map(len, parts)])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example of parts that know them, [N]."""
        return np.concatenate([part.lengths for part in self.parts])

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, i: int) -> Example:
        i = range(len(self))[i]
        part = int(np.searchsorted(self.edges, i, "right")) - 1
        return self.parts[part][i - int(self.edges[part])]


class TokenStore:
    """Collects examples; more than a few MB of them go to files without a name."""

    def __init__(self) -> None:
        self._tokens = ByteFile()
        self._target = ByteFile()
        self._ends = array("q")
        self._rows = array("q")
        self._counts = array("i")
        self._end = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, tokens: np.ndarray, target: np.ndarray) -> None:
        """``tokens`` are int32 [L], ``target`` bool [L]."""
        self._tokens.write(tokens)
        self._target.write(target)
        self._end += len(tokens)
        self._ends.append(self._end)
        self._rows.append(row)
        self._counts.append(np.count_nonzero(target))

    def extend(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, file in (("tokens", self._tokens), ("target", self._target)):
            for block in blocks(arrays[name]):
                file.write(block)

        self._ends.frombytes((arrays["ends"] + self._end).tobytes())
        self._rows.frombytes(arrays["rows"].tobytes())
        self._counts.frombytes(arrays["target_counts"].tobytes())
        self._end += len(arrays["tokens"])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of `StoredExamples`."""
        return {
            "ends": np.frombuffer(self._ends, np.int64),
            "rows": np.frombuffer(self._rows, np.int64),
            "tokens": self._tokens.mapped(np.int32),
            "target_counts": np.frombuffer(self._counts, np.int32),
            "target": self._target.mapped(np.bool_),
        }

    def examples(self, where: Callable[[int], str]) -> StoredExamples:
        return StoredExamples(self.arrays(), where)


class ByteFile:
    """Bytes that are appended: in memory while they are few, then in a file without a name."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._in_memory = True

    def write(self, data: np.ndarray) -> None:
        try:
            if self._in_memory and self._file.tell() + data.nbytes > _IN_MEMORY:
                begun = self._file
                self._file = tempfile.TemporaryFile(dir=_token_folder())
                self._in_memory = False
                self._file.write(begun.getbuffer())
            self._file.write(data)
        except OSError as error:
            raise _no_room(error) from None

    def mapped(self, dtype: type) -> np.ndarray:
        """Return the bytes as an array, mapped if they are in a file."""
        if self._in_memory:
            data = self._file.getvalue()
            return np.frombuffer(data, dtype) if data else np.empty(0, dtype)

        try:
            self._file.flush()
        except OSError as error:
            raise _no_room(error) from None
        return np.memmap(self._file, dtype, "r")  # the mapping outlives the file's handle


def _token_folder() -> Path | None:
    """None is the system's temporary folder."""
    with suppress(OSError):
        return TOKENS.make()
    return None


def _no_room(error: OSError) -> PackError:
    folder = _token_folder() or tempfile.gettempdir()
    return PackError(
        f"{folder}: the tokens of the examples cannot be written ({error.strerror}). Make room, or "
        "set MLX_PACKS_CACHE to a folder on another disk.",
        "unwritable",
    )


def masked(example: Example, tokenizer: "TokenizerWrapper") -> dict:
    """Split an example into spans of text that are targets or not.

    The result has ``where`` (its row), ``learned`` and ``total`` (numbers of tokens), and
    ``spans``, each with ``text`` and ``learned``.
    """
    target = example.target
    total = len(example.tokens)
    edges = [0, *(i for i in range(1, total) if target[i] != target[i - 1]), total]

    spans = [
        {
            "text": readable_text(tokenizer, example.tokens[start:end].tolist()),
            "learned": bool(target[start]),
        }
        for start, end in zip(edges, edges[1:], strict=False)
    ]

    return {"where": example.where, "learned": int(target.sum()), "total": total, "spans": spans}
