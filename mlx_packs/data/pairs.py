"""Rows of sentence pairs as tokens, and their batches; the columns are sentence-transformers'.

``{"sentence1", "sentence2", "score"}``, ``{"anchor", "positive"}``, or these with ``"negative"``.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..bases.encoder import padded, tokens_of
from ..errors import PackError
from .batches import padded_length
from .rows import PAIR_COLUMNS, Row, pair_format
from .sampler import Sampler

# What a row must hold for a loss; of several the first is what `auto` takes.
LOSSES_OF = {
    "scored pairs": ("cosine", "cosent"),
    "pairs": ("mnrl", "cached-mnrl"),
    "triplets": ("mnrl", "cached-mnrl", "triplet"),
}
IN_BATCH = ("mnrl", "cached-mnrl")  # the other rows of a batch are negatives
_LOSSES_WITH = {
    "similarity_scale": (*IN_BATCH, "cosent"),
    "mini_batch_size": ("cached-mnrl",),
    "triplet_margin": ("triplet",),
    "triplet_distance": ("triplet",),
}


@dataclass
class Pairs:
    """Tokens of the rows of a split, by column.

    tokens: one list a column.   texts: int64 [N, C], equal where two texts are.
    scores: float32 [N], or None.   cut: how many texts were too long.
    """

    format: str
    tokens: list[list[np.ndarray]]
    texts: np.ndarray
    scores: np.ndarray | None
    cut: int

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> np.ndarray:
        """Of the longest text of each row, [N]."""
        return np.array([[len(text) for text in column] for column in self.tokens]).max(axis=0)


def encode_pairs(rows: Sequence[Row], tokenizer, limit: int) -> Pairs:
    """Tokens of the pairs of a split, each text cut to ``limit``.

    Raises: PackError naming file and line for a row that cannot be used.
    """
    if not rows:
        raise PackError("the split is empty: there are no rows to encode.")
    kind = pair_format(rows[0])
    if kind is None:
        wanted = " or ".join("{" + ", ".join(names) + "}" for names in PAIR_COLUMNS.values())
        raise PackError(
            f"{rows[0].where}: --task embedding learns from {wanted}, but this row has "
            f"{sorted(rows[0].value) or 'nothing'}."
        )
    columns = [name for name in PAIR_COLUMNS[kind] if name != "score"]
    for row in rows:
        if (found := pair_format(row)) != kind:
            raise PackError(
                f"{row.where}: mixed formats: this row is {found or 'no pair'}, but "
                f"{rows[0].where} is {kind}."
            )
        for name in columns:
            _check_text(row, name)
    scores = None
    if kind == "scored pairs":
        scores = np.array([_score(row) for row in rows], dtype=np.float32)
    numbers: dict[str, int] = {}
    texts = np.array(
        [[numbers.setdefault(row.value[name], len(numbers)) for name in columns] for row in rows]
    )
    # a text that stands in several rows is tokenized once; one more token shows what is cut
    unique = tokens_of(tokenizer, list(numbers), limit + 1)
    is_cut = np.array([len(tokens) > limit for tokens in unique])
    if is_cut.any():
        short = tokens_of(tokenizer, list(numbers), limit)
        unique = [few if cut else all for all, few, cut in zip(unique, short, is_cut, strict=True)]
    tokens = [[unique[i] for i in texts[:, c]] for c in range(len(columns))]
    return Pairs(kind, tokens, texts, scores, int(is_cut[texts].sum()))


def _check_text(row: Row, name: str) -> None:
    text = row.value[name]
    if not isinstance(text, str):
        raise PackError(f"{row.where}: '{name}' must be a text, but is {text!r:.60}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PackError(
            f"{row.where}: '{name}' holds half of a surrogate pair (\\ud800 to \\udfff)."
        ) from None


def _score(row: Row) -> float:
    score = row.value["score"]
    number = isinstance(score, (int, float)) and not isinstance(score, bool)
    if not number or not math.isfinite(score):
        raise PackError(f"{row.where}: 'score' must be a number, but is {score!r:.60}.")
    return float(score)


def choose_loss(wanted: str, pairs: Pairs, where: str) -> str:
    """The loss as asked for, or the one that ``auto`` stands for.

    Raises: PackError if the rows have not what it needs.
    """
    possible = LOSSES_OF[pairs.format]
    if wanted != "auto" and wanted not in possible:
        needs = next(kind for kind in LOSSES_OF if wanted in LOSSES_OF[kind])
        raise PackError(
            f"--loss {wanted}: needs {{{', '.join(PAIR_COLUMNS[needs])}}}, but {where} "
            f"holds {pairs.format}; those learn by {', '.join(possible)}."
        )
    chosen = possible[0] if wanted == "auto" else wanted
    if chosen == "cosine" and np.abs(pairs.scores).max() > 1:
        worst = float(pairs.scores[np.abs(pairs.scores).argmax()])
        raise PackError(
            f"{where}: a score is {worst:g}, but a cosine lies in -1 to 1; divide the "
            "scores by the largest, or take --loss cosent."
        )
    return chosen


def check_loss_settings(loss: str, said: Sequence[str]) -> None:
    """Raises: PackError for a setting among those ``said`` that this loss has not."""
    for name, losses in _LOSSES_WITH.items():
        if name in said and loss not in losses:
            raise PackError(
                f"--{name.replace('_', '-')}: is of the loss {' or '.join(losses)}, "
                f"and this run's is {loss}; leave it out, or name that loss by "
                "--loss."
            )


@dataclass(frozen=True)
class PairBatch:
    """A batch of B rows; what is missing to B is rows of one token and weight 0.

    columns: int32 [B, T] each, T by column.   lengths: int32 [C, B].   weights: float32 [B].
    scores: float32 [B] or None.   rows: which rows of the data.   count: how many.
    """

    columns: tuple[np.ndarray, ...]
    lengths: np.ndarray
    weights: np.ndarray
    scores: np.ndarray | None
    rows: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.rows)


def make_pair_batch(
    pairs: Pairs, rows: Sequence[int], batch_size: int, limit: int, powers: bool = False
) -> PairBatch:
    """Lay rows out as a batch; ``powers``: lengths are 32, 64, 128, ..., so that few occur."""
    missing = batch_size - len(rows)
    columns, lengths = [], []
    for column in pairs.tokens:
        chosen = [column[i] for i in rows]
        chosen += [chosen[0][:1]] * missing
        longest = max(map(len, chosen))
        width = 32 << max(0, (longest - 1).bit_length() - 5) if powers else longest
        columns.append(padded(chosen, min(padded_length(width, limit), limit)))
        lengths.append([len(text) for text in chosen])
    weights = np.zeros(batch_size, dtype=np.float32)
    weights[: len(rows)] = 1
    scores = None
    if pairs.scores is not None:
        scores = np.zeros(batch_size, dtype=np.float32)
        scores[: len(rows)] = pairs.scores[list(rows)]
    numbers = tuple(int(i) for i in rows)
    return PairBatch(tuple(columns), np.array(lengths, np.int32), weights, scores, numbers)


@dataclass(frozen=True)
class PairSampler(Sampler):
    """The same of pairs; ``distinct``: no text stands twice in a batch, in whatever column.

    The other rows of a batch are negatives then. A row that finds no place waits for a later batch,
    and what would be alone in one is left out of the epoch, unless a row has its own negative.

    Args:
        texts: int [N, C], equal where two texts are.
        has_negatives: whether every row has a negative of its own.
    """

    texts: np.ndarray | None = None
    has_negatives: bool = False

    @classmethod
    def of(
        cls, pairs: Pairs, batch_size: int, inputs: int, seed: int, distinct: bool
    ) -> "PairSampler":
        """The sampler of some pairs."""
        texts = pairs.texts if distinct else None
        negatives = pairs.format == "triplets"
        return cls(pairs.lengths, batch_size, inputs, seed, texts=texts, has_negatives=negatives)

    def epoch(self, number: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch."""
        order = super().epoch(number)
        if self.texts is None:
            return order
        texts = self.texts.tolist()
        batches: list[np.ndarray] = []
        waiting = deque(int(i) for rows in order for i in rows)
        while waiting:
            batch: list[int] = []
            seen: set[int] = set()
            later: list[int] = []
            while waiting and len(batch) < self.batch_size:
                row = waiting.popleft()
                if seen.isdisjoint(texts[row]):
                    batch.append(row)
                    seen.update(texts[row])
                else:
                    later.append(row)
            waiting.extendleft(reversed(later))
            if len(batch) > 1 or self.has_negatives:
                batches.append(np.array(batch))
        return batches


def pair_batches(
    pairs: Pairs, sampler: PairSampler, start: int = 0, powers: bool = False
) -> Iterator[PairBatch]:
    """The sampler's batches without end, from batch number ``start``."""
    for rows in sampler.batches(start):
        yield make_pair_batch(pairs, rows, sampler.batch_size, sampler.inputs, powers)
