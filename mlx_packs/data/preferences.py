"""Rows of preferences as tokens and batches: two examples for each row, one after the other.

A row {prompt, chosen, rejected} gives the prompt with either completion. A rated completion
{prompt, completion, label} gives itself, and its prompt with the completion of the row before it,
by which KTO measures how far the model is from its reference (arXiv:2402.01306; TRL's columns).
A reward model scores both completions.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..config.data import DataConfig
from .batches import TokenCollate, allowed_shapes, split_rows, token_collate
from .chat_formats import completion_row, prompt_and_completion
from .dataset import Batch, Dataset, FixedOrder, Tree, by_length
from .encoding import EncodingOptions, Example, Examples, encode
from .formats import COMPLETION, PREFERENCE, Row, format_of
from .row_format import RowFormat, all_too_long, messages_of, optional, truth_of
from .sampler import GroupedSampler, Order, grouped
from .shapes import Shape
from .sources import ConvertedRows, Rows, as_rows
from .task_formats import PREFERENCE_FORMATS, RATED, RATED_FORMATS
from .texts import TextGroups
from .token_cache import encode_cached
from .trees import TreeCollate, TreePlan, felled

_OF_ROWS = ("labels", "reference")  # arrays of which each row has its own part


def encode_preferences(
    rows: Sequence[Row],
    tokenizer: Any,
    columns: DataConfig,
    options: EncodingOptions,
    row_format: RowFormat = PREFERENCE,
    num_proc: int | None = None,
    advance: Callable[[], None] | None = None,
) -> Examples:
    """Return two examples for each row of `PREFERENCE` or `RATED`; targets are the completions.

    Labels are float32: 1 if the first example of a row is desirable, else 0. They are all 1 if the
    second one is what was rejected.

    ``num_proc`` and ``advance`` are as of `encode_cached`.
    """
    rows = as_rows(rows)
    sides = both_completions(rows, columns)
    if row_format is RATED:
        sides = Rows([ConvertedRows(rows, partial(_rated_rows, names=columns), "rated")])

    options = replace(options, loss_on="completion")
    examples, _ = encode_cached(
        sides,
        tokenizer,
        columns,
        options,
        row_format=COMPLETION,
        num_proc=num_proc,
        advance=advance,
    )
    numbers = examples.items.parts["rows"]
    if row_format is RATED:
        items: Sequence[Example] = Mismatched(examples, options.max_seq_length)
        labels = np.float32([truth_of(row, "label") for row in rows.select(numbers)])
    else:
        first = np.flatnonzero((numbers[:-1] % 2 == 0) & (numbers[:-1] + 1 == numbers[1:]))
        items = examples.items.select((first[:, None] + np.arange(2)).reshape(-1))
        labels = np.ones(len(first), np.float32)

    if not len(labels):
        fault = f"has targets within --max-seq-length {options.max_seq_length}. Raise it."
        raise all_too_long(rows.where(0), fault)

    dropped = len(rows) - len(examples.bad) - len(labels)
    return replace(
        examples, items=items, format=row_format.name, dropped=dropped, labels=labels, per_row=2
    )


def encode_tokens(
    rows: Sequence[Row],
    tokenizer: Any,
    columns: DataConfig,
    options: EncodingOptions,
    row_format: RowFormat,
) -> Examples:
    """Encode rows of any format except pairs; preferences have both completions."""
    encoded = encode_preferences if row_format in (PREFERENCE, RATED) else encode
    return encoded(rows, tokenizer, columns, options, row_format)


def _rated_rows(row: Row, names: DataConfig) -> Iterator[Row]:
    """Yield a row whose label and completion can be used."""
    format_of(row, names, RATED_FORMATS)
    _read_side(row, names.completion_feature, names)
    truth_of(row, "label")
    yield row


def _read_side(row: Row, column: str, names: DataConfig) -> tuple[tuple, tuple]:
    """Return prompt and completion of a column as they are, and as turns that say something."""
    values = split_prompt(row, column, names)
    side = row.with_value(dict(zip((names.prompt_feature, column), values, strict=True)))
    turns = prompt_and_completion(side, names.prompt_feature, column)

    parts = [turn.message.get(key) for turn in turns[1] for key in ("content", "tool_calls")]
    if not any(part.strip() if isinstance(part, str) else part for part in parts):
        raise row.error(f"'{column}' is empty.", "empty")
    return values, turns


def split_prompt(row: Row, column: str, names: DataConfig) -> tuple[Any, Any]:
    """Without a prompt the last turn is the completion."""
    value = messages_of(row.value[column])
    if (prompt := optional(row, names.prompt_feature)) is not None:
        return prompt, value

    start = len(value) - 1 if isinstance(value, list) else 0
    if start < 1:
        raise row.error(
            f"'{column}' must be a list of messages that ends with the completion, since there is "
            f"no '{names.prompt_feature}'.",
            "wrong type",
        )
    return value[:start], value[start:]


def both_completions(rows: Sequence[Row], names: DataConfig) -> Rows:
    """Return two completions for each row: the chosen one and the rejected one."""
    convert = partial(_completion_rows, names=names)
    return Rows([ConvertedRows(as_rows(rows), convert, "sides", per_row=2)])


def _completion_rows(row: Row, names: DataConfig) -> Iterator[Row]:
    """Yield both completions, which have one prompt and differ."""
    format_of(row, names, PREFERENCE_FORMATS)
    sides = [_read_side(row, column, names) for column in PREFERENCE.required]
    (chosen_prompt, chosen), (rejected_prompt, rejected) = (turns for _, turns in sides)
    if chosen_prompt != rejected_prompt:
        raise row.error(
            "the prompts of 'chosen' and 'rejected' differ: their messages before the last answer "
            "must be the same.",
            "prompts differ",
        )
    if chosen == rejected:
        raise row.error("'chosen' and 'rejected' are the same.", "same completions")

    for (prompt, completion), _ in sides:
        yield completion_row(row, names, prompt, completion)


class Mismatched(Sequence):
    """Each of N examples, and after it its prompt with the completion of the one before it.

    The first one has the completion of the last. TRL does the same within each batch.
    """

    def __init__(self, examples: Examples, limit: int) -> None:
        self._items = examples.items
        self._limit = limit
        self._prompts = examples.items.prompt_lengths

        completions = np.roll(examples.target_counts, 1)
        lengths = np.minimum(self._prompts + completions, limit)

        self.lengths = np.stack([examples.lengths, lengths], axis=1).reshape(-1)
        targets = np.stack([examples.target_counts, lengths - self._prompts], axis=1)
        self.target_counts = targets.reshape(-1)

    def __len__(self) -> int:
        return 2 * len(self._items)

    def __getitem__(self, i: int) -> Example:
        i = range(len(self))[i]
        example = self._items[i // 2]
        if i % 2 == 0:
            return example

        other = self._items[i // 2 - 1]
        prompt = int(self._prompts[i // 2])
        tokens = np.concatenate([example.tokens[:prompt], other.tokens[other.target]])
        tokens = tokens[: self._limit]
        return Example(tokens, np.arange(len(tokens)) >= prompt, example.where)


def encode_scored(
    rows: Sequence[Row],
    tokenizer: Any,
    columns: DataConfig,
    options: EncodingOptions,
    num_proc: int | None = None,
    advance: Callable[[], None] | None = None,
) -> TextGroups:
    """Return both completions of every row, to be scored; labels are 1 and 0.

    Rows with a completion of ``max_seq_length`` tokens or more are dropped, as TRL does: a cut one
    would be scored in its middle.
    """
    examples = encode_preferences(
        rows, tokenizer, columns, options, num_proc=num_proc, advance=advance
    )
    longest = examples.row_lengths.max(axis=1)
    fitting = np.flatnonzero(longest < options.max_seq_length)

    if not len(fitting):
        fault = (
            f"has fewer than {options.max_seq_length} tokens, and one that is cut cannot be "
            "scored. Raise --max-seq-length."
        )
        raise all_too_long(examples.items[0].where, fault)

    texts = examples.items.select(grouped(fitting))
    labels = np.tile(np.float32([1, 0]), (len(fitting), 1))
    dropped = examples.dropped + len(longest) - len(fitting)
    return TextGroups.of_examples(
        PREFERENCE, replace(examples, cut=0, dropped=dropped), texts, labels
    )


@dataclass(frozen=True)
class LabelledCollate:
    """Lays out the examples of rows as tokens, and adds the ``labels`` of rows, float32 [slots].

    Examples 2 p and 2 p + 1 of a batch are of row p; labels are 1 where the first one is
    desirable. A loss is a mean over rows.
    """

    tokens: TokenCollate | TreeCollate  # lays out the examples

    def __call__(self, examples: Examples, order: Order) -> Batch:
        batch = self.tokens(examples, order)
        labels = examples.labels[[i // 2 for i in batch.examples[::2]]]
        return _with_rows(batch, {"labels": labels}, self.tokens.batch_size)

    def shapes(self, examples: Examples, orders: Iterator[Order]) -> set[Shape]:
        return self.tokens.shapes(examples, orders)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        if isinstance(batch.layout, Tree):
            rows = self.split(felled(batch), parts)
            return [self.tokens.tree(piece, batch.layout.prefix) for piece in rows]

        of_rows = {n: np.asarray(batch.inputs[n]) for n in _OF_ROWS if n in batch.inputs}
        tokens = {n: values for n, values in batch.inputs.items() if n not in of_rows}
        whole = dataclasses.replace(batch, inputs=tokens)

        divided = []
        start = 0
        for piece in split_rows(whole, parts, together=2):
            stop = start + len(piece.examples) // 2
            parts_of_rows = {name: values[start:stop] for name, values in of_rows.items()}
            divided.append(_with_rows(piece, parts_of_rows, len(piece.inputs["tokens"])))
            start = stop
        return divided


def _with_rows(batch: Batch, of_rows: dict[str, np.ndarray], sequences: int) -> Batch:
    """Make the loss a mean over rows, and pad their arrays."""
    padded = {}
    for name, values in of_rows.items():
        padding = [(0, sequences // 2 - len(values)), *[(0, 0)] * (values.ndim - 1)]
        padded[name] = np.pad(values, padding)
    return dataclasses.replace(batch.having(**padded), denominator=len(batch.examples) // 2)


def preference_set(
    examples: Examples, sampler: GroupedSampler, trees: TreePlan | None = None
) -> Dataset:
    """Without ``trees`` batches have few shapes if each costs a compilation."""
    if trees is not None:
        tokens = trees.collate(examples, sampler)
    else:
        tokens = token_collate(sampler, allowed_shapes(examples, sampler))
    return Dataset(examples, LabelledCollate(tokens), sampler)


def preference_evaluation(
    examples: Examples,
    batch_size: int,
    inputs: int,
    chosen: np.ndarray,
    trees: TreePlan | None = None,
) -> Dataset:
    """Return the chosen rows once, by length."""
    sampler = GroupedSampler(examples.lengths, 2 * batch_size, inputs)
    rows = by_length(examples.row_lengths.max(axis=1), batch_size, chosen)
    order = FixedOrder([grouped(each) for each in rows.orders])
    return dataclasses.replace(preference_set(examples, sampler, trees=trees), sampler=order)
