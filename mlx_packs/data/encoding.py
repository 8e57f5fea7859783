"""Rows as tokens; a token is a target if it starts inside a supervised span of the row's text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..config.schema import DataConfig
from ..errors import PackError
from .conversations import Span
from .fim import SPARE, FillInTheMiddle, arranged, continued, sentinels
from .formats import Row, Text, TokenFormat, check_unicode, common_format, format_of

# Part of the token cache's key: raise it whenever the same rows give other tokens or targets.
ENCODING_VERSION = 1


@dataclass(frozen=True)
class Example:
    """Tokens of one row, or of a piece of it, and which of them are targets."""

    tokens: np.ndarray  # int32 [L]
    target: np.ndarray  # bool [L], True where the token is to be predicted
    where: str  # the row that messages name


@dataclass
class Examples:
    """The examples of a split; a row that was split has one for each of its pieces."""

    items: Sequence[Example]
    format: str  # of the rows
    loss_on: str
    cut: int = 0  # rows that were longer than the maximum
    dropped: int = 0  # rows that lost every target by that

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example."""
        return np.array([len(e.tokens) for e in self.items])

    @cached_property
    def target_counts(self) -> np.ndarray:
        """Supervised tokens of each example."""
        return np.array([int(e.target.sum()) for e in self.items])

    @property
    def targets(self) -> int:
        """Supervised tokens of all examples."""
        return int(self.target_counts.sum())

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class EncodingOptions:
    """How rows become tokens and targets."""

    loss_on: str | None = None  # as --loss-on; None is the default of the rows' format
    max_seq_length: int = 2048  # what is longer is cut, and dropped where no target is left
    vocab_size: int | None = None  # token ids must lie below it; None does not check
    ce_last_k: int | None = None  # keep only the last K targets of an example; None keeps all
    long_rows: str = "cut"  # of a long text the beginning, or `split` it into several examples
    fim: FillInTheMiddle | None = None  # rearranges texts to fill in the middle


DEFAULTS = EncodingOptions()


def token_format(row: Row, columns: DataConfig) -> TokenFormat:
    """Return the format of a row that a causal model trains on."""
    row_format = format_of(row, columns)
    if not isinstance(row_format, TokenFormat):
        raise row.error(
            f"the examples are {row_format.name}, which encoders train on. Pass --task embedding, "
            "and as --model a folder of sentence-transformers.",
            "conflict",
            "task",
        )
    return row_format


def encode(
    rows: Sequence[Row], tokenizer: Any, columns: DataConfig, options: EncodingOptions = DEFAULTS
) -> Examples:
    """Return tokens and targets of every row; all must have one format."""
    if not rows:
        raise PackError("--data: the split has no examples.", "data")
    row_format = token_format(rows[0], columns)
    loss_on = row_format.resolve_loss_on(options.loss_on)
    fim, is_split = options.fim, options.long_rows == "split"
    if not isinstance(row_format, Text) and (fim is not None or is_split):
        raise PackError(
            f"--{'fim-rate' if fim else 'long-rows split'}: is for text examples, but "
            f"{rows[0].where} is {row_format.name}.",
            "conflict",
        )
    common_format(rows, columns)
    rendered = [row_format.render(row, columns, loss_on, tokenizer) for row in rows]
    texts = [text for text, _ in rendered]
    for row, text in zip(rows, texts, strict=True):
        check_unicode(row, text)
    encodings = _encodings(tokenizer, texts, row_format.special_tokens, loss_on, fim)
    examples = Examples([], row_format.name, loss_on)
    ends = set(tokenizer.eos_token_ids) | set(tokenizer.all_special_ids)
    pieces = _Pieces(tokenizer, options.max_seq_length, is_split, fim) if fim or is_split else None
    for i, (row, (text, spans)) in enumerate(zip(rows, rendered, strict=True)):
        tokens = list(encodings["input_ids"][i])
        if row_format.special_tokens and tokens[-1:] != [tokenizer.eos_token_id]:
            tokens.append(tokenizer.eos_token_id)
        if pieces is not None:
            pieces.add(i, text, tokens, encodings["offset_mapping"][i] if fim else None)
            continue
        if loss_on == "all":
            target = np.ones(len(tokens), dtype=bool)
        else:
            target = _targets(encodings["offset_mapping"][i], tokens, spans, ends)
        _append(examples, row, tokens, target, options)
    if pieces is not None:
        for i, tokens in pieces.encoded():
            _append(examples, rows[i], tokens, np.ones(len(tokens), dtype=bool), options)
        examples.cut += pieces.cut
    if not examples.items:
        raise rows[0].error(
            f"no example has a target within {options.max_seq_length} tokens.",
            flag="max_seq_length",
        )
    return examples


