"""Rows as tokens, and which of them are targets.

What is supervised is decided on the text that the chat template renders, never by encoding parts
again: the conversation is rendered and encoded once, the spans of the answers are found in its
text, and a token is a target if it starts inside one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..config.schema import DataConfig
from ..errors import PackError
from .fim import SPARE, FillInTheMiddle, arranged, continued, sentinels
from .rows import PAIR_COLUMNS, Row, row_format

_SENTINEL = "\ue000\ue001\ue002"  # private use: in no template and no sane text


@dataclass(frozen=True)
class Example:
    """Tokens of one row and which of them are learned.

    ``tokens``: int32 [L].   ``target``: bool [L]; True where the token is to be predicted.
    """

    tokens: np.ndarray
    target: np.ndarray
    where: str


@dataclass
class Examples:
    """The rows of a split, encoded; ``cut`` were longer than the maximum, ``dropped`` lost all.

    A row that was split has an item for each of its pieces.
    """

    items: Sequence[Example]
    format: str
    loss_on: str
    cut: int = 0
    dropped: int = 0

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.array([len(e.tokens) for e in self.items])

    @cached_property
    def target_counts(self) -> np.ndarray:
        """Supervised tokens of each row."""
        return np.array([int(e.target.sum()) for e in self.items])

    @property
    def targets(self) -> int:
        """Supervised tokens in all rows."""
        return int(self.target_counts.sum())

    def __len__(self) -> int:
        return len(self.items)


def resolve_loss_on(kind: str, loss_on: str | None) -> str:
    """What a format supervises by default, and which wishes it cannot fulfil."""
    if kind in PAIR_COLUMNS:
        raise PackError(
            f"the rows are {kind}, which an encoder learns from: --task embedding, and "
            "--model a folder of sentence-transformers."
        )
    if loss_on is None:
        return {"chat": "assistant", "completion": "completion", "text": "all"}[kind]
    if kind == "text" and loss_on != "all":
        raise PackError(f"--loss-on {loss_on}: text rows have no prompt; use --loss-on all.")
    return loss_on


def encode(
    rows: list[Row],
    tokenizer,
    config: DataConfig,
    *,
    loss_on: str | None = None,
    max_seq_length: int = 2048,
    vocab_size: int | None = None,
    ce_last_k: int | None = None,
    long_rows: str = "cut",
    fim: FillInTheMiddle | None = None,
) -> Examples:
    """Tokens and targets of every row.

    Args:
        tokenizer: mlx-lm's wrapper, as `load_base` gives it.
        loss_on: ``all`` tokens, the last ``completion``, or all ``assistant`` turns.
        max_seq_length: longer rows are cut; those that lose every target are dropped and counted.
        vocab_size: token ids must lie below it.   ce_last_k: keep only the last K targets of a row.
        long_rows: ``split`` makes several of a text that is too long.   fim: rearranges texts.
    Raises: PackError naming file and line for a row that cannot be used.
    """
    if not rows:
        raise PackError("the split is empty: there are no rows to encode.")
    kind = row_format(rows[0], config)
    loss_on = resolve_loss_on(kind, loss_on)
    if kind != "text" and (fim is not None or long_rows != "cut"):
        raise PackError(
            f"--long-rows split and --fim-rate are for rows of text, but {rows[0].where} is {kind}."
        )
    rendered: list[tuple[str, list[tuple[int, int]]]] = []
    for row in rows:
        if (found := row_format(row, config)) != kind:
            raise PackError(
                f"{row.where}: mixed formats: this row is {found}, but {rows[0].where} is {kind}."
            )
        text, spans = _render_row(row, kind, loss_on, tokenizer, config)
        if not _is_unicode(text):
            raise PackError(f"{row.where}: holds half of a surrogate pair (\\ud800 to \\udfff).")
        rendered.append((text, spans))
    special = kind == "text"
    try:
        encodings = tokenizer._tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=special,
            return_offsets_mapping=loss_on != "all" or fim is not None,
            return_attention_mask=False,
            verbose=False,  # of rows that are longer than it was made for
        )
    except NotImplementedError:
        option = "--fim-rate" if fim else f"--loss-on {loss_on}"
        raise PackError(
            f"{option}: the base's tokenizer is a slow one and does not say where its "
            "tokens stand; use --loss-on all without --fim-rate, or a base with tokenizer.json."
        ) from None
    examples = Examples([], kind, loss_on)
    ends = set(tokenizer.eos_token_ids) | set(tokenizer.all_special_ids)
    long = long_rows == "split" or fim is not None
    pieces = _Pieces(tokenizer, max_seq_length, long_rows, fim) if long else None
    for i, (row, (text, spans)) in enumerate(zip(rows, rendered, strict=True)):
        tokens = list(encodings["input_ids"][i])
        if special and tokens[-1:] != [tokenizer.eos_token_id]:
            tokens.append(tokenizer.eos_token_id)
        if pieces is not None:
            pieces.add(i, text, tokens, encodings["offset_mapping"][i] if fim else None)
            continue
        if loss_on == "all":
            target = np.ones(len(tokens), dtype=bool)
        else:
            target = _targets(encodings["offset_mapping"][i], tokens, spans, ends)
        _append(examples, row, tokens, target, max_seq_length, vocab_size, ce_last_k)
    if pieces is not None:
        for i, tokens in pieces.made():
            target = np.ones(len(tokens), dtype=bool)
            _append(examples, rows[i], tokens, target, max_seq_length, vocab_size, ce_last_k)
        examples.cut += pieces.cut
    if not examples.items:
        raise PackError(f"{rows[0].where}: no row has a target within {max_seq_length} tokens.")
    return examples


class _Pieces:
    """Texts as rows of at most so many tokens, some of them rearranged to fill in the middle.

    A piece begins with the last token of the one before it, so that every token is learned once.
    ``cut``: texts that were too long, unless `_append` counts them.
    """

    def __init__(self, tokenizer, limit: int, long_rows: str, fim: FillInTheMiddle | None):
        self.tokenizer, self.limit, self.fim, self.cut = tokenizer, limit, fim, 0
        self.ids = sentinels(tokenizer, fim.tokens) if fim else None
        self.splits = long_rows == "split"
        self.room = limit - SPARE if fim else limit
        self.plain: list[tuple[int, list[int]]] = []  # number of the row, tokens
        self.parts: dict[int, tuple[bool, tuple[str, str, str]]] = {}  # by index into `plain`

    def add(self, row: int, text: str, tokens: list[int], offsets: list | None) -> None:
        """The pieces of a text; ``tokens`` are those of the whole, with what begins and ends it."""
        count, starts = len(tokens), [0]
        if count > self.room and self.splits:
            starts = list(range(0, count - 1, self.room - 1))
            self.cut += count > self.limit
        for number, start in enumerate(starts):
            stop = min(start + self.room, count)
            parts = None
            if self.fim:
                begin = offsets[start][0] if start else 0
                end = offsets[stop][0] if stop < len(offsets) else len(text)
                parts = self.fim.parts(text[begin:end], row, number)
            if parts is not None:
                self.parts[len(self.plain)] = parts[0], parts[1:]
                self.cut += count > self.limit and not self.splits
                bos = self.tokenizer.bos_token_id
                begins = not start and tokens[0] == bos and tuple(offsets[0]) == (0, 0)
                self.plain.append((row, [bos] if begins else []))
            else:
                self.plain.append((row, tokens[start:stop] if self.splits else tokens))

    def made(self) -> Iterator[tuple[int, list[int]]]:
        """Number of the row and tokens of every piece."""
        texts = [text for _, parts in self.parts.values() for text in parts]
        encoded = iter(continued(self.tokenizer, texts))
        for i, (row, tokens) in enumerate(self.plain):
            if i in self.parts:
                three = next(encoded), next(encoded), next(encoded)
                room = self.limit - len(tokens)
                tokens = tokens + arranged(self.ids, self.parts[i][0], three, room)
            yield row, tokens


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _append(
    examples: Examples,
    row: Row,
    tokens: list[int],
    target: np.ndarray,
    max_seq_length: int,
    vocab_size: int | None,
    ce_last_k: int | None,
) -> None:
    target[:1] = False  # nothing predicts the first token
    if vocab_size is not None and tokens and max(tokens) >= vocab_size:
        raise PackError(
            f"{row.where}: token {max(tokens)} lies beyond the base's vocabulary of {vocab_size}: "
            "the tokenizer belongs to another base; put the tokenizer files of this one beside its "
            "weights."
        )
    if not target.any():
        raise PackError(f"{row.where}: nothing to supervise (--loss-on {examples.loss_on}).")
    if len(tokens) > max_seq_length:
        examples.cut += 1
        tokens, target = tokens[:max_seq_length], target[:max_seq_length]
        if not target.any():
            examples.dropped += 1
            return
    if ce_last_k is not None:
        target[np.flatnonzero(target)[:-ce_last_k]] = False
    examples.items.append(Example(np.array(tokens, dtype=np.int32), target, row.where))


def _render_row(
    row: Row, kind: str, loss_on: str, tokenizer, config: DataConfig
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a row and the spans of it that are learned (none for ``all``)."""
    if kind == "text":
        text = row.value[config.text_feature]
        if not isinstance(text, str) or not text:
            raise PackError(f"{row.where}: '{config.text_feature}' must be a text, got {text!r}.")
        return text, []
    if kind == "completion":
        messages = []
        for role, column in (
            ("user", config.prompt_feature),
            ("assistant", config.completion_feature),
        ):
            if not isinstance(text := row.value[column], str):
                raise PackError(f"{row.where}: '{column}' must be a text, but got {text!r}.")
            messages.append({"role": role, "content": text})
    else:
        messages = row.value[config.chat_feature]
    _check_messages(row, messages, config.chat_feature)
    render = _renderer(row, tokenizer)
    full = render(messages)
    if loss_on == "all":
        return full, []
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if loss_on == "completion":  # mlx-lm's --mask-prompt: all that follows the last prompt
        last = len(messages) - 1
        if answers == [0] == [last]:  # there is no prompt but the header of the answer
            return full, [(_answer_span(row, render, messages, 0, full)[0], len(full))]
        prompt = render(messages[:-1], add_generation_prompt=last in answers)
        if not full.startswith(prompt):
            raise PackError(
                f"{row.where}: the chat template renders the prompt differently when the answer "
                "follows, so it cannot be told apart; use --loss-on assistant."
            )
        return full, [(len(prompt), len(full))]
    if not answers:
        raise PackError(f"{row.where}: nothing to supervise: no message has role 'assistant'.")
    return full, [_answer_span(row, render, messages, i, full) for i in answers]


