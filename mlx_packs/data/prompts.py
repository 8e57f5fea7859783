"""Prompts as tokens: the rows whose completions a run generates."""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config.data import DataConfig
from .batches import TokenCollate
from .chat_formats import completion_row
from .dataset import Batch, ExampleSet, Shape
from .formats import COMPLETION, PROMPT, Row, check_format, check_unicode
from .row_format import BadRows
from .shapes import doubled_widths
from .sources import Rows, as_rows, canonical_line
from .trees import TreeCollate, common_length, prefix_of, root_of, saved_share


@dataclass
class Prompts(ExampleSet):
    tokens: list[list[int]]  # of each, up to where the completion begins
    rows: Rows  # the rows that prompts are part of
    used: Sequence[int]  # the number of each prompt's row
    bad: BadRows  # left out
    fingerprint: str  # of the rows in use

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt, [N]."""
        return np.array([len(tokens) for tokens in self.tokens])

    def row(self, i: int) -> Row:
        return self.rows[self.used[i]]

    def where(self, i: int) -> str:
        return self.rows.where(self.used[i])


@dataclass(frozen=True)
class SharedPrompts:
    """How a prompt is computed once for its completions."""

    completions: int  # of a prompt
    longest: int  # most tokens of a completion
    limit: int  # most inputs of a row
    least: float  # share of the inputs of a batch that has to be saved

    def collate(self, prompts: Prompts, order: Sequence[int], tokens: TokenCollate) -> TreeCollate:
        """``tokens`` lays out the completions of the prompts in ``order``."""
        common = np.array([len(prompts.tokens[i]) for i in order])
        of_all = common_length(np.array(prompts.tokens[i]) for i in order)
        shape = self.completions * len(order), self._longest_row(common)

        root = root_of(of_all, shape, len(order), prefix_of(int(common.min())))
        return TreeCollate(tokens, common, self.completions, self.least, root=root)

    def shape(self, prompts: Prompts, order: Sequence[int]) -> Shape:
        """Completions are as long as they may be."""
        lengths = [len(prompts.tokens[i]) for i in order]
        rows = self.completions * len(order)
        tokens = TokenCollate(rows, self.limit, prefix=prefix_of(min(lengths)))
        width, slots = tokens.shape_of(self._longest_row(lengths), self.longest * rows)
        return self.collate(prompts, order, tokens).planned(width, slots, tokens.prefix)

    def _longest_row(self, lengths: Sequence[int]) -> int:
        return min(int(max(lengths)) + self.longest - 1, self.limit)

    def to_json(self, prompts: Prompts) -> dict:
        """Completions are as long as they may be."""
        prefix = float(np.mean([prefix_of(length) for length in prompts.lengths]))
        inputs = np.minimum(prompts.lengths + self.longest - 1, self.limit).mean()
        saved = saved_share((self.completions, float(inputs)), 1, prefix)
        return {"tokens": prefix, "saved": saved}


@dataclass(frozen=True)
class PromptCollate:
    """Makes batches of prompts, which have arrays once their completions are generated."""

    largest: Shape  # of the batches that may be generated
    shared: SharedPrompts | None = None  # None: a prompt is computed in every row

    def __call__(self, prompts: Prompts, order: Sequence[int]) -> Batch:
        return Batch({}, 0, 0, tuple(int(i) for i in order), prompts)

    def shapes(self, prompts: Prompts, orders: Iterator[Sequence[int]]) -> set[Shape]:
        if self.shared is None:
            return {self.largest}
        return {self.shared.shape(prompts, order) for order in orders}

    def few_shapes(self, sequences: int) -> set[Shape]:
        """Return shapes of which any batch of completions has one; each costs a compilation."""
        widths = doubled_widths(self.largest[0])
        return {(w, max(1, sequences * w * k // 4)) for w in widths for k in (1, 2, 3, 4)}

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """A batch stays whole: its completions are compared."""
        return [batch]


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    columns: DataConfig,
    max_seq_length: int,
    advance: Callable[[], None] = lambda: None,
) -> Prompts:
    """Return the prompt of every row as the chat template renders it.

    A row that cannot be used is a RowError, unless ``columns.on_bad_row`` leaves such rows out.
    ``advance`` is called after each row.
    """
    rows = as_rows(rows)
    bad = BadRows(columns.on_bad_row == "stop")
    fingerprint = hashlib.sha256()
    used = array("q")
    tokens: list[list[int]] = []

    def read(row: Row) -> list[int]:
        try:
            check_format(row, PROMPT, rows.where(0), columns, (PROMPT,))
            return _prompt(row, columns, tokenizer, max_seq_length)
        finally:
            advance()

    for i, row, prompt in bad.usable(rows, read):
        tokens.append(prompt)
        fingerprint.update(canonical_line(row))
        used.append(i)

    return Prompts(tokens, rows, used, bad, fingerprint.hexdigest())


def _prompt(row: Row, columns: DataConfig, tokenizer: Any, max_seq_length: int) -> list[int]:
    """The prompt must leave room for a completion."""
    prompt = completion_row(row, columns, row.value[columns.prompt_feature])
    text, tokens = COMPLETION.read(prompt, columns, tokenizer).prompt()
    check_unicode(row, text)
    if len(tokens) >= max_seq_length:
        raise row.error(
            f"the prompt has {len(tokens)} tokens, which leaves no room for a completion in "
            f"--max-seq-length {max_seq_length}.",
            "no target",
            "max_seq_length",
        )

    return tokens


def wanted_text(row: Row, columns: DataConfig) -> str | None:
    """Return the expected completion of a prompt; None without one."""
    if columns.completion_feature not in row.value:
        return None
    return COMPLETION.read(row, columns).answer
