"""The overview of a data set by split: what its rows become for a task, and near-copies."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config.data import DataConfig
from ..errors import PackError
from ..files import atomic_folder
from ..terminal import printable
from .encoding import EncodingOptions
from .formats import PREFERENCE, PROMPT, Row, RowFormat, TokenFormat, check_format
from .images import images_key, stored_text
from .labelled import NO_LIMIT, encode_labelled
from .labels import REGRESSION, Classes
from .near_copies import MOST_COMPARED, NearCopies, compared_indices, sampled
from .pairs import encode_pairs
from .preferences import encode_tokens
from .prompts import encode_prompts
from .rankings import INSTRUCTION, RerankPrompt, encode_rankings
from .row_format import LEFT_OUT, BadRows, RowError
from .rows import Splits, below, held_out
from .sources import Rows, as_rows
from .task_formats import RATED, PairFormat, RankingFormat
from .token_store import Example, masked
from .trees import common_inputs

_MOST_LISTED = 200  # bad rows of a split
_SHOWN = 200  # characters of a bad row
_SAMPLED = 400  # rows that are compared for near-copies
_SHORTEST = 16  # upper edge of the first bin of a histogram that has texts with something in them


@dataclass(frozen=True)
class SplitOverview:
    """What the rows of a split become for a task."""

    lengths: np.ndarray  # of examples before they are cut, [N]
    bad_rows: BadRows  # that cannot be used
    cut: int = 0  # examples that are longer than the maximum
    dropped: int = 0  # of these, examples that are left out
    images_beyond: int = 0  # rows that have images beyond the maximum, which are not cut
    learned: float | None = None  # share of the tokens that the loss is on; None without one
    common: int = 0  # tokens that every example begins with; 0 if fewer than 16
    labels: Mapping[str, int] = field(default_factory=dict)  # and how many rows have each
    rows: int = 0
    looked_at: int = 0  # rows that all facts above are about
    bad: Sequence[dict] = ()  # the first bad rows, as of `Reader.bad_row`
    near_copies: int = 0  # sampled rows of which another row of the split is a near-copy
    sampled: int = 0

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
        facts = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return facts | {
            "lengths": self.quantiles(),
            "histogram": self.histogram(),
            "bad_rows": self.bad_rows.counts(),
        }


@dataclass(frozen=True)
class Reader:
    """Reads rows as a run does, with the default settings of its task.

    Attributes:
        tokenizer: the base's; for pairs, the tokenizer of single texts.
        classes: that labelled rows have.
        scores_whole: whether completions are scored at their end, so that none is cut.
    """

    format: RowFormat
    columns: DataConfig
    tokenizer: Any
    options: EncodingOptions
    classes: Classes | None = None
    scores_whole: bool = False

    @property
    def limit(self) -> int:
        return self.options.max_seq_length

    @property
    def has_targets(self) -> bool:
        """Whether some tokens of an example are trained on."""
        if self.classes is not None or self.scores_whole:
            return False
        return isinstance(self.format, TokenFormat) or self.format is PREFERENCE

    @property
    def loss_on(self) -> str:
        if not isinstance(self.format, TokenFormat) or self.format is RATED:
            return "completion"
        return self.format.resolve_loss_on(self.options.loss_on)

    def shown(self, rows: Rows, indices: Iterable[int]) -> list[dict]:
        """Return the examples of rows as `masked` does, and of a bad row its `bad_row`."""
        shown: list[dict] = []
        for i in indices:
            try:
                shown += [masked(example, self.tokenizer) for example in self._examples(rows, i)]
            except RowError as error:
                shown.append(self.bad_row(rows, i, error))
        return [each | {"where": below(self.columns.data, each["where"])} for each in shown]

    def _examples(self, rows: Rows, i: int) -> Sequence[Example]:
        """Return the examples of a row, or raise its RowError."""
        columns = replace(self.columns, on_bad_row="stop")
        if isinstance(self.format, TokenFormat) and self.format is not RATED:
            check_format(rows[i], self.format, rows.where(0), columns)

        row = rows[i : i + 1]
        items = encode_tokens(row, self.tokenizer, columns, self.options, self.format).items
        if self.format is RATED:
            return [items[0]]  # the other one has the completion of another row
        return items

    def bad_row(self, rows: Rows, i: int, error: RowError) -> dict:
        """Return the place of a bad row, its line in a file of lines, its error and its text."""
        where = below(self.columns.data, rows.where(i))
        line = re.search(r":(\d+)$", where)
        return {
            "where": where,
            "line": line and int(line[1]),
            "reason": error.reason,
            "message": error.text,
            "text": printable(rows.text(i, _SHOWN)),
        }

    def overview(self, rows: Rows) -> SplitOverview:
        if self.classes is not None:
            return self._labelled(rows, self.classes)
        if isinstance(self.format, PairFormat):
            pairs = encode_pairs(rows, self.tokenizer, NO_LIMIT, "skip")
            cut = int((pairs.text_lengths > self.limit).sum())
            return SplitOverview(pairs.lengths, pairs.bad, cut=cut)

        if isinstance(self.format, RankingFormat):
            return self._rankings(rows)
        if self.format is PROMPT:
            prompts = encode_prompts(rows, self.tokenizer, self.columns, self.limit)
            return SplitOverview(prompts.lengths, prompts.bad)

        return self._sequences(rows)

    def _sequences(self, rows: Rows) -> SplitOverview:
        whole = replace(self.options, max_seq_length=NO_LIMIT)
        examples = encode_tokens(rows, self.tokenizer, self.columns, whole, self.format)
        lengths = np.asarray(examples.lengths)
        labels: dict[str, int] = {}
        if self.format is RATED:
            lengths = lengths[::2]  # the others have a completion of another row
            labels = _counted("true" if label else "false" for label in examples.labels)

        if self.scores_whole:
            dropped = int((examples.row_lengths.max(axis=1) >= self.limit).sum())
            return SplitOverview(lengths, examples.bad, cut=dropped, dropped=dropped)

        step = len(examples) // len(lengths)
        cut = [i * step for i in np.flatnonzero(lengths > self.limit).tolist()]
        return SplitOverview(
            lengths,
            examples.bad,
            cut=len(cut),
            dropped=sum(not examples.items[i].target[: self.limit].any() for i in cut),
            images_beyond=int(sum(examples.items[i].tokens[self.limit :].min() < 0 for i in cut)),
            learned=examples.targets / max(1, int(examples.lengths.sum())),
            common=common_inputs(examples.items),
            labels=labels,
        )

    def _labelled(self, rows: Rows, classes: Classes) -> SplitOverview:
        whole = replace(self.options, max_seq_length=NO_LIMIT)
        examples = encode_labelled(rows, self.tokenizer, self.columns, whole, classes)
        lengths = examples.lengths
        cut = int((lengths >= self.limit).sum())

        labels: dict[str, int] = {}
        if classes.problem != REGRESSION:
            marks = examples.labels
            if marks.ndim == 1:
                marks = marks[:, None] == np.arange(classes.outputs)
            labels = dict(zip(classes.labels, marks.sum(axis=0).tolist(), strict=True))

        dropped = cut if classes.chat else 0
        return SplitOverview(lengths, examples.bad, cut=cut, dropped=dropped, labels=labels)

    def _rankings(self, rows: Rows) -> SplitOverview:
        prompt = RerankPrompt(self.tokenizer, INSTRUCTION, NO_LIMIT)
        rankings = encode_rankings(rows, prompt, "skip")
        is_document = rankings.groups >= 0
        lengths = rankings.text_lengths[is_document]
        labels = _counted(f"{label:g}" for label in rankings.labels[is_document])
        cut = int((lengths > self.limit).sum())

        return SplitOverview(lengths, rankings.bad, cut=cut, labels=labels)


def _counted(labels: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(labels).items()))


def look_at(
    rows: Sequence[Row],
    reader: Reader,
    every_row: bool = False,
    on_bad: Callable[[dict], object] | None = None,
) -> SplitOverview:
    """Return the overview of a split; from more than 50,000 rows, blocks of that many are read.

    With ``every_row`` these blocks are only searched for near-copies. ``on_bad`` is called with
    `Reader.bad_row` of each of the first 200 bad rows, once it is read. Such rows must not stop
    (``columns.on_bad_row``); if no row can be used, a PackError.
    """
    rows = as_rows(rows)
    looked_at = rows
    if not every_row:
        looked_at = rows.select(compared_indices(len(rows), MOST_COMPARED))

    listed: dict[int, dict] = {}

    def seen(i: int, error: RowError) -> None:
        if len(listed) < _MOST_LISTED:
            listed[i] = reader.bad_row(looked_at, i, error)
            if on_bad:
                on_bad(listed[i])

    context = copy_context()
    context.run(LEFT_OUT.set, seen)
    overview = context.run(reader.overview, looked_at)

    sample = sampled(len(rows), _SAMPLED)
    near = NearCopies({i: rows[i] for i in sorted(sample)}, reader.format, reader.columns)
    repeated = sum(bool(set(others) - {i}) for i, others in near.in_rows(rows).items())

    return replace(
        overview,
        rows=len(rows),
        looked_at=len(looked_at),
        bad=[listed[i] for i in sorted(listed)],
        near_copies=repeated,
        sampled=len(sample),
    )


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
            value = row.value
            if isinstance(value, Mapping) and images_key(row):
                raise PackError(
                    f"--out: rows with images are not written ({row.where}). Leave it out, and "
                    "write them next to their images yourself.",
                    "unsupported",
                    "out",
                )
            try:
                yield (json.dumps(value, ensure_ascii=False, default=stored_text) + "\n").encode()
            except UnicodeEncodeError:  # half a surrogate pair
                yield (json.dumps(value, default=stored_text) + "\n").encode()
