"""The shapes of a run's batches by the lengths of its rows, for a plan without a loaded base."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from ..bases.files import check_files, resolve_checkpoint
from ..bases.tokenizer import load_tokenizer
from ..config.data import DataConfig
from ..config.schema import TrainConfig
from ..data.batches import training_set
from ..data.encoding import EncodingOptions
from ..data.rows import load_rows
from ..data.sampler import Sampler
from ..data.shapes import sequence_inputs
from ..data.token_cache import encode_cached
from ..errors import PackError
from .plan import Shape

ShapesOf = Callable[[TrainConfig], set[Shape]]


def row_shapes(model: str, columns: DataConfig, train: TrainConfig) -> tuple[int, ShapesOf] | None:
    """Return the tokens of the longest row, and a function for the shapes of a run's batches.

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
    lengths, targets = np.asarray(examples.lengths), np.asarray(examples.target_counts)

    def shapes_of(train: TrainConfig) -> set[Shape]:
        inputs = sequence_inputs(train.max_seq_length)
        cut = np.minimum(lengths, inputs + 1)
        rows = SimpleNamespace(lengths=cut, target_counts=np.minimum(targets, cut))
        sampler = Sampler(cut, train.batch_size, inputs, train.seed, train.packing)
        return training_set(rows, sampler).shapes(train.iters)

    return int(lengths.max()), shapes_of
