"""The shapes of a run's batches by the lengths of its rows, for a plan without a loaded base."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ..bases.files import check_files, resolve_checkpoint
from ..bases.tokenizer import load_tokenizer
from ..config.data import DataConfig
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.batches import training_set
from ..data.encoding import EncodingOptions, Examples
from ..data.near_copies import MOST_COMPARED, compared_indices
from ..data.repeats import Repeats, cut_to, repeats_of
from ..data.rows import load_rows
from ..data.sampler import Sampler
from ..data.shapes import sequence_inputs
from ..data.sharing import plan_groups, plan_trees, training_batches, with_chains_merged
from ..data.token_cache import encode_cached
from ..errors import PackError
from .plan import Shape

ShapesOf = Callable[[TrainConfig], set[Shape]]
RepeatsOf = Callable[[int], Repeats | None]


class RowShapes(NamedTuple):
    """The rows of a run, encoded."""

    longest: int  # tokens of the longest row
    shapes_of: ShapesOf  # of a run's batches
    repeats_of: RepeatsOf  # in batches of a size


def row_shapes(
    model: str, columns: DataConfig, train: TrainConfig, lora: LoRAConfig
) -> RowShapes | None:
    """Return the shapes of a run's batches, and what its rows repeat of each other.

    None where rows are not encoded here: for tasks that have no single row for an example, phases,
    and a base whose tokenizer is not on this machine or has code.
    """
    if train.tasks != ("lm",) or train.phases or train.fim_rate:
        return None
    try:
        path = resolve_checkpoint(model)
        tokenizer = load_tokenizer(path, check_files(path), trust_remote_code=False)
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
        return _tree_shapes(settings, lora, cut_to(examples, max_seq_length))

    def repeats(batch_size: int) -> Repeats | None:
        chosen = compared_indices(len(examples), MOST_COMPARED)
        compared = Examples([examples[i] for i in chosen], examples.format, examples.loss_on)
        return repeats_of(compared, batch_size, train.max_seq_length)

    return RowShapes(int(lengths.max()), shapes_of, repeats)


def _tree_shapes(train: TrainConfig, lora: LoRAConfig, examples: Examples) -> set[Shape]:
    """Return the shapes of a run's batches by its --share-prefix."""
    whole = with_chains_merged(train, lora, examples)
    chosen = np.arange(len(whole))
    trees = plan_trees(train, lora, whole, chosen, packed=train.packing)
    if not train.packing:
        trees = plan_groups(train, whole, chosen, trees)

    inputs = sequence_inputs(train.max_seq_length)
    sampler = Sampler(whole.lengths, train.batch_size, inputs, train.seed, train.packing)
    return training_batches(trees, whole, sampler).shapes(train.iters)