def _encodings(
    tokenizer: Any,
    texts: list[str],
    special_tokens: bool,
    loss_on: str,
    fim: FillInTheMiddle | None,
) -> dict[str, list]:
    """Return the tokens of texts, and where each stands in its text if that is needed."""
    try:
        return tokenizer._tokenizer(
            texts,
            add_special_tokens=special_tokens,
            return_offsets_mapping=loss_on != "all" or fim is not None,
            return_attention_mask=False,
            verbose=False,  # of rows that are longer than it was made for
        )
    except NotImplementedError:
        option = "--fim-rate" if fim else f"--loss-on {loss_on}"
        raise PackError(
            f"{option}: the base's tokenizer is a slow one and does not say where its "
            "tokens stand. Use --loss-on all without --fim-rate, or a base with tokenizer.json.",
            "unsupported",
        ) from None


class _Pieces:
    """Texts as pieces of at most so many tokens, some of them rearranged to fill in the middle.

    A piece begins with the last token of the one before it, so that every token is a target once.
    ``cut`` counts the texts that were too long, unless `_append` counts them.
    """

    def __init__(
        self, tokenizer: Any, limit: int, is_split: bool, fim: FillInTheMiddle | None
    ) -> None:
        self.tokenizer, self.limit, self.fim, self.cut = tokenizer, limit, fim, 0
        self.ids = sentinels(tokenizer, fim.tokens) if fim else None
        self.is_split = is_split
        self.room = limit - SPARE if fim else limit
        # number of the row, tokens (of a rearranged piece those before it), `fim.parts`
        self.pieces: list[tuple[int, list[int], tuple[bool, str, str, str] | None]] = []

    def add(self, row: int, text: str, tokens: list[int], offsets: list | None) -> None:
        """Add a text; ``tokens`` are those of the whole, with what begins and ends it."""
        count, starts = len(tokens), [0]
        if count > self.room and self.is_split:
            starts = list(range(0, count - 1, self.room - 1))
            self.cut += count > self.limit
        for number, start in enumerate(starts):
            stop = min(start + self.room, count)
            piece, parts = tokens[start:stop] if self.is_split else tokens, None
            if self.fim:
                begin = offsets[start][0] if start else 0
                end = offsets[stop][0] if stop < len(offsets) else len(text)
                parts = self.fim.parts(text[begin:end], row, number)
            if parts is not None:
                self.cut += count > self.limit and not self.is_split
                bos = self.tokenizer.bos_token_id
                begins = not start and tokens[0] == bos and tuple(offsets[0]) == (0, 0)
                piece = [bos] if begins else []
            self.pieces.append((row, piece, parts))

    def encoded(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of the row and tokens of every piece."""
        texts = [text for *_, parts in self.pieces if parts for text in parts[1:]]
        encoded = iter(continued(self.tokenizer, texts))
        for row, tokens, parts in self.pieces:
            if parts:
                encodings = next(encoded), next(encoded), next(encoded)
                room = self.limit - len(tokens)
                tokens = tokens + arranged(self.ids, parts[0], encodings, room)
            yield row, tokens


def _append(
    examples: Examples, row: Row, tokens: list[int], target: np.ndarray, options: EncodingOptions
) -> None:
    """Add an example, cut to the maximal length; without a target left it is counted alone."""
    max_seq_length, vocab_size = options.max_seq_length, options.vocab_size
    target[:1] = False  # nothing predicts the first token
    if vocab_size is not None and tokens and max(tokens) >= vocab_size:
        raise row.error(
            f"token {max(tokens)} lies beyond the base's vocabulary of {vocab_size}: the tokenizer "
            "belongs to another base. Put the tokenizer files of this one beside its weights.",
            "mismatch",
        )
    if not target.any():
        raise row.error(f"nothing to supervise (--loss-on {examples.loss_on}).", flag="loss_on")
    if len(tokens) > max_seq_length:
        examples.cut += 1
        tokens, target = tokens[:max_seq_length], target[:max_seq_length]
        if not target.any():
            examples.dropped += 1
            return
    if options.ce_last_k is not None:
        target[np.flatnonzero(target)[: -options.ce_last_k]] = False
    examples.items.append(Example(np.array(tokens, dtype=np.int32), target, row.where))


def _targets(
    offsets: list[tuple[int, int]], tokens: list[int], spans: list[Span], ends: set[int]
) -> np.ndarray:
    """True for tokens that start inside a span, and for the special token that ends it."""
    starts = np.array([o[0] for o in offsets])
    target = np.zeros(len(tokens), dtype=bool)
    for begin, end in spans:
        inside = (starts >= begin) & (starts < end)
        target |= inside
        after = int(np.searchsorted(starts, end))
        if after < len(tokens) and inside.any() and tokens[after] in ends:
            if tokens[after - 1] not in ends:
                target[after] = True
    return target
