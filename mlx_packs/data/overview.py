"""The overview of a data set by split: lengths, truncation, targets, bad rows, near-copies."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config.common import CommonConfig
from ..config.data import DataConfig
from ..errors import PackError
from ..files import atomic_folder
from .bad_rows import BadRows, RowError
from .encoding import EncodingOptions
from .formats import Row, RowFormat, TokenFormat, check_format
from .images import stored_text, with_whole_paths
from .near_copies import MOST_COMPARED, NearCopies, compared_indices, sampled
from .pair_formats import PairFormat
from .preferences import encode_tokens
from .rows import Splits, held_out
from .sharing import Repeats, repeats_of
from .sources import Rows, as_rows
from .trees import common_inputs

_SAMPLED = 400  # rows that are compared for near-copies
_NO_LIMIT = 1 << 30  # tokens
_SHORTEST = 16  # upper edge of the first bin of a histogram that has texts with something in them


@dataclass(frozen=True)
class SplitOverview:
    rows: int
    looked_at: int  # rows that all other facts are about
    unit: str  # of lengths: tokens, or characters of the longest text of a pair
    lengths: np.ndarray  # of the examples that were made of these rows, [N]
    cut: int  # rows that are longer than the maximum
    dropped: int  # rows that lose every target by that
    beyond: int  # rows that have images beyond the maximum, which are not cut
    learned: float | None  # share of the tokens that the loss is on; None of pairs
    common: int  # tokens that every example begins with; 0 if fewer than 16, and of pairs
    # What examples, cut to the maximum, repeat of each other in batches of the default size; None
    # of preferences and pairs.
    repeats: Repeats | None
    bad: BadRows  # rows that cannot be used
    near_copies: int  # sampled rows of which another row of the split is a near-copy
    sampled: int

    def quantiles(self) -> dict[str, int]:
        """Return the 5th, 50th and 95th percentile, and the longest."""
        values = np.quantile(self.lengths, [0.05, 0.5, 0.95, 1], method="nearest")
        return dict(zip(("p5", "p50", "p95", "longest"), values.astype(int).tolist(), strict=True))

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (shortest, longest, examples) of bins that double, from the first with any."""
        edges = [-1, 0]  # empty texts have a bin of their own
        while edges[-1] < self.lengths.max():
            edges.append(max(_SHORTEST, 2 * edges[-1]))

        counts = np.histogram(self.lengths, [edge + 1 for edge in edges])[0]
        first = int(np.flatnonzero(counts)[0])
        bins = zip(edges, edges[1:], counts.tolist(), strict=False)
        return [(low + 1, high, count) for low, high, count in bins][first:]

    def to_json(self) -> dict:
        repeats = self.repeats and self.repeats.to_json()

        return {
            "rows": self.rows,
            "looked_at": self.looked_at,
            "unit": self.unit,
            "lengths": self.quantiles(),
            "histogram": [list(each) for each in self.histogram()],
            "cut": self.cut,
            "dropped": self.dropped,
            "images_beyond": self.beyond,
            "learned": self.learned,
            "common": self.common,
            "repeats": repeats,
            "bad_rows": self.bad.counts(),
            "near_copies": self.near_copies,
            "sampled": self.sampled,
        }


def look_at(
    rows: Sequence[Row],
    row_format: RowFormat,
    columns: DataConfig,
    tokenizer: Any,
    options: EncodingOptions,
) -> SplitOverview:
    """Return the overview of a split; from more than 50,000 rows, blocks of that many are read.

    Rows that cannot be used must not stop (``columns.on_bad_row``); if no row can, a PackError.
    """
    rows = as_rows(rows)
    looked_at = rows.select(compared_indices(len(rows), MOST_COMPARED))
    sample = sampled(len(rows), _SAMPLED)

    copies = NearCopies({i: rows[i] for i in sorted(sample)}, row_format, columns).in_rows(rows)
    repeated = sum(bool(set(others) - {i}) for i, others in copies.items())

    learned = None
    common = 0
    repeats = None
    if isinstance(row_format, PairFormat):
        lengths, bad = _characters(looked_at, row_format, columns)
        facts = ("characters", lengths, 0, 0, 0)
    else:
        limit = options.max_seq_length
        whole = replace(options, max_seq_length=_NO_LIMIT)
        examples = encode_tokens(looked_at, tokenizer, columns, whole, row_format)
        cut = np.flatnonzero(examples.lengths > limit).tolist()
        dropped = sum(not examples.items[i].target[:limit].any() for i in cut)
        beyond = sum(examples.items[i].tokens[limit:].min() < 0 for i in cut)
        facts = ("tokens", examples.lengths, len(cut), dropped, int(beyond))
        learned = examples.targets / max(1, int(examples.lengths.sum()))
        common = common_inputs(examples.items)
        bad = examples.bad
        if isinstance(row_format, TokenFormat):
            repeats = repeats_of(examples, CommonConfig.batch_size, limit)

    return SplitOverview(
        len(rows), len(looked_at), *facts, learned, common, repeats, bad, repeated, len(sample)
    )


def _characters(
    rows: Rows, row_format: PairFormat, columns: DataConfig
) -> tuple[np.ndarray, BadRows]:
    """Return the characters of each usable row's longest text, and the other rows."""
    lengths = []
    bad = BadRows(stops=False)
    for i, row in enumerate(rows):
        try:
            check_format(row, row_format, rows.where(0), columns)
            pairs = row_format.usable(row)
            lengths.append(max(len(text) for pair in pairs for text in pair.texts))
        except RowError as error:
            bad.add(i, error)

    bad.check_some_left(len(rows))
    return np.array(lengths), bad


def write_splits(splits: Splits, columns: DataConfig, out: Path, overwrite: bool) -> dict[str, int]:
    """Write the splits as JSONL files of a folder, without rows that are no JSON; count their rows.

    Without test rows, some training rows become these, unless no other would be left to train on.
    Raises PackError if the folder exists, and may not be replaced or has other files.
    """
    names = {f"{split}.jsonl" for split in splits.rows}
    if overwrite and out.is_dir() and (other := {f.name for f in out.iterdir()} - names):
        raise PackError(
            f"{out}: has {min(other)}, which is not replaced. Choose another folder.",
            "exists",
            "out",
        )

    rows = {split: as_rows(chosen) for split, chosen in splits.rows.items()}
    if not len(rows["test"]):
        train, test, _ = held_out(rows["train"], columns, splits.format)
        if any(_lines(train)):
            rows["train"] = train
            rows["test"] = test

    counts = {}
    with atomic_folder(out, replace=overwrite) as partial:
        for split, chosen in rows.items():
            with (partial / f"{split}.jsonl").open("wb") as file:
                counts[split] = sum(bool(file.write(line)) for line in _lines(chosen))

        for split in [split for split, count in counts.items() if not count]:
            (partial / f"{split}.jsonl").unlink()
            del counts[split]

    return counts


def _lines(rows: Rows) -> Iterator[bytes]:
    """Leave out rows that cannot be read."""
    for row in rows:
        with suppress(RowError):
            value = with_whole_paths(row)
            try:
                yield (json.dumps(value, ensure_ascii=False, default=stored_text) + "\n").encode()
            except UnicodeEncodeError:  # half a surrogate pair
                yield (json.dumps(value, default=stored_text) + "\n").encode()
