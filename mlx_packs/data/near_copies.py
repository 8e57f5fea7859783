"""Rows that nearly repeat others, by the runs of words that they share, and notes on usable rows.

If a row has at least half of its runs of five words in common with another one, the other tells
the answer: a loss on one, after training on the other, says little (Lee et al., 2022,
arXiv:2107.06499; runs of words as in Brown et al., 2020, arXiv:2005.14165, appendix C). Runs that
many rows share, as in a system prompt, do not count. A paraphrase in other words is not found.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..config.data import DataConfig
from ..errors import PackError
from .formats import RowFormat, TokenFormat
from .images import images_key
from .row_format import RowError
from .sources import Row, Rows, as_rows

RUN = 5  # words
SHARE = 0.5  # of the runs of a row, which make the other one a near-copy of it
MOST_COMPARED = 50_000  # rows; of more, so many in blocks
_BLOCKS = 50
_CHARACTERS = 4_000  # of a row, its first
_COMMON = 0.05  # runs of words that a larger share of rows has do not count
# a letter of a script that has no spaces between words, or a word
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|\w+")

_Runs = frozenset[tuple[str, ...]]


def words_of(row: Row, row_format: RowFormat, names: DataConfig) -> tuple[str, ...]:
    """A row that cannot be used has no words."""
    try:
        if not isinstance(row.value, Mapping) or not row_format.matches(row, names):
            return ()
        text = "\n".join(row_format.texts(row, names))
    except PackError:
        return ()
    return tuple(_WORD.findall(text[:_CHARACTERS].lower()))


def _runs(words: tuple[str, ...]) -> _Runs:
    """All words are one run if they are fewer than `RUN`."""
    if len(words) <= RUN:
        return frozenset([words])
    return frozenset(zip(*(words[i:] for i in range(RUN)), strict=False))


class NearCopies:
    """Some rows, by a number of their own, and which of them other rows repeat."""

    def __init__(self, rows: Mapping[int, Row], row_format: RowFormat, names: DataConfig) -> None:
        self._format = row_format
        self._names = names
        words = {i: words_of(row, row_format, names) for i, row in rows.items()}
        self._images = {i: images_key(row) for i, row in rows.items() if words[i]}
        counts = Counter(run for i in words for run in _runs(words[i]))

        most = max(2, int(len(rows) * _COMMON))
        self._counted = {
            i: sum(counts[run] <= most for run in _runs(of_row)) for i, of_row in words.items()
        }

        self._owners: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._same: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, of_row in words.items():
            if of_row:
                self._same[of_row].append(i)
            for run in _runs(of_row):
                if run and counts[run] <= most:
                    self._owners[run].append(i)

    def repeated_by(self, words: tuple[str, ...], images: str) -> set[int]:
        """Return the numbers of rows that a row repeats, word by word or nearly.

        It is given by its `words_of` and `images_key`: the same question on another image is
        another one.
        """
        copies = set(self._same.get(words, ()))
        owners = self._owners
        shared = Counter(i for run in _runs(words) if run in owners for i in owners[run])
        copies |= {i for i, n in shared.items() if n >= SHARE * self._counted[i]}
        return {i for i in copies if self._images[i] == images}

    def in_rows(self, rows: Rows) -> dict[int, list[int]]:
        """Return the indices of the rows that repeat each number, among those compared."""
        copies: dict[int, list[int]] = defaultdict(list)
        for i, row in compared(rows):
            words = words_of(row, self._format, self._names)
            for number in self.repeated_by(words, images_key(row) if words else ""):
                copies[number].append(i)
        return copies


def compared(rows: Rows, most: int | None = None) -> Iterator[tuple[int, Row]]:
    """Yield index and row, of ``most`` rows in blocks if there are more."""
    indices = compared_indices(len(rows), most or MOST_COMPARED)
    return zip(indices.tolist(), rows.select(indices), strict=True)


def compared_indices(count: int, most: int) -> np.ndarray:
    """Return the indices of ``count`` rows, or of ``most`` of them in blocks."""
    if count <= most:
        return np.arange(count)

    size = most // _BLOCKS
    starts = np.linspace(0, count - size, _BLOCKS).astype(int)
    return (starts[:, None] + np.arange(size)).reshape(-1)


def sampled(count: int, size: int) -> Sequence[int]:
    """Return at most ``size`` indices below ``count`` in a random order, the same each time."""
    return random.Random(0).sample(range(count), min(count, size))


def hold_out(
    rows: Rows, count: int, row_format: RowFormat, names: DataConfig
) -> tuple[list[int], int]:
    """Return at most ``count`` rows to hold out, in order, and how many of them are near-copies.

    They are a random sample, the same each time. Rows that nearly repeat one of them are held out,
    too; a row that too many repeat stays with the training rows.
    """
    candidates = sampled(len(rows), 4 * count)
    copies = NearCopies({i: rows[i] for i in sorted(candidates)}, row_format, names).in_rows(rows)

    chosen: set[int] = set()
    alone = 0
    for i in candidates:
        group = {i, *copies.get(i, ())}
        if i not in chosen and len(chosen | group) <= count:
            chosen |= group
            alone += 1
        if len(chosen) == count:
            break

    if not chosen:
        chosen = set(candidates[:count])
        alone = count
    return sorted(chosen), len(chosen) - alone


_LOOKED_AT = 400  # rows of a split that is held out


def row_notes(
    splits: Mapping[str, Sequence[Row]], row_format: RowFormat, names: DataConfig
) -> list[str]:
    """Return a warning for each kind of fault, with its first place.

    From more than 50,000 training rows, blocks of that many are read.
    """
    train = as_rows(splits["train"])
    held_out = {split: as_rows(rows) for split, rows in splits.items() if split != "train"}
    looked_at = {
        split: {i: rows[i] for i in sorted(sampled(len(rows), _LOOKED_AT))}
        for split, rows in held_out.items()
        if len(rows)
    }
    copies = {s: NearCopies(rows, row_format, names) for s, rows in looked_at.items()}
    first: dict[str, dict[int, int]] = {split: {} for split in copies}
    empty: dict[str, list[int]] = {"train": []}

    for i, row in compared(train):
        if _has_empty_answer(row, row_format, names):
            empty["train"].append(i)

        words = words_of(row, row_format, names) if copies else ()
        images = images_key(row) if words else ""
        for split, of_split in copies.items():
            for number in of_split.repeated_by(words, images):
                first[split].setdefault(number, i)

    for split, rows in held_out.items():
        empty[split] = [i for i, r in compared(rows) if _has_empty_answer(r, row_format, names)]
    notes = [_empty_note(split, as_rows(splits[split]), i) for split, i in empty.items() if i]
    for split, found in first.items():
        if found:
            notes.append(_leak_note(split, held_out[split], len(looked_at[split]), train, found))
    return notes


def _has_empty_answer(row: Row, row_format: RowFormat, names: DataConfig) -> bool:
    if not isinstance(row_format, TokenFormat):
        return False
    try:
        usable = isinstance(row.value, Mapping) and row_format.matches(row, names)
        return usable and row_format.read(row, names).answer == ""
    except RowError:
        return False


def _empty_note(split: str, rows: Rows, empty: Sequence[int]) -> str:
    name = "training" if split == "train" else split
    outcome = "the pack learns to answer nothing" if split == "train" else "it counts as right"
    number = f"{len(empty):,} {name} examples have" if len(empty) > 1 else f"1 {name} example has"
    where = rows.where(empty[0])
    return f"{number} an empty answer ({where}): {outcome}. Remove them if wrong"


def _leak_note(
    split: str, held_out: Rows, looked_at: int, train: Rows, found: Mapping[int, int]
) -> str:
    of = f"{looked_at:,} {split} examples"
    if looked_at != len(held_out):
        of += " looked at"
    first = min(found)
    return (
        f"{len(found):,} of {of} nearly repeat training examples ({held_out.where(first)} is "
        f"{train.where(found[first])}), so the held-out loss is too optimistic"
    )
