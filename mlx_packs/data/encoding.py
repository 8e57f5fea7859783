"""Rows as tokens; a token is a target if it starts inside a supervised span of the row's text."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..bases.sandboxed_tokenizer import with_offsets
from ..bases.tokenizer import starts_twice, tokenizer_errors
from ..bases.turns import images_of
from ..cache import blocks, json_array
from ..config.data import DataConfig
from ..errors import PackError, any_of
from .conversations import Content, Conversation, Span, continued, render_ahead, split_prompts
from .dataset import prefetched
from .fim import SPARE, FillInTheMiddle, arranged, sentinels
from .formats import (
    PROMPT,
    TOKEN_FORMATS,
    Row,
    RowFormat,
    Text,
    TokenFormat,
    check_format,
    check_unicode,
    first_format,
    format_of,
    suggested_tasks,
    tasks_of,
    with_task,
)
from .images import FEWER_BY_MAX_PIXELS
from .row_format import TOO_LONG, BadRows, RowError, all_too_long
from .sources import Rows, as_rows, canonical_line
from .token_store import ByteFile, Example, JoinedExamples, TokenStore

# Part of the token cache's key: raise it whenever the same rows give other tokens or targets.
ENCODING_VERSION = 5
# Of rows that are rendered and tokenized at a time: enough for all cores, and some MB of tokens.
_CHUNK_ROWS = 1024
_CHUNK_CHARACTERS = 1 << 19
_RENDERED_ROWS = 64  # of one call of the chat template's sandbox


@dataclass
class Examples:
    """The examples of a split.

    A row that was split has one for each of its pieces, and a preference one for each completion.
    """

    items: Sequence[Example]
    format: str  # of the rows
    loss_on: str
    cut: int = 0  # rows that were longer than the maximum
    dropped: int = 0  # rows that lost every target by that
    bad: BadRows = field(default_factory=BadRows)  # rows that were left out
    fingerprint: str | None = None  # of the rows that were rendered
    labels: np.ndarray | None = None  # of each row [N, ...], if rows have labels
    per_row: int = 1  # examples of a row, one after the other

    @classmethod
    def joined(cls, parts: "Sequence[Examples]") -> "Examples":
        """Return the examples of several phases as one, phase after phase."""
        if len(parts) == 1:
            return parts[0]

        formats = dict.fromkeys(part.format for part in parts)
        losses = dict.fromkeys(part.loss_on for part in parts)
        items = JoinedExamples([part.items for part in parts])

        joined = cls(items, " + ".join(formats), " + ".join(losses), per_row=parts[0].per_row)
        if parts[0].labels is not None:
            joined.labels = np.concatenate([part.labels for part in parts])
        joined.lengths = np.concatenate([part.lengths for part in parts])
        joined.target_counts = np.concatenate([part.target_counts for part in parts])
        return joined

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example."""
        lengths = getattr(self.items, "lengths", None)
        if lengths is not None:
            return lengths
        return np.array([len(e.tokens) for e in self.items])

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of the examples of each row, [N, per_row]."""
        return self.lengths.reshape(-1, self.per_row)

    @cached_property
    def target_counts(self) -> np.ndarray:
        """Supervised tokens of each example."""
        counts = getattr(self.items, "target_counts", None)
        if counts is not None:
            return counts
        return np.array([int(e.target.sum()) for e in self.items])

    @property
    def targets(self) -> int:
        """Supervised tokens of all examples."""
        return int(self.target_counts.sum())

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self) // self.per_row

    def where_of(self, indices: Sequence[int]) -> list[str]:
        return [self.items[i].where for i in indices]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Example:
        return self.items[i]


@dataclass(frozen=True)
class EncodingOptions:
    loss_on: str | None = None  # as --loss-on; None is the default of the rows' format
    max_seq_length: int = 2048  # what is longer is cut, and dropped where no target is left
    vocab_size: int | None = None  # token ids must be below it; None does not check
    ce_last_k: int | None = None  # keep only the last K targets of an example; None keeps all
    long_rows: str = "cut"  # of a long text the beginning, or `split` it into several examples
    fim: FillInTheMiddle | None = None  # rearranges texts to fill in the middle


DEFAULTS = EncodingOptions()


def encode(
    rows: Sequence[Row],
    tokenizer: Any,
    columns: DataConfig,
    options: EncodingOptions = DEFAULTS,
    row_format: RowFormat | None = None,
    advance: Callable[[], None] | None = None,
) -> Examples:
    """Return tokens and targets of every row of a split; all must have one format.

    Rows are read, rendered and tokenized some at a time, and their text is not stored. A row that
    cannot be used is a RowError, unless ``columns.on_bad_row`` leaves such rows out. ``advance`` is
    called after each row is rendered, with the features of its images.
    """
    first, row_format = checked_format(rows, columns, row_format)
    encoder = Encoder(as_rows(rows), tokenizer, columns, options, row_format, first.where)
    encoder.encode(0, len(rows), advance)
    return encoder.examples()


def checked_format(
    rows: Sequence[Row], columns: DataConfig, row_format: RowFormat | None
) -> tuple[Row, TokenFormat]:
    """Return the first usable row, and the format of all rows: one that causal models train on."""
    if not len(rows):
        raise PackError("--data: the split has no examples.", "data")

    first = rows[0]
    if row_format is None:
        first, row_format = first_format(rows, columns)

    if row_format is PROMPT:
        format_of(first, columns, TOKEN_FORMATS)  # an error that names the columns
    if not isinstance(row_format, TokenFormat):
        tasks = any_of(suggested_tasks(first, columns, first.value) or tasks_of(row_format))
        raise first.conflict(
            f"the examples are {row_format.name}, which --task {tasks} trains on. This needs "
            "completions, chats or texts.",
            "conflict",
            "task",
        )

    return first, row_format


class _Rendered(NamedTuple):
    index: int  # of the row
    text: str
    spans: list[Span]  # targets
    images: Sequence[Any]  # its sources, and then the `vision.images.Image` that the text has


class Encoder:
    """Encodes rows chunk by chunk: one is tokenized in a thread while the next is rendered.

    Its results can be moved as arrays (`part`, with ``is_part``) to an encoder of the rows before:
    the examples are then the same as if that one had encoded all of them.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Any,
        columns: DataConfig,
        options: EncodingOptions,
        row_format: TokenFormat,
        first: str,
        is_part: bool = False,
    ) -> None:
        self.rows = rows
        self.tokenizer = tokenizer
        self.columns = columns
        self.options = options
        self.format = row_format
        self.first = first  # the place of a row of this format, as messages name it
        self.loss_on = row_format.resolve_loss_on(options.loss_on)
        self.ends = set(tokenizer.eos_token_ids) | set(tokenizer.all_special_ids)
        self.images = images_of(tokenizer)
        if self.images is not None:
            self.images.limit(columns.max_pixels, columns.allow_urls)

        fim = options.fim
        is_split = options.long_rows == "split"
        self.in_pieces = fim is not None or is_split
        if self.in_pieces and not isinstance(row_format, Text):
            option = "fim-rate" if fim else "long-rows split"
            raise PackError(
                f"--{option}: is for text examples, but {self.first} is {row_format.name}.",
                "conflict",
            )

        self.pieces = _Pieces(tokenizer, options.max_seq_length, is_split, fim)
        self.bad = BadRows(columns.on_bad_row == "stop", rows.per_row)
        self.fingerprint = hashlib.sha256()
        self.lines = ByteFile() if is_part else None
        self.store = TokenStore()
        self.cut = self.dropped = 0

    def encode(self, start: int, stop: int, advance: Callable[[], None] | None = None) -> None:
        with ThreadPoolExecutor(1, "tokenizer") as thread:
            waiting: tuple[list[_Rendered], Future] | None = None
            for chunk in self._chunks(start, stop, advance or (lambda: None)):
                ahead = thread.submit(self._encodings, [each.text for each in chunk])
                if self.in_pieces:  # which are tokenized where they are stored
                    wait([ahead])
                if waiting:
                    self._store(waiting[0], waiting[1].result())
                waiting = chunk, ahead

            if waiting:
                self._store(waiting[0], waiting[1].result())

    def examples(self) -> Examples:
        self.bad.check_some_left(len(self.rows) // self.rows.per_row)
        if not len(self.store):
            fault = f"has a target within --max-seq-length {self.options.max_seq_length}. Raise it."
            raise all_too_long(self.rows.where(0), fault)

        return Examples(
            self.store.examples(self.rows.where),
            self.format.name,
            self.loss_on,
            self.cut + self.pieces.cut,
            self.dropped,
            self.bad,
            self.fingerprint.hexdigest(),
        )

    def part(self) -> dict[str, np.ndarray]:
        """Return the arrays of the rows encoded so far, whose numbers are those among all rows.

        ``lines`` has `canonical_line` of each row, ``counts`` the rows cut and dropped, ``bad``
        those that were left out; the others are as of `StoredExamples`.
        """
        assert self.lines is not None
        return {
            **self.store.arrays(),
            "lines": self.lines.mapped(np.uint8),
            "counts": np.array([self.cut + self.pieces.cut, self.dropped], np.int64),
            "bad": json_array(self.bad.to_json()),
        }

    def add_part(self, part: Mapping[str, np.ndarray]) -> None:
        """Add the `part` of an encoder that continued after the rows encoded here."""
        self.bad.add_json(json.loads(part["bad"].tobytes()), self.rows.where)
        self.store.extend(part)
        for block in blocks(part["lines"]):
            self.fingerprint.update(block.data)

        cut, dropped = part["counts"].tolist()
        self.cut += cut
        self.dropped += dropped

    def _chunks(
        self, start: int, stop: int, advance: Callable[[], None]
    ) -> Iterator[list[_Rendered]]:
        chunk: list[_Rendered] = []
        size = 0  # characters
        for i, row, result in self._rendered(start, stop):
            try:
                if isinstance(result, PackError):
                    raise result
                rendered = _Rendered(i, *result)
                check_unicode(row, rendered.text)
                rendered = self._with_images(row, rendered)
                self._note(canonical_line(row))
            except RowError as error:
                if self.bad.stops and error.reason == "no target":
                    raise with_task(error, row, self.columns) from None
                self.bad.add(i, error)
                continue
            finally:
                advance()

            chunk.append(rendered)
            size += len(rendered.text)
            if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_CHARACTERS:
                yield chunk
                chunk = []
                size = 0

        if chunk:
            yield chunk

    def _rendered(self, start: int, stop: int) -> Iterator[tuple[int, Row, Any]]:
        """Yield each row with its text and targets, or its error, while the next are rendered."""
        rows = self.rows[:stop]
        begins = range(start, stop, _RENDERED_ROWS)
        parts = ((begin, list(rows[begin : begin + _RENDERED_ROWS])) for begin in begins)
        return itertools.chain.from_iterable(prefetched(itertools.starmap(self._render, parts)))

    def _render(self, begin: int, rows: Sequence[Row]) -> list[tuple[int, Row, Any]]:
        """Read rows once; the chat template renders all of them in one call of its sandbox."""
        contents = [_or_error(self._read, row) for row in rows]
        render_ahead([each for each in contents if isinstance(each, Conversation)], self.loss_on)
        return [
            (number, row, _or_error(self._supervised, content))
            for number, (row, content) in enumerate(zip(rows, contents, strict=True), begin)
        ]

    def _read(self, row: Row) -> Content:
        check_format(row, self.format, self.first, self.columns)
        return self.format.read(row, self.columns, self.tokenizer)

    def _supervised(self, content: Content | PackError) -> tuple[str, list[Span], list[Any]]:
        """Return the text of an example, its targets and its images."""
        if isinstance(content, PackError):
            raise content
        return *content.supervised(self.loss_on), content.images

    def _with_images(self, row: Row, rendered: _Rendered) -> _Rendered:
        """Return a text in which each placeholder of an image is what the image becomes."""
        if self.images is None or self.images.family.placeholder not in rendered.text:
            return rendered._replace(images=())

        try:
            images = [self.images.add(each) for each in rendered.images]
            text, spans = self.images.expanded(rendered.text, rendered.spans, images)
        except ValueError as error:
            raise row.error(str(error), "image") from None
        return _Rendered(rendered.index, text, spans, images)

    def _note(self, line: bytes) -> None:
        """Add a row to the fingerprint, or keep it for the fingerprint of all rows."""
        if self.lines is None:
            self.fingerprint.update(line)
        else:
            self.lines.write(np.frombuffer(line, np.uint8))

    def _encodings(self, texts: list[str]) -> dict[str, list]:
        """Return the tokens of texts, and the position of each if targets depend on it."""
        fim = self.options.fim
        needs_places = self.loss_on != "all" or fim is not None

        with tokenizer_errors(self.tokenizer), with_offsets(needs_places):
            try:
                return self.tokenizer._tokenizer(
                    texts,
                    add_special_tokens=self.format.special_tokens,
                    return_offsets_mapping=needs_places,
                    return_attention_mask=False,
                    verbose=False,  # of rows that are longer than it was made for
                )
            except NotImplementedError:
                option = "--fim-rate" if fim else f"--loss-on {self.loss_on}"
                raise PackError(
                    f"{option}: the base's tokenizer is a slow one and does not say where its "
                    "tokens are. Use --loss-on all without --fim-rate, or a base with "
                    "tokenizer.json.",
                    "unsupported",
                ) from None

    def _store(self, chunk: list[_Rendered], encodings: Mapping[str, list]) -> None:
        offsets = encodings.get("offset_mapping") or itertools.repeat(None)
        encoded = zip(chunk, encodings["input_ids"], offsets)  # noqa: B905
        end = [self.tokenizer.eos_token_id] if self.format.special_tokens else []

        for (row, text, spans, images), tokens, places in encoded:
            if end and starts_twice(self.tokenizer, tokens):
                tokens = tokens[1:]
                places = places and places[1:]
            tokens, places = split_prompts(self.tokenizer, text, spans, tokens, places)
            if tokens[-1:] != end:
                tokens = [*tokens, *end]
            if images:
                tokens = self.images.numbered(tokens, images)
                if min(tokens[self.options.max_seq_length :], default=0) < 0:
                    self._leave_out(row, len(tokens), len(images))
                    continue

            if self.in_pieces:
                self.pieces.add(row, text, tokens, places)
                continue

            target = np.ones(len(tokens), dtype=bool)
            if self.loss_on != "all":
                target = _targets(places, tokens, spans, self.ends)
            if images:
                target &= ~self.images.inside(tokens, images)
            self._append(row, tokens, target)

        for row, tokens in self.pieces.encoded():
            self._append(row, tokens, np.ones(len(tokens), dtype=bool))

    def _leave_out(self, row: int, tokens: int, images: int) -> None:
        """Leave out a row that the maximum length would cut inside or before an image."""
        shown = f"{images} images" if images > 1 else "image"

        ways = ["Raise --max-seq-length"]
        if self.images.config["model_type"] in FEWER_BY_MAX_PIXELS:
            ways.append("lower --max-pixels")
        if self.bad.stops:
            ways.append("leave such examples out by --on-bad-row skip")

        error = RowError(
            self.rows.where(row),
            f"has {tokens:,} tokens with its {shown}, more than --max-seq-length "
            f"{self.options.max_seq_length:,}, and no image is cut. "
            f"{any_of(ways)}.",
            TOO_LONG,
            flag="max_seq_length",
        )

        self.bad.add(row, error)

    def _append(self, row: int, tokens: list[int], target: np.ndarray) -> None:
        """Add an example, cut to the maximum length; without a target it is only counted."""
        length = self.options.max_seq_length
        vocab_size = self.options.vocab_size
        last_k = self.options.ce_last_k
        target[:1] = False  # nothing predicts the first token

        if vocab_size is not None and tokens and max(tokens) >= vocab_size:
            raise PackError(
                f"{self.rows.where(row)}: token {max(tokens)} is beyond the base's vocabulary of "
                f"{vocab_size}: the tokenizer belongs to another base. Put the tokenizer files of "
                "this one next to its weights.",
                "mismatch",
            )

        if not target.any():
            fault = f"nothing to supervise (--loss-on {self.loss_on})."
            error = RowError(self.rows.where(row), fault, "no target", flag="loss_on")
            self.bad.add(row, error)
            return

        if len(tokens) > length:
            self.cut += 1
            tokens = tokens[:length]
            target = target[:length]
            if not target.any():
                self.dropped += 1
                return

        if last_k is not None:
            target[np.flatnonzero(target)[:-last_k]] = False
        self.store.add(row, np.array(tokens, dtype=np.int32), target)


class _Pieces:
    """Texts as pieces of at most ``limit`` tokens, some rearranged to fill in the middle.

    A piece begins with the last token of the one before it, so that every token is a target once.
    ``cut`` counts the texts that were too long, unless the encoder counts them.
    """

    def __init__(
        self, tokenizer: Any, limit: int, is_split: bool, fim: FillInTheMiddle | None
    ) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.fim = fim
        self.cut = 0
        self.ids = sentinels(tokenizer, fim.tokens) if fim else None
        self.is_split = is_split
        self.room = limit - SPARE if fim else limit
        # number of the row, tokens (of a rearranged piece those before it), `fim.parts`
        self.pieces: list[tuple[int, list[int], tuple[bool, str, str, str] | None]] = []

    def add(self, row: int, text: str, tokens: list[int], offsets: list | None) -> None:
        """``tokens`` are of the whole text, with the tokens that begin and end it."""
        count = len(tokens)
        starts = [0]
        if count > self.room and self.is_split:
            starts = list(range(0, count - 1, self.room - 1))
            self.cut += count > self.limit

        for number, start in enumerate(starts):
            stop = min(start + self.room, count)
            piece = tokens[start:stop] if self.is_split else tokens

            parts = None
            if self.fim:
                bos = self.tokenizer.bos_token_id
                begins = not start and tokens[0] == bos
                begin = offsets[start][begins]
                end = offsets[stop][0] if stop < len(offsets) else len(text)
                parts = self.fim.parts(text[begin:end], row, number)

            if parts is not None:
                self.cut += count > self.limit and not self.is_split
                piece = [bos] if begins else []

            self.pieces.append((row, piece, parts))

    def encoded(self) -> Iterator[tuple[int, list[int]]]:
        added = self.pieces
        self.pieces = []
        texts = [text for *_, parts in added if parts for text in parts[1:]]
        encoded = (tokens for tokens, _ in continued(self.tokenizer, texts))

        for row, tokens, parts in added:
            if parts:
                encodings = next(encoded), next(encoded), next(encoded)
                room = self.limit - len(tokens)
                tokens = tokens + arranged(self.ids, parts[0], encodings, room)

            yield row, tokens


def _or_error(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a result, or the PackError that is raised instead."""
    try:
        return function(*arguments)
    except PackError as error:
        return error


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
        is_end = after < len(tokens) and inside.any() and tokens[after] in ends
        if is_end and tokens[after - 1] not in ends:
            target[after] = True

    return target
