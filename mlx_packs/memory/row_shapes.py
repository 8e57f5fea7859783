"""What rows tell a plan without a loaded base: the shapes of batches, and the host's memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ..bases.turns import images_of
from ..config.choices import TASKS
from ..config.data import DataConfig
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.batches import training_set
from ..data.encoding import EncodingOptions
from ..data.rows import SPLITS, load_rows
from ..data.sampler import Sampler
from ..data.shapes import sequence_inputs
from ..data.sharing import cut_to, plan_trees, training_batches
from ..data.token_cache import encode_cached
from ..display import size
from ..errors import PackError
from ..files import is_pattern
from ..vision.tokenizer import tokenizer_of
from .plan import Shape

ShapesOf = Callable[[TrainConfig], set[Shape]]


class RowShapes(NamedTuple):
    """The rows of a run, encoded."""

    longest: int  # tokens of the longest row
    shapes_of: ShapesOf  # of a run's batches
    image_tokens: int = 0  # of all images


def row_shapes(
    model: str, columns: DataConfig, train: TrainConfig, lora: LoRAConfig
) -> RowShapes | None:
    """Return the shapes of a run's batches.

    None where rows are not encoded here: for tasks that have no single row for an example, phases,
    and a base whose tokenizer is not on this machine or has code.
    """
    if not TASKS[train.task].plans_rows or train.phases or train.fim_rate:
        return None
    try:
        tokenizer, _ = tokenizer_of(model, trust_remote_code=False)
    except PackError:
        return None

    splits = load_rows(replace(columns, hold_out="last"))
    options = EncodingOptions(
        train.loss_on, train.max_seq_length, ce_last_k=train.ce_last_k, long_rows=train.long_rows
    )
    examples, _ = encode_cached(
        splits.rows["train"], tokenizer, columns, options, row_format=splits.format
    )
    lengths = np.asarray(examples.lengths)
    targets = np.asarray(examples.target_counts)

    def shapes_of(train: TrainConfig) -> set[Shape]:
        if train.share_prefix != "off":
            return tree_shapes(train.batch_size, train.max_seq_length)

        inputs = sequence_inputs(train.max_seq_length)
        cut = np.minimum(lengths, inputs + 1)
        rows = SimpleNamespace(lengths=cut, target_counts=np.minimum(targets, cut))

        sampler = Sampler(cut, train.batch_size, inputs, train.seed, train.packing)
        return training_set(rows, sampler).shapes(train.iters)

    @cache
    def tree_shapes(batch_size: int, max_seq_length: int) -> set[Shape]:
        settings = replace(train, batch_size=batch_size, max_seq_length=max_seq_length)
        rows = cut_to(examples, max_seq_length)
        trees = plan_trees(settings, lora, rows, np.arange(len(rows)))
        inputs = sequence_inputs(max_seq_length)
        sampler = Sampler(rows.lengths, batch_size, inputs, train.seed, train.packing)
        return training_batches(trees, rows, sampler).shapes(train.iters)

    image_tokens = images.counts()["tokens"] if (images := images_of(tokenizer)) else 0
    return RowShapes(int(lengths.max()), shapes_of, image_tokens)


# The tokenizer's working memory for the rows at hand, and the mapped tokens of the last batches.
_WORKING_BYTES = 125_000_000
# Where a row begins; where its example ends, its row, length and targets; its place in an epoch's
# order and a share of its batch.
_ROW_BYTES = 8 + 40 + 8 + 40
_IN_MEMORY = 4.6  # of a .json file, as times its size


@dataclass(frozen=True)
class ExampleMemory:
    """Examples of a run, and what they need on the host (`python -m benchmarks data` measures it).

    Text is read, rendered and tokenized some rows at a time, and tokens are mapped from a file, so
    that most of it does not depend on the size of the data.

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
    in_memory = sum(
        nbytes
        for part, nbytes in zip(rows, sizes, strict=True)
        if len(part.sources) == 1 and not part.is_in_files()
    )
    return ExampleMemory(sum(map(len, rows)), sum(sizes), in_memory)
