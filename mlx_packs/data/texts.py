"""Examples of one text or several, such as a pair, or a query with each document."""

import hashlib
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import runtime
from ..bases.tokenizer import padded
from ..config.data import DataConfig
from .dataset import Batch, Dataset, ExampleSet, by_length, edges_of
from .encoding import Examples
from .formats import Row, RowFormat, check_format, first_format
from .row_format import BadRows
from .sampler import Sampler
from .shapes import Shape, doubled_widths, joined_shapes, padded_length
from .sources import as_rows, canonical_line
from .token_store import JoinedExamples, StoredExamples, TokenStore

_TEXTS_AT_A_TIME = 1024
NAMES = DataConfig()  # such rows have column names of their own

# Tokens int32 [L] of each text, and whether it was cut.
Encoding = Callable[[Sequence[str]], Iterable[tuple[np.ndarray, bool]]]
# The texts of an example, and what is known of it: a number for each text, a single one, or none.
Group = tuple[Sequence[str], Sequence[float]]


@dataclass
class TextGroups(ExampleSet):
    """The examples of a split: groups of texts, whose tokens are stored."""

    format: Any  # of the rows
    stored: Any  # the tokens of each text as `Example`, and their ``lengths``
    groups: np.ndarray  # int64 [N, C], the texts of each example; -1 if it has fewer than C
    labels: np.ndarray | None  # [N, ...] of examples, or float32 [N, C] of texts (-1: no text)
    cut: int  # texts that were too long
    bad: BadRows = field(default_factory=BadRows)  # rows that were left out
    where: Callable[[int], str] = str  # the row of an example, as messages name it
    fingerprint: str | None = None  # of the rows in use
    dropped: int = 0  # rows that were too long and cannot be cut

    @classmethod
    def of_examples(
        cls, row_format: RowFormat, examples: Examples, texts: StoredExamples, labels: np.ndarray
    ) -> "TextGroups":
        """Return encoded rows, of which ``texts`` are read: as many of each row, in their order."""
        groups = np.arange(len(texts)).reshape(len(labels), -1)
        return cls(
            row_format,
            texts,
            groups,
            labels,
            examples.cut,
            examples.bad,
            lambda example: texts[int(groups[example, 0])].where,
            examples.fingerprint,
            examples.dropped,
        )

    @classmethod
    def joined(cls, parts: "Sequence[TextGroups]") -> "TextGroups":
        """Return the examples of several phases, of as many texts each, phase after phase."""
        if len(parts) == 1:
            return parts[0]

        edges = np.cumsum([0, *map(len, parts)])
        starts = np.cumsum([0, *(len(part.stored) for part in parts)])

        def where(example: int) -> str:
            part = int(np.searchsorted(edges, example, "right")) - 1
            return parts[part].where(example - int(edges[part]))

        return replace(
            parts[0],
            stored=JoinedExamples([part.stored for part in parts]),
            groups=np.concatenate([part.groups + starts[i] for i, part in enumerate(parts)]),
            labels=np.concatenate([part.labels for part in parts]),
            where=where,
        )

    def __len__(self) -> int:
        return len(self.groups)

    def tokens(self, i: int) -> list[np.ndarray]:
        """Return the tokens of each text of an example, int32 [L]."""
        return [self.stored[text].tokens for text in self.groups[i].tolist() if text >= 0]

    def select(self, chosen: np.ndarray) -> "TextGroups":
        return replace(
            self,
            groups=self.groups[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            where=lambda i: self.where(int(chosen[i])),
        )

    def distinct(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the tokens of every text once, and which of them examples have, [N, C] or -1."""
        numbers = np.unique(self.groups[self.groups >= 0])
        places = np.searchsorted(numbers, self.groups)
        tokens = [self.stored[text].tokens for text in numbers.tolist()]
        return tokens, np.where(self.groups < 0, -1, places)

    @property
    def sizes(self) -> np.ndarray:
        """Texts of each example, [N]."""
        return (self.groups >= 0).sum(axis=1)

    @property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each text, [N, C]; 0 where there is none."""
        return np.where(self.groups < 0, 0, self.stored.lengths[self.groups])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longest text of each example, [N]."""
        return self.text_lengths.max(axis=1)


def encode_groups(
    rows: Sequence[Row],
    formats: Sequence[RowFormat],
    on_bad_row: str,
    groups_of: Callable[[Row, Any], Sequence[Group]],
    encoding: Encoding,
) -> TextGroups:
    """Return the examples of a split, which ``groups_of`` makes of each row and its format.

    A row that cannot be used is a RowError, unless ``on_bad_row`` leaves such rows out.
    """
    first, row_format = first_format(rows, replace(NAMES, on_bad_row=on_bad_row), formats)
    where = as_rows(rows).where
    bad = BadRows(on_bad_row == "stop")
    fingerprint = hashlib.sha256()
    texts = _TextStore(encoding)
    used = array("q")
    sizes = array("q")
    numbers = array("q")
    labels = array("f")

    def read(row: Row) -> Sequence[Group]:
        check_format(row, row_format, first.where, NAMES, formats)
        return groups_of(row, row_format)

    for i, row, groups in bad.usable(rows, read):
        fingerprint.update(canonical_line(row))
        for group, known in groups:
            used.append(i)
            sizes.append(len(group))
            numbers.extend(map(texts.number, group))
            labels.extend(known)

    stored, is_cut = texts.stored()
    by_example = _by_example(np.array(numbers), sizes)
    known = np.array(labels, np.float32)
    if len(known) == len(numbers):
        known = _by_example(known, sizes)
    return TextGroups(
        row_format,
        stored,
        by_example,
        known if len(known) else None,
        int(is_cut[np.array(numbers)].sum()),
        bad,
        lambda example: where(used[example]),
        fingerprint.hexdigest(),
    )


def _by_example(values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the values of N examples, one after the other, as [N, C]; -1 where there is none."""
    sizes = np.array(sizes)
    result = np.full((len(sizes), sizes.max()), -1, values.dtype)
    result[np.arange(sizes.max()) < sizes[:, None]] = values
    return result


class _TextStore:
    """Different texts, tokenized some at a time; a text of several examples is stored once."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._numbers: dict[bytes, int] = {}  # by hash: the texts themselves are not stored
        self._waiting: list[str] = []
        self._store = TokenStore()
        self._is_cut = array("b")

    def number(self, text: str) -> int:
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        number = self._numbers.setdefault(key, len(self._numbers))

        if number == len(self._store) + len(self._waiting):
            self._waiting.append(text)
            if len(self._waiting) == _TEXTS_AT_A_TIME:
                self._encode()

        return number

    def stored(self) -> tuple[StoredExamples, np.ndarray]:
        """Return the tokens of each text, and whether it was cut, bool [texts]."""
        self._encode()
        return self._store.examples(str), np.array(self._is_cut, bool)

    def _encode(self) -> None:
        for tokens, is_cut in self._encoding(self._waiting):
            self._is_cut.append(is_cut)
            self._store.add(len(self._store), tokens, np.zeros(0, bool))
        self._waiting = []


@dataclass(frozen=True)
class TextCollate:
    """Lays out B examples of C texts, which are padded alike; missing texts have one token.

    ``tokens`` int32 [B, C, T], ``lengths`` int32 [B, C], ``labels`` [B, ...] as of `TextGroups`,
    and ``weights`` float32 [B], 0 where there is no example.
    """

    batch_size: int  # examples
    limit: int  # most tokens of a text
    widths: Sequence[int] = ()  # T of batches, rising, where each costs a compilation; () is any
    counts_tokens: bool = False  # whether tokens are counted as what is trained on, not examples

    def width(self, longest: int) -> int:
        for width in self.widths:
            if width >= longest:
                return width
        return min(padded_length(longest, self.limit), self.limit)

    def __call__(self, texts: TextGroups, order: Sequence[int]) -> Batch:
        of_examples = [texts.tokens(example) for example in order]
        shape = self.batch_size, max(map(len, of_examples))
        laid_out = [np.zeros(1, np.int32)] * math.prod(shape)
        for row, tokens in enumerate(of_examples):
            start = row * shape[1]
            laid_out[start : start + len(tokens)] = tokens

        lengths = np.array([len(tokens) for tokens in laid_out], np.int32)
        tokens = padded(laid_out, self.width(int(lengths.max())))
        labels = texts.labels[list(order)]
        if labels.shape[1:] == texts.groups.shape[1:]:
            labels = labels[:, : shape[1]]
        inputs = {
            "tokens": tokens.reshape(*shape, -1),
            "lengths": lengths.reshape(shape),
            "labels": self.rows(labels),
        }
        return self.batch(inputs, texts, order)

    def rows(self, values: np.ndarray) -> np.ndarray:
        """Return values of examples [n, ...] as of B, with zeros where there is none."""
        missing = self.batch_size - len(values)
        return np.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)])

    def batch(
        self, inputs: dict[str, np.ndarray], texts: TextGroups, order: Sequence[int]
    ) -> Batch:
        """Return arrays, whose first axis is the example, as a batch."""
        weights = self.rows(np.ones(len(order), np.float32))
        examples = tuple(int(i) for i in order)
        return self._counted(Batch({**inputs, "weights": weights}, 0, 0, examples, texts))

    def _counted(self, batch: Batch) -> Batch:
        count = len(batch.examples)
        if not self.counts_tokens:
            return replace(batch, targets=count, denominator=count)
        tokens = int(batch.inputs["lengths"][:count].sum())
        return replace(batch, targets=tokens, denominator=count, computed=tokens)

    def shapes(self, texts: TextGroups, orders: Iterator[Sequence[int]]) -> set[Shape]:
        """A shape is the tokens of the longest text, and the texts of a batch."""
        lengths = texts.lengths
        count = self.batch_size * texts.groups.shape[1]
        return {(self.width(int(lengths[list(order)].max())), count) for order in orders}

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        pieces = []
        for start, stop in edges_of(len(batch.inputs["lengths"]), parts):
            inputs = {name: values[start:stop] for name, values in batch.inputs.items()}
            piece = replace(batch, inputs=inputs, examples=batch.examples[start:stop])
            pieces.append(self._counted(piece))
        return pieces


def doubling_widths(limit: int) -> tuple[int, ...]:
    """Return 32, 64, 128, ... and ``limit`` if steps are compiled; any width else."""
    if not runtime.COMPILES:
        return ()
    return doubled_widths(limit)


def joined_widths(texts: TextGroups, sampler: Sampler) -> tuple[int, ...]:
    """Return the few widths that pad the first batches least if steps are compiled; else any."""
    if not runtime.COMPILES:
        return ()

    collate = TextCollate(sampler.batch_size, sampler.inputs)
    lengths = texts.lengths
    count = sampler.batch_size * texts.groups.shape[1]
    orders = itertools.islice(sampler.batches(), len(sampler.epoch(0)))
    longest = (int(lengths[list(order)].max()) for order in orders)
    shapes = ((collate.width(tokens), count) for tokens in longest)
    few = joined_shapes(shapes, (collate.width(int(lengths.max())), count), count)
    return tuple(sorted(width for width, _ in few))


def texts_once(texts: TextGroups, collate: TextCollate, chosen: np.ndarray) -> Dataset:
    """Return the chosen examples once, by length."""
    return Dataset(texts, collate, by_length(texts.lengths, collate.batch_size, chosen))
