"""Labelled rows as tokens, and batches of them with what the loss compares with.

A head reads the class at the last token of a text, or of the prompt of a chat.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..bases.tokenizer import text_tokens
from ..config.data import DataConfig
from ..errors import PackError
from .bad_rows import BadRows, RowError
from .batches import PackedCollate, TokenCollate, split_rows
from .chat_formats import about_conversation
from .dataset import Batch, Shape
from .encoding import EncodingOptions, Examples
from .formats import COMPLETION, TEXT, Row
from .labels import COLUMNS, Classes, Label, check_input, read_label
from .preferences import Scored
from .sampler import Order
from .sources import Rows, Source, as_rows
from .token_cache import encode_cached

NO_LIMIT = 1 << 30  # of the tokens of an example
_ANSWER = "."  # where a prompt needs a completion, and none is read


@dataclass
class LabelledExamples(Examples):
    """Examples, each with its label as `Classes.encoded` has it."""

    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: "Sequence[LabelledExamples]") -> "LabelledExamples":
        joined = super().joined(parts)
        joined.values = np.concatenate([part.values for part in parts])
        return joined


class _Inputs(Source):
    """Rows as they are encoded: a text, or a prompt with an answer; and the label."""

    def __init__(self, rows: Rows, names: DataConfig, classes: Classes) -> None:
        self.rows = rows
        self.names = names
        self.classes = classes
        self.column = COLUMNS[classes.problem]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        names = self.names
        for row in self.rows[start:stop]:
            text = row.value.get(names.text_feature)
            content = {names.text_feature: text}
            if self.classes.chat:
                prompt = row.value.get(names.chat_feature)
                content = {
                    **about_conversation(row),
                    names.prompt_feature: text if prompt is None else prompt,
                    names.completion_feature: _ANSWER,
                }

            if self.column in row.value:  # for the fingerprint
                content[self.column] = row.value[self.column]
            yield row.with_value(content)

    def where(self, i: int) -> str:
        return self.rows.where(i)

    def nbytes(self, start: int, stop: int) -> int:
        return self.rows[start:stop].nbytes()

    def content_key(self) -> bytes | None:
        """Hash the rows, and how they are read."""
        key = self.rows.content_key()
        how = f"{self.column} {self.classes.chat}"
        return key and key + how.encode()

    def is_in_files(self) -> bool:
        return self.rows.is_in_files()

    def places(self) -> Callable[[int], str]:
        return self.rows.places()


def encode_labelled(
    rows: Sequence[Row],
    tokenizer: Any,
    names: DataConfig,
    options: EncodingOptions,
    classes: Classes,
    num_proc: int | None = None,
    advance: Callable[[], None] | None = None,
    labelled: bool = True,
) -> LabelledExamples:
    """Return every row as an example of its class.

    Texts are cut to ``max_seq_length``. Longer chats are dropped, since their end says what is
    asked. Without ``labelled`` rows need no label, and what is too long is an error.

    Raises:
        RowError: A row cannot be used, unless ``names.on_bad_row`` leaves such rows out.
        PackError: No row can be used.
    """
    rows = as_rows(rows)
    used, labels, bad = _checked(rows, names, classes, labelled)
    source = Rows([_Inputs(rows.select(used), names, classes)])
    options = replace(options, max_seq_length=NO_LIMIT, loss_on=None)

    row_format = COMPLETION if classes.chat else TEXT
    examples, _ = encode_cached(
        source, tokenizer, names, options, row_format=row_format, num_proc=num_proc, advance=advance
    )
    if examples.items.parts["tokens"].min() < 0:
        raise PackError(
            f"--task classify: {rows.where(0)} and others have images, which no classifier reads. "
            "Leave them out.",
            "unsupported",
            "task",
        )

    numbers = examples.items.parts["rows"]
    for i, error in examples.bad.errors:
        bad.leave_out(int(used[i]), error)

    result = LabelledExamples(
        examples.items,
        "chat" if classes.chat else "text",
        "last token",
        bad=bad.in_order(),
        fingerprint=examples.fingerprint,
    )
    result.lengths = examples.lengths
    result.target_counts = examples.target_counts

    if labelled:
        result.values = classes.encoded([labels[i] for i in numbers])
    else:
        result.values = np.zeros(len(numbers), np.int32)
    return result


def fitted(
    examples: LabelledExamples, tokenizer: Any, classes: Classes, limit: int
) -> LabelledExamples:
    """Return examples of at most ``limit`` tokens with what is read of each.

    Raises a PackError if all are too long.
    """
    prompts = prompt_lengths(examples, tokenizer, classes)
    cut = 0

    if classes.chat:
        fits = prompts < limit
    else:
        cut = int((prompts >= limit).sum())
        fits = np.ones(len(prompts), bool)
        prompts = np.minimum(prompts, limit - 1)

    kept = np.flatnonzero(fits)
    if not len(kept):
        raise PackError(
            f"{examples.items[0].where}: no example has fewer than {limit} tokens, and the end of "
            "a chat cannot be cut. Raise --max-seq-length.",
            "data",
            "max_seq_length",
        )

    items = Scored(examples, kept, prompts)
    result = replace(
        examples,
        items=items,
        cut=cut,
        dropped=len(prompts) - len(kept),
        values=examples.values[kept],
    )
    result.lengths = items.lengths
    result.target_counts = items.target_counts
    return result


def prompt_lengths(examples: Examples, tokenizer: Any, classes: Classes) -> np.ndarray:
    """Return how many tokens of each example come before its answer, or are its text, [N]."""
    lengths = np.asarray(examples.lengths)
    if not classes.chat:
        adds_end = text_tokens(tokenizer, "a")[-1:] != [tokenizer.eos_token_id]
        return lengths - adds_end  # which the encoding adds to texts, and the tokenizer does not

    hits = np.flatnonzero(examples.items.parts["target"])
    starts = np.cumsum(lengths) - lengths
    return hits[np.searchsorted(hits, starts)] - starts


def _checked(
    rows: Rows, names: DataConfig, classes: Classes, labelled: bool
) -> tuple[np.ndarray, list[Label], BadRows]:
    """Return the numbers of usable rows, their labels, and the other rows."""
    if not len(rows):
        raise PackError("--data: the split has no examples.", "data")

    bad = BadRows(names.on_bad_row == "stop")
    used: list[int] = []
    labels: list[Label] = []
    column = COLUMNS[classes.problem]

    for i, row in enumerate(rows):
        try:
            _check_input(row, rows, names, classes)
            if labelled:
                label = read_label(row, column)
                classes.check(row, label)
                labels.append(label)
        except RowError as error:
            bad.add(i, error)
            continue

        used.append(i)

    bad.check_some_left(len(rows))
    return np.array(used), labels, bad


def _check_input(row: Row, rows: Rows, names: DataConfig, classes: Classes) -> None:
    """Check that a row says something, in the form of the others or of what was trained on."""
    row_format = check_input(row, names)
    if not classes.chat and row_format is not TEXT:
        raise row.error(
            "is a chat, but the classifier was trained on texts, without a chat template. Give "
            f"'{names.text_feature}'.",
            "another format",
        )


@dataclass(frozen=True)
class LabelCollate:
    """Lays out tokens, and adds ``labels``: of each of M targets that of its example.

    It is [M] or [M, classes], as `Classes.encoded` has it; 0 where a target is padding.
    """

    tokens: TokenCollate | PackedCollate

    def __call__(self, examples: LabelledExamples, order: Order) -> Batch:
        return self._labelled(self.tokens(examples, order))

    def shapes(self, examples: LabelledExamples, orders: Iterator[Order]) -> set[Shape]:
        return self.tokens.shapes(examples, orders)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        tokens = {name: values for name, values in batch.inputs.items() if name != "labels"}
        targets = int((batch.inputs["owners"] >= 0).sum())
        whole = replace(batch, inputs=tokens, targets=targets)
        return [self._labelled(piece) for piece in split_rows(whole, parts)]

    def _labelled(self, batch: Batch) -> Batch:
        values = batch.source.values
        none = np.zeros((1, *values.shape[1:]), values.dtype)  # of padding, whose owner is -1
        own = np.concatenate([values[list(batch.examples)], none])

        batch = batch.having(labels=own[batch.inputs["owners"]])
        # the head reads the last token, but all tokens before it decide
        return replace(batch, targets=batch.computed)
