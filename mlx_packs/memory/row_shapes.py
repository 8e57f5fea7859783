"""What rows tell a plan without a loaded base: the shapes of batches."""

from collections.abc import Callable
from dataclasses import replace
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
from ..data.rows import load_rows
from ..data.sampler import Sampler
from ..data.shapes import sequence_inputs
from ..data.sharing import cut_to, plan_trees, training_batches
from ..data.token_cache import encode_cached
from ..errors import PackError
from ..files import is_pattern
from ..vision.tokenizer import tokenizer_of
from .plan import Shape

ShapesOf = Callable[[TrainConfig], set[Shape]]


class RowShapes(NamedTuple):
    """The rows of a run, encoded."""

    count: int
    longest: int  # tokens of the longest row
    shapes_of: ShapesOf  # of a run's batches
    image_tokens: int = 0  # of all images


def row_shapes(
    model: str, columns: DataConfig, train: TrainConfig, lora: LoRAConfig
) -> RowShapes | None:
    """Return the shapes of a run's batches.

    None where rows are not encoded here: of a dataset of the Hub, for tasks that have no single row
    for an example, phases, and a base whose tokenizer is not on this machine or has code.
    """
    is_here = columns.data == "tiny" or Path(columns.data).expanduser().exists()
    if columns.hf_dataset is not None or not (is_here or is_pattern(columns.data)):
        return None
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
    return RowShapes(len(examples), int(lengths.max()), shapes_of, image_tokens)