def _check_messages(row: Row, messages, column: str) -> None:
    def fault(rule: str, value) -> PackError:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        shown = shown if len(shown) < 60 else shown[:60] + "…"
        return PackError(f"{row.where}: {rule} Shown: {shown}")

    if messages == []:
        raise fault(f"'{column}' must hold at least one message.", messages)
    if not isinstance(messages, list):
        kind = type(messages).__name__
        raise fault(f"'{column}' must be a list of {{role, content}}, but got a {kind}.", messages)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise fault("every message must be an object with a 'role'.", message)
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise fault("the 'content' of a message must be a text.", message)


def _renderer(row: Row, tokenizer) -> Callable[..., str]:
    """A function that renders messages with the chat template of the base."""
    if not tokenizer.has_chat_template:
        raise PackError(
            f"{row.where}: the base's tokenizer has no chat template; use rows with 'text', or a "
            "base that has one."
        )
    from jinja2.exceptions import TemplateError

    tools = row.value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise PackError(f"{row.where}: 'tools' is not valid JSON: {error}.") from None

    def render(messages, add_generation_prompt: bool = False) -> str:
        if not messages:
            return ""
        try:
            return tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise PackError(f"{row.where}: the chat template refuses this row: {error}") from None

    return render


def _answer_span(row: Row, render, messages: list, i: int, full: str) -> tuple[int, int]:
    """Where answer ``i`` stands in the rendered conversation, its end-of-turn token included.

    Usually the template renders a conversation as its beginning plus more. Where it does not (Qwen3
    drops the thoughts of earlier turns), the answer is found by rendering another in its place.
    """

    def attempt(*arguments, **keywords) -> str | None:
        try:
            return render(*arguments, **keywords)
        except PackError:  # some templates refuse a part of a conversation
            return None

    if i > 0:  # without a message before it, the header of the answer cannot be rendered
        before = attempt(messages[:i], add_generation_prompt=True)
        through = full if i + 1 == len(messages) else attempt(messages[: i + 1])
        if before and through and full.startswith(before) and full.startswith(through):
            if len(through) > len(before):
                return len(before), len(before) + len(through[len(before) :].rstrip())
    bare = {"role": "assistant", "content": _SENTINEL}
    for other in (bare, {**messages[i], **bare}):  # without and with its tool calls
        changed = attempt([other if j == i else m for j, m in enumerate(messages)]) or ""
        start, found, rest = changed.partition(_SENTINEL)
        if found and full.startswith(start) and full.endswith(rest):
            if len(full) > len(start) + len(rest):
                return len(start), len(full) - len(rest)
    raise PackError(
        f"{row.where}: the chat template does not show where answer {i} stands; "
        "use --loss-on completion or all."
    )


def _targets(
    offsets: list[tuple[int, int]], tokens: list[int], spans: list[tuple[int, int]], ends: set[int]
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
