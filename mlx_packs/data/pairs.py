"""Rows of sentence pairs as tokens, and their batches; the columns are sentence-transformers'."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..bases.tokenizer import padded, tokens_of
from ..config.choices import LOSSES
from ..config.schema import TrainConfig
from ..errors import PackError, flag_of
from .dataset import Batch, Shape
from .formats import Row
from .sampler import Sampler
from .shapes import PairShape
from .task_formats import MOST_NEGATIVES, PAIR_FORMATS, PairFormat
from .texts import NAMES, Group, TextCollate, TextGroups, encode_groups

# Arrays of a batch, one for each text of an example.
COLUMNS = ("first", "second", "third", *(f"text_{i}" for i in range(4, MOST_NEGATIVES + 3)))


def encode_pairs(
    rows: Sequence[Row],
    tokenizer: Any,
    limit: int,
    on_bad_row: str = "stop",
    query_prompt: str = "",
) -> TextGroups:
    """Return the pairs of a split, each text cut to ``limit`` tokens; labels are scores [N].

    ``query_prompt`` is put before every anchor; rows without anchors must have none.
    """

    def groups_of(row: Row, row_format: PairFormat) -> list[Group]:
        if query_prompt and not row_format.has_anchors:
            raise PackError(
                f"--query-prompt: goes before anchors, but {row.where} has {row_format.name}, "
                "which are alike. Leave it out, and write a prompt into their texts.",
                "conflict",
            )
        return [
            ((query_prompt + anchor, *others), () if score is None else (score,))
            for (anchor, *others), score in row_format.usable(row)
        ]

    def encoding(texts: Sequence[str]) -> Iterator[tuple[np.ndarray, bool]]:
        # one more token shows what is cut
        for text, tokens in zip(texts, tokens_of(tokenizer, texts, limit + 1), strict=True):
            if is_cut := len(tokens) > limit:
                (tokens,) = tokens_of(tokenizer, [text], limit)
            yield tokens, is_cut

    pairs = encode_groups(rows, PAIR_FORMATS, on_bad_row, groups_of, encoding)
    return replace(pairs, groups=_with_negatives_repeated(pairs))


def _with_negatives_repeated(pairs: TextGroups) -> np.ndarray:
    """Return int [N, C]: a pair with fewer texts than others repeats its negatives up to C."""
    sizes = pairs.sizes[:, None]
    columns = np.arange(pairs.groups.shape[1])
    repeated = 2 + (columns - 2) % np.maximum(1, sizes - 2)
    return np.take_along_axis(pairs.groups, np.where(columns < sizes, columns, repeated), axis=1)


def choose_loss(requested: str, pairs: TextGroups, where: str) -> str:
    """``auto`` selects the first loss of the format; another one must suit it."""
    possible = pairs.format.losses
    loss = possible[0] if requested == "auto" else requested

    if loss not in possible:
        fitting = min(
            (each for each in PAIR_FORMATS if loss in each.losses),
            key=lambda each: len(each.sides),
        )
        raise PackError(
            f"--loss {loss}: needs {{{', '.join(fitting.columns(NAMES))}}}, but {where} "
            f"has {pairs.format.name}. Use --loss {' or '.join(possible)}.",
            "conflict",
        )

    if LOSSES[loss].scores_are_cosines and np.abs(pairs.labels).max() > 1:
        worst = float(pairs.labels[np.abs(pairs.labels).argmax()])
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

    The arrays are one for each column, int32 [B, T], T by column; ``lengths`` int32 [B, C],
    ``weights`` float32 [B], and ``scores`` float32 [B] of scored pairs.
    """

    def __call__(self, pairs: TextGroups, order: Sequence[int]) -> Batch:
        missing = self.batch_size - len(order)
        inputs = {}
        lengths = []

        for name, texts in zip(COLUMNS, zip(*map(pairs.tokens, order), strict=True), strict=False):
            texts = [*texts, *[texts[0][:1]] * missing]
            inputs[name] = padded(texts, self.width(max(map(len, texts))))
            lengths.append([len(text) for text in texts])

        inputs["lengths"] = np.array(lengths, np.int32).T
        if pairs.labels is not None:
            inputs["scores"] = self.rows(pairs.labels[list(order)])
        return self.batch(inputs, pairs, order)

    def shapes(self, pairs: TextGroups, orders: Iterator[Sequence[int]]) -> set[Shape]:
        """Return the widths of columns; of those with the same widest column, the widest batch."""
        lengths = pairs.text_lengths
        largest: dict[int, PairShape] = {}
        for order in orders:
            longest = lengths[list(order)].max(axis=0)
            shape = PairShape.of(self.width(int(tokens)) for tokens in longest)
            before = largest.get(shape.inputs, shape)
            largest[shape.inputs] = max(before, shape, key=lambda each: sum(each.widths))
        return set(largest.values())


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
        cls, pairs: TextGroups, batch_size: int, inputs: int, seed: int, distinct: bool
    ) -> "PairSampler":
        texts = pairs.groups if distinct else None
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
