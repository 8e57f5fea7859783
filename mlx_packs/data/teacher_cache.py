"""The most likely next tokens of a teacher at every target of some examples, cached in files.

A folder has cache.json, which is written first, and for each split its shards, each with some of
its examples. Of M targets a shard has

    logprobs  float32 [M x K], log-probabilities of the K most likely tokens, in no order
    rest      float32 [M], logarithm of what all other tokens have together
    tokens    uint16 or int32 [M x K], the tokens

and the hash of these arrays and of cache.json. A shard is complete or missing, so that a command
that was interrupted continues with the first that is missing.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..cache import read_arrays, write_arrays
from ..errors import PackError
from ..files import atomic_write, to_json
from ..kinds import check_keys
from ..reading import read_json
from .dataset import Batch
from .encoding import Examples

FACTS = "cache.json"
TEACHER_ARRAYS = ("teacher_logprobs", "teacher_rest", "teacher_tokens")  # of a batch
_FORMAT = 1  # other formats are not read
_SHARD_BYTES = 16 << 20
_KINDS = {
    "format": "an integer above 0",
    "teacher": "text",
    "weights": "text",
    "tokenizer": "text",
    "vocab_size": "an integer above 0",
    "top_k": "an integer above 0",
    "temperature": "a finite number above 0",
    "max_seq_length": "an integer above 0",
    "splits": "a mapping with something in it",
    "splits.*": "a mapping",
    "splits.*.key": "text",
    "splits.*.edges": "a list of integers",
    "splits.*.targets": "an integer above 0",
}


@dataclass(frozen=True)
class CacheFacts:
    """The content of cache.json: all that the log-probabilities depend on."""

    teacher: str  # its name
    weights: str  # hash of its weights
    tokenizer: str  # `tokenizer_key`
    vocab_size: int  # tokens that the teacher has logits of
    top_k: int
    max_seq_length: int
    splits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    temperature: float = 1.0  # no other is read
    format: int = _FORMAT

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def dtypes(self) -> dict[str, type]:
        """The arrays of a shard."""
        tokens = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
        return {"logprobs": np.float32, "rest": np.float32, "tokens": tokens}

    @property
    def target_bytes(self) -> int:
        """Bytes of a target on disk."""
        return target_bytes(self.top_k, self.vocab_size)

    @property
    def targets(self) -> int:
        return sum(split["targets"] for split in self.splits.values())


def target_bytes(top_k: int, vocab_size: int) -> int:
    """Return the bytes that a target takes on disk."""
    of_token = 2 if vocab_size <= 1 << 16 else 4
    return top_k * (4 + of_token) + 4


def split_facts(examples: Examples, top_k: int, vocab_size: int) -> dict[str, Any]:
    """Return the facts of a split: what its tokens are, and where each shard begins and ends."""
    room = max(1, _SHARD_BYTES // target_bytes(top_k, vocab_size))
    shards = np.cumsum(examples.target_counts) // room
    starts = np.flatnonzero(np.diff(shards, prepend=-1))
    return {
        "key": examples_key(examples),
        "edges": [*starts.tolist(), len(examples)],
        "targets": examples.targets,
    }


def examples_key(examples: Examples) -> str:
    """Return a hash of the tokens of examples, of which are targets, and of their order."""
    digest = hashlib.sha256(np.asarray(examples.lengths, np.int64).tobytes())

    for example in examples.items:
        digest.update(np.ascontiguousarray(example.tokens, np.int32).data)
        digest.update(np.ascontiguousarray(example.target, np.bool_).data)

    return digest.hexdigest()


def tokenizer_key(tokenizer: Any) -> str:
    """Return a hash of the tokens of a tokenizer and their numbers."""
    vocabulary = sorted(tokenizer._tokenizer.get_vocab().items(), key=lambda each: each[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


class TeacherCache:
    """A folder of cached log-probabilities."""

    def __init__(self, folder: Path, facts: CacheFacts) -> None:
        self.folder = folder
        self.facts = facts

    @classmethod
    def at(cls, path: str | Path) -> "TeacherCache":
        """Return the cache of a folder by its cache.json; `of` reads the shards."""
        folder = Path(path).expanduser()
        file = folder / FACTS
        if not file.is_file():
            raise PackError(
                f"--teacher-cache {folder}: has no {FACTS}. Pass --teacher MODEL, which writes it.",
                "not-found",
            )

        content = read_json(file)
        try:
            check_keys(content, _KINDS)
            for name, value in (("format", _FORMAT), ("temperature", 1)):
                if content[name] != value:
                    raise ValueError(f"{name} must be {value}, but is {content[name]}")
            facts = CacheFacts(**content)
        except (TypeError, ValueError) as error:
            raise PackError(
                f"{file}: is damaged, or not of a teacher's cache ({error}). Remove it, and "
                "pass --teacher MODEL, which writes it.",
                "unreadable",
                "teacher_cache",
            ) from None
        return cls(folder, facts)

    def create(self) -> None:
        atomic_write(self.folder / FACTS, to_json(asdict(self.facts)))

    def missing(self, split: str) -> list[int]:
        """Return the shards of a split that are not there, or damaged."""
        shards = range(len(self.facts.splits[split]["edges"]) - 1)
        return [shard for shard in shards if self._read(split, shard) is None]

    def write(self, split: str, shard: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a shard atomically; ``arrays`` are as above, of any axes."""
        dtypes = self.facts.dtypes

        flat = {name: np.asarray(arrays[name], dtypes[name]).reshape(-1) for name in dtypes}
        write_arrays(self._file(split, shard), self._key(split, shard), flat)

    def of(self, examples: Examples, vocab_size: int) -> "TeacherTargets":
        """Return what is cached of a split, known by its tokens, for a student's vocabulary."""
        key = examples_key(examples)

        for split, facts in self.facts.splits.items():
            if facts["key"] == key:
                return self._targets(split, examples, vocab_size)

        raise PackError(
            f"--teacher-cache {self.folder}: is of other examples than these. Name another "
            "folder with --teacher MODEL, which writes it, or pass the same --data, columns and "
            f"--max-seq-length (the cache has {self.facts.max_seq_length}).",
            "mismatch",
        )

    def _targets(self, split: str, examples: Examples, vocab_size: int) -> "TeacherTargets":
        edges = self.facts.splits[split]["edges"]
        if edges != sorted({0, *edges}) or edges[-1] != len(examples):
            raise self._damaged(FACTS)

        starts = np.concatenate([[0], np.cumsum(examples.target_counts)])
        shards = []

        for shard in range(len(edges) - 1):
            if (arrays := self._read(split, shard)) is None:
                raise self._damaged(self._file(split, shard).name)
            shards.append(arrays)

        return TeacherTargets(self.facts.top_k, vocab_size, np.array(edges), starts, shards)

    def _damaged(self, name: str) -> PackError:
        return PackError(
            f"--teacher-cache {self.folder}: {name} is missing, cut short or damaged. Pass the "
            "same --teacher MODEL again, which writes the rest.",
            "unreadable",
        )

    def _read(self, split: str, shard: int) -> dict[str, np.ndarray] | None:
        return read_arrays(self._file(split, shard), self._key(split, shard))

    def _file(self, split: str, shard: int) -> Path:
        return self.folder / f"{split}-{shard:05}.npy"

    def _key(self, split: str, shard: int) -> str:
        return f"{self.facts.digest}/{split}/{shard}"


