"""Notes on usable rows: empty answers, and held-out rows that training rows repeat."""

from collections.abc import Mapping, Sequence

from ..config.data import DataConfig
from .bad_rows import RowError
from .formats import Row, RowFormat, TokenFormat
from .near_copies import NearCopies, compared, sampled, words_of
from .sources import Rows, as_rows

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
    empty: list[int] = []

    for i, row in compared(train):
        if _has_empty_answer(row, row_format, names):
            empty.append(i)
        words = words_of(row, row_format, names) if copies else ()
        for split, of_split in copies.items():
            for number in of_split.repeated_by_words(words):
                first[split].setdefault(number, i)

    notes = []
    if empty:
        number = f"{len(empty):,} training examples have"
        if len(empty) == 1:
            number = "1 training example has"
        notes.append(
            f"{number} an empty answer ({train.where(empty[0])}): the pack learns to answer nothing"
        )

    for split, found in first.items():
        if found:
            notes.append(_leak_note(split, held_out[split], len(looked_at[split]), train, found))
    return notes


def _has_empty_answer(row: Row, row_format: RowFormat, names: DataConfig) -> bool:
    if not isinstance(row_format, TokenFormat):
        return False
    try:
        usable = isinstance(row.value, Mapping) and row_format.matches(row, names)
        return usable and row_format.answer(row, names) == ""
    except RowError:
        return False


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
