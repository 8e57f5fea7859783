"""The memory of a run's examples on the host, beside the model: what `packs plan --data` counts.

Text is read, rendered and tokenized some rows at a time, and tokens are mapped from a file, so that
most of it does not depend on the size of the data. Measured by `python -m benchmarks data`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from ..config.data import DataConfig
from ..data.rows import SPLITS, load_rows
from ..data.sources import Rows
from ..display import size
from ..files import is_pattern

# The tokenizer's working memory for the rows at hand, and the mapped tokens of the last batches.
_WORKING_BYTES = 125_000_000
# Where a row begins; where its example ends, its row, length and targets; its place in an epoch's
# order and a share of its batch.
_ROW_BYTES = 8 + 40 + 8 + 40
_IN_MEMORY = 4.6  # of a .json file, as times its size


@dataclass(frozen=True)
class ExampleMemory:
    """Examples of a run, and what they need.

    Attributes:
        rows: Of all splits.
        file_bytes: Of their text.
        held_bytes: Those of files that are in memory entirely (.json).
    """

    rows: int
    file_bytes: int
    held_bytes: int

    @property
    def nbytes(self) -> int:
        """The most bytes that the examples take, over the start of a run and its training."""
        return _WORKING_BYTES + _ROW_BYTES * self.rows + int(_IN_MEMORY * self.held_bytes)

    def line(self, source: str) -> str:
        return (
            f"{source} · {self.rows:,} examples, {size(self.file_bytes)} · about "
            f"{size(self.nbytes)} beside the model, which the peaks below do not have"
        )


def example_memory(config: DataConfig) -> ExampleMemory | None:
    """Return the memory of examples in files here; None for a dataset of the Hub."""
    is_here = config.data == "tiny" or Path(config.data).expanduser().exists()
    if config.hf_dataset is not None or not (is_here or is_pattern(config.data)):
        return None

    splits = load_rows(replace(config, hold_out="last")).rows
    rows = [splits[split] for split in SPLITS if len(splits[split])]
    sizes = [part.nbytes() for part in rows]
    in_memory = sum(n for part, n in zip(rows, sizes, strict=True) if _is_in_memory(part))
    return ExampleMemory(sum(map(len, rows)), sum(sizes), in_memory)


def _is_in_memory(rows: Rows) -> bool:
    return len(rows.sources) == 1 and not rows.is_in_files()
