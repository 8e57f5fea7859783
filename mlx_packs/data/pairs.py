"""Rows of sentence pairs as tokens, and their batches; the columns are sentence-transformers'."""

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..bases.tokenizer import padded, tokens_of
from ..config.choices import LOSSES
from ..config.data import DataConfig
from ..config.schema import TrainConfig
from ..errors import PackError, flag_of
from .bad_rows import BadRows
from .batches import TextCollate
from .dataset import Array, Batch, ExampleSet, Shape
from .formats import Row, check_format, first_format
from .pair_formats import MOST_NEGATIVES, PAIR_FORMATS, PairFormat
from .sampler import Sampler
from .shapes import PairShape
from .sources import as_rows, canonical_line
from .token_store import StoredExamples, TokenStore

_TEXTS_AT_A_TIME = 1024
# Arrays of a batch, one for each text of an example.
COLUMNS = ("first", "second", "third", *(f"text_{i}" for i in range(4, MOST_NEGATIVES + 3)))
_COLUMNS = DataConfig()  # pairs have the names of sentence-transformers


@dataclass
class Pairs(ExampleSet):
    format: PairFormat
    stored: StoredExamples  # the tokens of each text; equal texts are one
    texts: np.ndarray  # int64 [N, C], which of them each column of a pair is
    scores: np.ndarray | None  # float32 [N]
    cut: int  # texts that were too long
    bad: BadRows = field(default_factory=BadRows)  # rows that were left out
    where: Callable[[int], str] = str  # the row of a pair, as messages name it
    fingerprint: str | None = None  # of the rows in use

    def __len__(self) -> int:
        return len(self.texts)

    def tokens(self, i: int, column: int) -> np.ndarray:
        """Return the tokens of one text of a pair, int32 [L]."""
        return self.stored[int(self.texts[i, column])].tokens

    def select(self, chosen: np.ndarray) -> "Pairs":
        scores = self.scores
        if scores is not None:
            scores = scores[chosen]

        return replace(
            self,
            texts=self.texts[chosen],
            scores=scores,
            where=lambda i: self.where(int(chosen[i])),
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longest text of each pair, [N]."""
        return self.column_lengths.max(axis=0)

    @property
    def column_lengths(self) -> np.ndarray:
        """Tokens of each text, [C, N]."""
        return self.stored.lengths[self.texts].T


def encode_pairs(
    rows: Sequence[Row],
    tokenizer: Any,
    limit: int,
    on_bad_row: str = "stop",
    query_prompt: str = "",
) -> Pairs:
    """Return the pairs of a split, each text cut to ``limit`` tokens.

    ``query_prompt`` is put before every anchor; rows without anchors must have none.
    """
    first, row_format = first_format(rows, replace(_COLUMNS, on_bad_row=on_bad_row), PAIR_FORMATS)
    if query_prompt and not row_format.has_anchors:
        raise PackError(
            f"--query-prompt: goes before anchors, but {first.where} has {row_format.name}, "
            "which are alike. Leave it out, and write a prompt into their texts.",
            "conflict",
        )

    where = as_rows(rows).where
    bad = BadRows(on_bad_row == "stop")
    fingerprint = hashlib.sha256()
    texts = _Texts(tokenizer, limit)
    used = array("q")
    numbers = array("q")
    widths = array("q")  # texts of each pair
    scores = array("f")

    def read(row: Row) -> list:
        check_format(row, row_format, first.where, _COLUMNS, PAIR_FORMATS)
        return list(row_format.usable(row))

    for i, row, pairs in bad.usable(rows, read):
        fingerprint.update(canonical_line(row))
        for (anchor, *others), score in pairs:
            if score is not None:
                scores.append(score)
            used.append(i)
            widths.append(1 + len(others))
            numbers.extend(map(texts.number, (query_prompt + anchor, *others)))

    by_pair = _of_equal_width(np.array(numbers), np.array(widths))
    stored, is_cut = texts.stored()
    return Pairs(
        row_format,
        stored,
        by_pair,
        np.array(scores, np.float32) if scores else None,
        int(is_cut[by_pair].sum()),
        bad,
        lambda pair: where(used[pair]),
        fingerprint.hexdigest(),
    )


def _of_equal_width(numbers: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return int [N, C] of pairs with ``widths`` texts; a pair repeats its negatives up to C."""
    columns = np.arange(widths.max())
    repeated = 2 + (columns - 2) % np.maximum(1, widths - 2)[:, None]
    starts = np.cumsum(widths) - widths
    return numbers[starts[:, None] + np.where(columns < widths[:, None], columns, repeated)]


class _Texts:
    """Different texts, tokenized some at a time; a text of several pairs is stored once."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._numbers: dict[bytes, int] = {}  # by hash: the texts themselves are not kept
        self._waiting: list[str] = []
        self._store = TokenStore()
        self._is_cut = array("b")

    def number(self, text: str) -> int:
        """Equal texts have the same number."""
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
        texts = self._waiting
        self._waiting = []
        # one more token shows what is cut
        encoded = tokens_of(self._tokenizer, texts, self._limit + 1)

        for text, tokens in zip(texts, encoded, strict=True):
            is_cut = len(tokens) > self._limit
            if is_cut:
                (tokens,) = tokens_of(self._tokenizer, [text], self._limit)
            self._is_cut.append(is_cut)
            self._store.add(len(self._store), tokens, np.zeros(0, bool))


def choose_loss(requested: str, pairs: Pairs, where: str) -> str:
    """``auto`` selects the first loss of the format; another one must suit it."""
    possible = pairs.format.losses
    loss = possible[0] if requested == "auto" else requested

    if loss not in possible:
        fitting = min(
            (each for each in PAIR_FORMATS if loss in each.losses),
            key=lambda each: len(each.text_columns),
        )
        raise PackError(
            f"--loss {loss}: needs {{{', '.join(fitting.columns(_COLUMNS))}}}, but {where} "
            f"has {pairs.format.name}. Use --loss {' or '.join(possible)}.",
            "conflict",
        )

    if LOSSES[loss].scores_are_cosines and np.abs(pairs.scores).max() > 1:
        worst = float(pairs.scores[np.abs(pairs.scores).argmax()])
        others = [name for name in possible if not LOSSES[name].scores_are_cosines]
        raise PackError(
            f"{where}: a score is {worst:g}, but a cosine is in -1 to 1. Divide the "
            f"scores by the largest, or use --loss {' or '.join(others)}.",
            "data",
            "loss",
        )

    return loss


def check_loss_settings(loss: str, train: TrainConfig) -> None:
    """Raise a PackError if a setting of another loss is changed."""
    for name in train.changed(vars(train)):
        losses = [each for each, facts in LOSSES.items() if name in facts.settings]
        if losses and loss not in losses:
            raise PackError(
                f"{flag_of(name)}: applies to --loss {' or '.join(losses)}, but this run's "
                f"is {loss}. Leave it out, or set that loss.",
                "conflict",
            )


class PairCollate(TextCollate):
    """Lays out B pairs; what is missing to B is pairs of one token and weight 0.

    The arrays are one for each column, int32 [B, T], T by column; ``lengths`` int32 [C, B],
    ``weights`` float32 [B], and ``scores`` float32 [B] of scored pairs.
    """

    row_array = "weights"

    def __call__(self, pairs: Pairs, order: Sequence[int]) -> Batch:
        missing = self.batch_size - len(order)
        inputs = {}
        lengths = []

        for column in range(pairs.texts.shape[1]):
            texts = [pairs.tokens(i, column) for i in order]
            texts += [texts[0][:1]] * missing
            inputs[COLUMNS[column]] = padded(texts, self.width(max(map(len, texts))))
            lengths.append([len(text) for text in texts])

        inputs["lengths"] = np.array(lengths, np.int32)
        inputs["weights"] = (np.arange(self.batch_size) < len(order)).astype(np.float32)
        if pairs.scores is not None:
            inputs["scores"] = np.pad(pairs.scores[list(order)], (0, missing))
        count = len(order)
        return Batch(inputs, count, count, tuple(int(i) for i in order), pairs)

    def shapes(self, pairs: Pairs, orders: Iterator[Sequence[int]]) -> set[Shape]:
        """Return the widths of columns; of those with the same widest column, the widest batch."""
        lengths = pairs.column_lengths
        largest: dict[int, PairShape] = {}
        for order in orders:
            longest = lengths[:, list(order)].max(axis=1)
            shape = PairShape.of(self.width(int(tokens)) for tokens in longest)
            before = largest.get(shape.inputs, shape)
            largest[shape.inputs] = max(before, shape, key=lambda each: sum(each.widths))
        return set(largest.values())

    def piece(self, inputs: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
        piece = {name: values[start:stop] for name, values in inputs.items()}
        return {**piece, "lengths": inputs["lengths"][:, start:stop]}


@dataclass(frozen=True)
class PairSampler(Sampler):
    """A sampler of pairs; with ``texts`` no text occurs twice in a batch, in any column.

    The other pairs of a batch are then negatives. A pair that finds no place waits for a later
    batch. A batch of one is left out of the epoch, unless a pair has its own negative.
    """

    texts: np.ndarray | None = None  # int [N, C], equal where two texts are
    has_negatives: bool = False  # whether every pair has a negative of its own

    @classmethod
    def of(
        cls, pairs: Pairs, batch_size: int, inputs: int, seed: int, distinct: bool
    ) -> "PairSampler":
        texts = pairs.texts if distinct else None
        negatives = pairs.format.has_negatives
        return cls(pairs.lengths, batch_size, inputs, seed, texts=texts, has_negatives=negatives)

    def _cursor(self, start: int) -> tuple[int, int]:
        """With ``texts`` the number of batches is only known once an epoch is made."""
        if self.texts is not None:
            return 0, start
        return super()._cursor(start)

    def epoch(self, number: int) -> Sequence[np.ndarray]:
        order = super().epoch(number)
        if self.texts is None:
            return order

        texts = self.texts.tolist()
        batches: list[np.ndarray] = []
        waiting = deque(int(i) for indices in order for i in indices)

        while waiting:
            batch: list[int] = []
            seen: set[int] = set()
            later: list[int] = []

            while waiting and len(batch) < self.batch_size:
                pair = waiting.popleft()
                if seen.isdisjoint(texts[pair]):
                    batch.append(pair)
                    seen.update(texts[pair])
                else:
                    later.append(pair)

            waiting.extendleft(reversed(later))
            if len(batch) > 1 or self.has_negatives:
                batches.append(np.array(batch))

        return batches
