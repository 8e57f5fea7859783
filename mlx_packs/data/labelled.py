"""Labelled rows as tokens, with what the loss compares with.

A head reads the class at the last token of a text, or of the prompt of a chat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..bases.tokenizer import text_tokens
from ..config.data import DataConfig
from ..errors import PackError
from .chat_formats import completion_row
from .encoding import EncodingOptions, Examples
from .formats import CHAT, COMPLETION, TEXT, Row
from .labels import COLUMNS, Classes, check_input, read_label
from .row_format import all_too_long
from .sources import ConvertedRows, Rows, as_rows
from .texts import TextGroups
from .token_cache import encode_cached

NO_LIMIT = 1 << 30  # of the tokens of an example


def encode_labelled(
    rows: Sequence[Row],
    tokenizer: Any,
    names: DataConfig,
    options: EncodingOptions,
    classes: Classes,
    num_proc: int | None = None,
    labelled: bool = True,
) -> TextGroups:
    """Return every row as an example of one text, with its label as `Classes.encoded` has it.

    Texts are cut to fewer than ``max_seq_length`` tokens. Longer chats are dropped, since their
    end says what is asked. Without ``labelled`` rows need no label.
    """
    rows = as_rows(rows)
    column = COLUMNS[classes.problem]

    convert = partial(_input_rows, names=names, classes=classes, labelled=labelled)
    how = f"{column} {classes.chat} {classes.labels} {labelled}"
    source = Rows([ConvertedRows(rows, convert, how)])
    whole = replace(options, max_seq_length=NO_LIMIT, loss_on=None)

    row_format = COMPLETION if classes.chat else TEXT
    examples, _ = encode_cached(
        source, tokenizer, names, whole, row_format=row_format, num_proc=num_proc
    )
    if examples.items.parts["tokens"].min() < 0:
        raise PackError(
            f"--task classify: {rows.where(0)} and others have images, which no classifier reads. "
            "Leave them out.",
            "unsupported",
            "task",
        )

    numbers = examples.items.parts["rows"]
    labels = np.zeros(len(numbers), np.int32)
    if labelled:
        labels = classes.encoded([read_label(row, column) for row in rows.select(numbers)])
    return _fitted(examples, labels, tokenizer, classes, options.max_seq_length)


def _input_rows(row: Row, names: DataConfig, classes: Classes, labelled: bool) -> Iterator[Row]:
    """Yield a row as it is encoded: a text, or a prompt with an answer that is not read."""
    _check_input(row, names, classes)
    column = COLUMNS[classes.problem]
    if labelled:
        classes.check(row, read_label(row, column))

    text = row.value.get(names.text_feature)
    content = {names.text_feature: text}
    if classes.chat:
        prompt = row.value.get(names.chat_feature)
        content = dict(completion_row(row, names, text if prompt is None else prompt).value)

    if column in row.value:  # for the fingerprint
        content[column] = row.value[column]
    yield row.with_value(content)


def _fitted(
    examples: Examples, labels: np.ndarray, tokenizer: Any, classes: Classes, limit: int
) -> TextGroups:
    """Return what is read of each example, fewer than ``limit`` tokens."""
    prompts = _read_lengths(examples, tokenizer, classes)
    cut = 0

    if classes.chat:
        fits = prompts < limit
    else:
        cut = int((prompts >= limit).sum())
        fits = np.ones(len(prompts), bool)
        prompts = np.minimum(prompts, limit - 1)

    fitting = np.flatnonzero(fits)
    if not len(fitting):
        fault = (
            f"has fewer than {limit} tokens, and the end of a chat cannot be cut. Raise "
            "--max-seq-length."
        )
        raise all_too_long(examples.items[0].where, fault)

    examples = replace(examples, cut=cut, dropped=len(prompts) - len(fitting))
    texts = examples.items.select(fitting, prompts[fitting])
    row_format = CHAT if classes.chat else TEXT
    return TextGroups.of_examples(row_format, examples, texts, labels[fitting])


def _read_lengths(examples: Examples, tokenizer: Any, classes: Classes) -> np.ndarray:
    """Return how many tokens of each example come before its answer, or are its text, [N]."""
    if classes.chat:
        return examples.items.prompt_lengths

    adds_end = text_tokens(tokenizer, "a")[-1:] != [tokenizer.eos_token_id]
    return examples.lengths - adds_end  # which the encoding adds to texts, and the tokenizer not


def _check_input(row: Row, names: DataConfig, classes: Classes) -> None:
    """Check that a row says something, in the form of the others or of what was trained on."""
    row_format = check_input(row, names)
    if not classes.chat and row_format is not TEXT:
        raise row.error(
            "is a chat, but the classifier was trained on texts, without a chat template. Give "
            f"'{names.text_feature}'.",
            "another format",
        )
