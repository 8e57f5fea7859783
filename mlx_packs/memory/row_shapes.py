"""What rows tell a plan without a loaded base: the shapes of batches."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ..bases.turns import images_of
from ..config.choices import TASKS
from ..config.data import MOST_QUESTIONS, DataConfig, metric_of
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.batches import training_set
from ..data.dataset import Dataset
from ..data.encoding import EncodingOptions
from ..data.in_memory import InMemoryRows
from ..data.rows import load_rows
from ..data.sampler import Sampler
from ..data.shapes import TreeShape, sequence_inputs
from ..data.sharing import cut_to, plan_trees, training_batches
from ..data.token_cache import encode_cached
from ..errors import PackError
from ..files import is_pattern
from ..vision.tokenizer import tokenizer_of
from .plan import Shape
from .run_time import EpochOf, EpochSize

_SAMPLED_BATCHES = 1000

ShapesOf = Callable[[TrainConfig], set[Shape]]


class RowShapes(NamedTuple):
    """The rows of a run, encoded."""

    count: int
    longest: int  # tokens of the longest row
    shapes_of: ShapesOf  # of a run's batches
    epoch_of: EpochOf
    image_tokens: int = 0  # of all images


def row_shapes(
    model: str, columns: DataConfig, train: TrainConfig, lora: LoRAConfig
) -> RowShapes | None:
    """Return the shapes of a run's batches.

    None where rows are not encoded here: of a dataset of the Hub, for tasks that have no single row
    for an example, phases, and a base whose tokenizer is not on this machine or has code.
    """
    is_here = isinstance(columns.data, InMemoryRows) or columns.data == "tiny"
    is_here = is_here or Path(columns.data).expanduser().exists()
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

    @cache
    def dataset_of(batch_size: int, max_seq_length: int) -> Dataset:
        settings = replace(train, batch_size=batch_size, max_seq_length=max_seq_length)
        inputs = sequence_inputs(max_seq_length)
        sampler = partial(Sampler, batch_size=batch_size, inputs=inputs, seed=train.seed)
        if train.share_prefix == "off":
            cut = np.minimum(lengths, inputs + 1)
            rows = SimpleNamespace(lengths=cut, target_counts=np.minimum(targets, cut))
            return training_set(rows, sampler(cut, packing=train.packing))

        rows = cut_to(examples, max_seq_length)
        trees = plan_trees(settings, lora, rows, np.arange(len(rows)))
        return training_batches(trees, rows, sampler(rows.lengths, packing=train.packing))

    @cache
    def shapes_by_size(batch_size: int, max_seq_length: int) -> set[Shape]:
        return dataset_of(batch_size, max_seq_length).shapes(train.iters)

    @cache
    def epoch_by_size(batch_size: int, max_seq_length: int) -> EpochSize:
        held_out = splits.rows["test"] or splits.rows["valid"]
        others = (-(-len(rows) // batch_size) for rows in (splits.rows["valid"], held_out))
        questions = 0
        if metric_of(train.metric, columns):
            questions = min(MOST_QUESTIONS, len(held_out))
        epoch = _epoch(dataset_of(batch_size, max_seq_length), batch_size)
        return EpochSize(*epoch, *others, questions, float(targets.mean()))

    def shapes_of(train: TrainConfig) -> set[Shape]:
        return shapes_by_size(train.batch_size, train.max_seq_length)

    def epoch_of(train: TrainConfig) -> EpochSize:
        return epoch_by_size(train.batch_size, train.max_seq_length)

    image_tokens = images.counts()["tokens"] if (images := images_of(tokenizer)) else 0
    return RowShapes(len(examples), int(lengths.max()), shapes_of, epoch_of, image_tokens)


def _epoch(dataset: Dataset, batch_size: int) -> tuple[int, float]:
    """Return the batches of an epoch and, by a sample, the mean inputs of their sequences."""
    orders = dataset.sampler.epoch(0)
    inputs = []
    for i in range(0, len(orders), -(-len(orders) // _SAMPLED_BATCHES)):
        (shape,) = dataset.collate.shapes(dataset.examples, iter([orders[i]]))
        if isinstance(shape, TreeShape):
            inputs.append(shape.computed(batch_size) / batch_size)
        else:
            inputs.append(shape[0])
    return len(orders), float(np.mean(inputs))