@dataclass(frozen=True)
class TeacherTargets:
    """What is cached of the examples of a split; files are mapped into memory."""

    top_k: int
    vocab_size: int  # of the student; the tokens are below it
    edges: np.ndarray  # [shards + 1], examples that begin and end a shard
    starts: np.ndarray  # [N + 1], targets before each example
    shards: list[dict[str, np.ndarray]]

    def having(self, batch: Batch) -> Batch:
        """Return a batch with `TEACHER_ARRAYS`, of as many targets as it has room for.

        ``teacher_logprobs`` float32 and ``teacher_tokens`` int32 [M, K], ``teacher_rest`` float32
        [M]; zeros where a target is padding. Raises a PackError if the student lacks a token.
        """
        slots = len(batch.inputs["targets"])

        logprobs = np.zeros((slots, self.top_k), np.float32)
        tokens = np.zeros((slots, self.top_k), np.int32)
        rest = np.zeros(slots, np.float32)

        at = 0
        for example in batch.examples:
            shard = int(np.searchsorted(self.edges, example, "right")) - 1
            arrays = self.shards[shard]
            first = self.starts[self.edges[shard]]
            start = self.starts[example] - first
            stop = self.starts[example + 1] - first

            place = slice(at, at + stop - start)
            flat = slice(start * self.top_k, stop * self.top_k)
            logprobs[place] = arrays["logprobs"][flat].reshape(-1, self.top_k)
            tokens[place] = arrays["tokens"][flat].reshape(-1, self.top_k)
            rest[place] = arrays["rest"][start:stop]
            at = place.stop

        if tokens.max(initial=0) >= self.vocab_size or tokens.min(initial=0) < 0:
            raise PackError(
                f"--teacher-cache: has tokens up to {tokens.max()}, but the student's vocabulary "
                f"is {self.vocab_size:,}. Write the cache with a smaller --teacher-top-k.",
                "mismatch",
            )

        return batch.having(teacher_logprobs=logprobs, teacher_rest=rest, teacher_tokens=tokens)


def without_teacher(batch: Batch) -> Batch:
    """Return a batch without `TEACHER_ARRAYS`."""
    inputs = {name: array for name, array in batch.inputs.items() if name not in TEACHER_ARRAYS}
    return replace(batch, inputs=inputs)
