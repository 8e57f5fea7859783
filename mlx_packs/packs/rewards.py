"""Rewards of completions by a reward model."""

import mlx.nn as nn
import numpy as np

from ..bases.model import BaseModel
from ..config.data import DataConfig
from ..data.encoding import EncodingOptions, Examples, encode
from ..data.formats import COMPLETION
from ..data.in_memory import Data, source_of
from ..errors import PackError
from ..objectives.reader import head_reader
from .compatibility import text_limit
from .manifest import template_kwargs_of
from .pack import Pack

_NO_LIMIT = 1 << 30  # of the tokens of a completion with its prompt


def rewards(
    base: BaseModel, completions: Data, pack: Pack, head: nn.Module, batch_size: int
) -> np.ndarray:
    """float32 [N]; `packs.base.Base.rewards` has the rest."""
    if batch_size < 1:
        raise PackError(
            f"rewards: batch_size must be positive, but got {batch_size}.", flag="batch_size"
        )

    source = source_of(completions)
    if not hasattr(source, "splits"):
        raise PackError(
            "rewards: completions must be examples in memory, but got a name.", flag="completions"
        )

    rows = source.splits["train"]
    if not len(rows):
        raise PackError("rewards: there are no completions.", flag="completions")

    options = EncodingOptions("completion", _NO_LIMIT, base.vocab_size)
    columns = DataConfig(template_kwargs=template_kwargs_of(pack.manifest))
    encoded = encode(rows, base.tokenizer, columns, options, COMPLETION)
    _check_lengths(encoded, text_limit(pack.manifest, base.config))

    reader = head_reader(base.model, head, base.name, "reward")
    return reader.of_rows([example.tokens for example in encoded.items], batch_size)[:, 0]


def _check_lengths(examples: Examples, limit: int) -> None:
    """Raise a PackError for a completion that training would have dropped for its length."""
    too_long = np.flatnonzero(examples.lengths >= limit)
    if len(too_long):
        first = int(too_long[0])
        raise PackError(
            f"{examples.items[first].where}: has {examples.lengths[first]:,} tokens with its "
            f"prompt, but the pack scores completions of fewer than {limit:,}, as in its training. "
            "Shorten it.",
            "data",
            "completions",
        )
