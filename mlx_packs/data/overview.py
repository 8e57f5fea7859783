"""The overview of a data set by split: lengths, truncation, targets, bad rows, near-copies."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config.data import DataConfig
from ..errors import PackError
from ..files import atomic_folder
from .bad_rows import RowError
from .formats import Row
from .images import stored_text, with_whole_paths
from .near_copies import MOST_COMPARED, NearCopies, compared_indices, sampled
from .rows import Splits, held_out
from .sources import Rows, as_rows
from .split_facts import Reader, SplitFacts

_SAMPLED = 400  # rows that are compared for near-copies
_SHORTEST = 16  # upper edge of the first bin of a histogram that has texts with something in them


@dataclass(frozen=True)
class SplitOverview:
    rows: int
    looked_at: int  # rows that all other facts are about
    facts: SplitFacts
    near_copies: int  # sampled rows of which another row of the split is a near-copy
    sampled: int

    def quantiles(self) -> dict[str, int]:
        """Return the 5th, 50th and 95th percentile, and the longest."""
        values = np.quantile(self.facts.lengths, [0.05, 0.5, 0.95, 1], method="nearest")
        return dict(zip(("p5", "p50", "p95", "longest"), values.astype(int).tolist(), strict=True))

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (shortest, longest, examples) of bins that double, from the first with any."""
        edges = [-1, 0]  # empty texts have a bin of their own
        while edges[-1] < self.facts.lengths.max():
            edges.append(max(_SHORTEST, 2 * edges[-1]))

        counts = np.histogram(self.facts.lengths, [edge + 1 for edge in edges])[0]
        first = int(np.flatnonzero(counts)[0])
        bins = zip(edges, edges[1:], counts.tolist(), strict=False)
        return [(low + 1, high, count) for low, high, count in bins][first:]

    def to_json(self) -> dict:
        facts = self.facts
        repeats = facts.repeats and facts.repeats.to_json()

        return {
            "rows": self.rows,
            "looked_at": self.looked_at,
            "unit": facts.unit,
            "lengths": self.quantiles(),
            "histogram": [list(each) for each in self.histogram()],
            "cut": facts.cut,
            "dropped": facts.dropped,
            "images_beyond": facts.beyond,
            "learned": facts.learned,
            "common": facts.common,
            "repeats": repeats,
            "labels": dict(facts.labels),
            "bad_rows": facts.bad.counts(),
            "near_copies": self.near_copies,
            "sampled": self.sampled,
        }


def look_at(rows: Sequence[Row], reader: Reader) -> SplitOverview:
    """Return the overview of a split; from more than 50,000 rows, blocks of that many are read.

    Rows that cannot be used must not stop (``columns.on_bad_row``); if no row can, a PackError.
    """
    rows = as_rows(rows)
    looked_at = rows.select(compared_indices(len(rows), MOST_COMPARED))
    sample = sampled(len(rows), _SAMPLED)

    near = NearCopies({i: rows[i] for i in sorted(sample)}, reader.format, reader.columns)
    repeated = sum(bool(set(others) - {i}) for i, others in near.in_rows(rows).items())

    facts = reader.facts(looked_at)
    return SplitOverview(len(rows), len(looked_at), facts, repeated, len(sample))


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
