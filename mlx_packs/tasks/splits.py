"""The splits of a phase: encoding them, and what a run says about it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from ..config.data import DataConfig
from ..data.bad_rows import BadRows
from ..data.dataset import ExampleSet
from ..data.left_out import template_notes
from ..data.rows import Splits
from ..data.sources import Rows
from ..display import Display


class EncodedSplit(ExampleSet, Protocol):
    """The examples of a split, and what became of its rows."""

    fingerprint: str | None
    bad: BadRows
    cut: int


E = TypeVar("E", bound=EncodedSplit)


def encode_each(read: Splits, encode: Callable[[Rows], E], display: Display) -> dict[str, E]:
    present = read.present()
    encoded = {}
    with display.task("data", len(present), "splits") as bar:
        for split in present:
            encoded[split] = encode(read.rows[split])
            read.note_encoded(split, encoded[split].fingerprint, encoded[split].bad)
            bar.advance()

    return encoded


def counted(splits: Mapping[str, ExampleSet]) -> str:
    return " / ".join(f"{part.count:,} {split}" for split, part in splits.items())


def show_cut(splits: Mapping[str, EncodedSplit], limit: int, what: str, display: Display) -> None:
    """Show how many texts, which are ``what``, had more than ``limit`` tokens; nothing if none."""
    if cut := sum(part.cut for part in splits.values()):
        text = f"longer than {limit} tokens (--max-seq-length): {cut} {what} cut"
        display.line("data", text)


def show_notes(read: Splits, columns: DataConfig, tokenizer: Any, display: Display) -> None:
    """Show what was decided about rows, what of them is not used, and which were left out."""
    lost = template_notes(read.rows["train"], read.format, columns, tokenizer)
    for note in (*read.notes, *lost, *read.bad_lines()):
        display.line("data", note)
