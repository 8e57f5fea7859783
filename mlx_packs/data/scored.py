"""Preferences whose completions are scored: one number for each, at its last token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config.data import DataConfig
from ..errors import PackError
from .encoding import EncodingOptions, Example, Examples
from .formats import Row
from .preferences import PreferenceExamples, encode_preferences


class Scored(Sequence):
    """Some examples of others, whose only target is the score of their last token.

    A token is added after it, which no model reads: all tokens but the last one are inputs, and
    the target is predicted by the last input.
    """

    def __init__(self, examples: Examples, numbers: np.ndarray) -> None:
        self._items = examples.items
        self._numbers = numbers
        self.lengths = examples.lengths[numbers] + 1
        self.target_counts = np.ones(len(numbers), np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Example:
        own = self._items[int(self._numbers[i])]
        tokens = np.append(own.tokens, np.int32(0))
        return Example(tokens, np.arange(len(tokens)) == len(own.tokens), own.where)


def encode_scored(
    rows: Sequence[Row],
    tokenizer: Any,
    columns: DataConfig,
    options: EncodingOptions,
    num_proc: int | None = None,
) -> PreferenceExamples:
    """Return both completions of every row, to be scored, as `encode_preferences`.

    Rows with a completion of ``max_seq_length`` tokens or more are dropped, as TRL does: a cut one
    would be scored in its middle.
    """
    examples = encode_preferences(rows, tokenizer, columns, options, num_proc=num_proc)
    longest = examples.lengths.reshape(-1, 2).max(axis=1)
    kept = np.flatnonzero(longest < options.max_seq_length)

    if not len(kept):
        raise PackError(
            f"{examples.items[0].where}: no example has fewer than {options.max_seq_length} "
            "tokens, and one that is cut cannot be scored. Raise --max-seq-length.",
            "data",
            "max_seq_length",
        )

    items = Scored(examples, np.stack([2 * kept, 2 * kept + 1], axis=1).reshape(-1))
    result = replace(
        examples,
        items=items,
        loss_on="last token",
        cut=0,
        dropped=examples.dropped + len(longest) - len(kept),
        labels=examples.labels[kept],
    )
    result.lengths = items.lengths
    result.target_counts = items.target_counts
    return result
