"""Examples that cannot be used: an error that names their row, or a record of what was left out."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import Code, PackError

TOO_LONG = "images beyond --max-seq-length"  # the reason of such a row

R = TypeVar("R")  # a row
T = TypeVar("T")  # its content


class RowError(PackError):
    """An example cannot be used; ``--on-bad-row`` decides whether that stops the run.

    ``where`` is the row, as ``train.jsonl:17``. Rows are counted by ``reason``, a few words such as
    ``not JSON``.
    """

    def __init__(
        self,
        where: str,
        fault: str,
        reason: str,
        code: Code = "data",
        flag: str | None = None,
    ) -> None:
        super().__init__(f"{where}: {fault}", code, flag)
        self.where = where
        self.fault = fault
        self.reason = reason


@dataclass
class BadRows:
    """The rows of a split that cannot be used, in their order."""

    stops: bool = True  # whether the first one is raised as an error (``--on-bad-row stop``)
    errors: list[tuple[int, RowError]] = field(default_factory=list)  # with the index of the row

    def add(self, index: int, error: RowError) -> None:
        """Record a row, or raise its error if rows stop the run."""
        if self.stops:
            raise error
        self.leave_out(index, error)

    def usable(self, rows: Sequence[R], read: Callable[[R], T]) -> Iterator[tuple[int, R, T]]:
        """Yield the number of each row, the row, and what ``read`` returns for it.

        A row for which it raises a RowError is added.

        Raises:
            PackError: There are no rows, or none can be used.
        """
        if not len(rows):
            raise PackError("--data: the split has no examples.", "data")

        for i, row in enumerate(rows):
            try:
                value = read(row)
            except RowError as error:
                self.add(i, error)
            else:
                yield i, row, value

        self.check_some_left(len(rows))

    def leave_out(self, index: int, error: RowError) -> None:
        """Record a row, whether bad rows stop the run or not."""
        error.__traceback__ = None  # of a million rows the frames would stay
        self.errors.append((index, error))

    def __len__(self) -> int:
        return len(self.errors)

    def counts(self) -> dict[str, int]:
        return dict(Counter(error.reason for _, error in self.errors).most_common())

    def check_some_left(self, count: int) -> None:
        """Raise a PackError if all of ``count`` rows are bad."""
        if not self.errors or len(self.errors) < count:
            return

        flag = "data"
        reasons = self.counts()
        fault = f"--on-bad-row: none of {count:,} examples can be used ({shown_counts(reasons)})."
        if set(reasons) == {TOO_LONG}:
            flag = "max_seq_length"
            fault = "--max-seq-length: no example fits with its images."

        first = self.errors[0][1]
        raise PackError(f"{fault} The first: {first.message}", "data", flag)

    def to_json(self) -> list:
        """`from_json` reads it; the places of rows are left out."""
        return [[i, e.fault, e.reason, e.code, e.flag] for i, e in self.errors]

    @classmethod
    def from_json(cls, entries: Iterable, rows: Sequence, stops: bool) -> "BadRows":
        """With ``stops`` the first bad row is raised."""
        bad = cls(stops)
        for index, fault, reason, code, flag in entries:
            bad.add(index, RowError(rows[index].where, fault, reason, code, flag))

        return bad

    def in_order(self) -> "BadRows":
        """Sort by row: what is wrong with a row may show after later ones."""
        return BadRows(self.stops, sorted(self.errors, key=lambda entry: entry[0]))


def shown_counts(counts: Mapping[str, int]) -> str:
    """Return counts for people: ``2 not JSON, 1 no target``."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
