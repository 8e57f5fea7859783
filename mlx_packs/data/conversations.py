"""Conversations as the chat template renders them, and the positions of the answers in the text.

What is supervised is decided on the rendered text. Only a prompt is encoded without its answer, as
it is in use: a tokenizer may join its end to the beginning of the answer. "ASSISTANT: " and "Yes"
are one text whose token " Yes" is half prompt and half answer.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, ClassVar, TypeVar

from ..bases.chat_template import Beginnings
from ..bases.tokenizer import text_tokens, with_template
from ..bases.turns import (
    NO_IMAGES,
    SENTINEL,
    answer_end,
    encode_conversation,
    image_sources,
    images_of,
    render_conversation,
    render_prefixes,
    turn_style,
)
from ..config.data import CHAT_TEMPLATES, PLAIN
from ..errors import PackError
from .images import without_marks
from .messages import THOUGHTS
from .row_format import RowError

Span = tuple[int, int]  # of characters, the second excluded
T = TypeVar("T")
_PROMPT_TOKENS = 32  # of a text, that are to be continued; of a short text at most half


@dataclass(frozen=True)
class PlainText:
    """A text, and the column that it is from; read as a `Conversation`, but without an answer."""

    where: str
    text: str
    column: str
    tokenizer: Any = None
    images: ClassVar[Sequence[Any]] = ()
    answer: ClassVar[str | None] = None

    def prompt(self) -> tuple[str, list[int]]:
        """The prompt is the beginning of the text."""
        tokens = text_tokens(self.tokenizer, self.text)
        tokens = tokens[: max(1, min(_PROMPT_TOKENS, len(tokens) // 2))]
        shown = tokens[1:] if tokens[0] == self.tokenizer.bos_token_id else tokens
        return self.tokenizer.decode(shown), tokens

    def supervised(self, loss_on: str) -> tuple[str, list[Span]]:
        if not self.text:
            raise RowError(self.where, f"'{self.column}' is empty.", "empty")
        return self.text, []


@dataclass(frozen=True)
class Conversation:
    """A row as it was read once: messages, their tools, and what else a chat template reads.

    Attributes:
        context: numbers of the messages that are no targets.
        variables: others that the template knows.
        template_date: at which the template's clock stands; None for the present.
        asked: number of the message that comes after the prompt.
        is_plain: whether it is one text and its continuation, which need no chat template.
    """

    where: str
    messages: Sequence[Mapping]
    tools: list | None
    tokenizer: Any = None
    context: frozenset[int] = frozenset()
    variables: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None
    asked: int = 0
    is_plain: bool = False
    # the renderings of its first N messages, by N and whether the header of an answer follows
    _prefixes: dict[tuple[int, bool], str | PackError] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def images(self) -> list[Any]:
        """The images, as `vision.pictures.ImageSource`."""
        return image_sources(self.messages)

    @property
    def answer(self) -> str | None:
        """The text after the `prompt`; None if the next message is no answer."""
        if self.asked >= len(self.messages) or self.asked in self.context:
            return None

        message = self.messages[self.asked]
        is_answer = message["role"] == "assistant" and not message.get("tool_calls")
        return message["content"] if is_answer else None

    @property
    def thoughts(self) -> str:
        """The thoughts before the `answer` that the row has under a key of their own."""
        if self.asked >= len(self.messages):
            return ""
        return self.messages[self.asked].get(THOUGHTS[0], "")

    @property
    def arguments(self) -> list[Any]:
        """The arguments of all calls."""
        calls = [call for message in self.messages for call in message.get("tool_calls") or ()]
        return [call["function"]["arguments"] for call in calls]

    def for_tokenizer(self, tokenizer: Any, chat_template: str | None) -> "Conversation":
        """Return the conversation with what renders and encodes it; errors say what is missing."""
        if self.images and images_of(tokenizer) is None:
            raise PackError(
                f"{self.where}: has images, and {NO_IMAGES} If the text is not about the images, "
                "remove their column.",
                "unsupported",
                "model",
            )

        templated = with_template(tokenizer, chat_template)
        if not templated.has_chat_template:
            if not self.is_plain:
                raise PackError(
                    f"{self.where}: the base's tokenizer has no chat template. Use examples with "
                    "'text', or with 'prompt' and 'completion' as texts, or name a template: "
                    f"--chat-template {', '.join(CHAT_TEMPLATES)} or a .jinja file.",
                    "unsupported",
                    "chat_template",
                )
            templated = with_template(templated, PLAIN)

        conversation = replace(self, tokenizer=templated)
        conversation._check_not_rendered()
        return conversation

    def prompt(self) -> tuple[str, list[int]]:
        """Return the last message before the answer that is asked for, and the prompt's tokens."""
        messages = self.messages[: self.asked]
        tokens = self._rendered(encode_conversation, messages, add_generation_prompt=True)
        return without_marks(messages[-1]), tokens

    def _error(self, fault: str, reason: str, flag: str | None = None) -> RowError:
        return RowError(self.where, fault, reason, flag=flag)

    def _check_not_rendered(self) -> None:
        """Raise an error if a text has already been rendered by a chat template."""
        style = turn_style(self.tokenizer)
        for number, message in enumerate(self.messages, 1):
            mark = style.mark_around(message["role"], message.get("content") or "")
            if mark is not None:
                raise self._error(
                    f"the text of message {number} is already rendered: it has {mark!r}, which the "
                    "chat template writes again. Give the plain text, or use examples with 'text'.",
                    "wrong type",
                )

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = False) -> str:
        if not messages:
            return ""
        return self._rendered(
            render_conversation, messages, add_generation_prompt=add_generation_prompt
        )

    def _ended(self, text: str) -> str:
        """Add the end that a chat template leaves out after the last answer."""
        missing = answer_end(self.tokenizer).missing
        if not missing or self.messages[-1]["role"] != "assistant" or text.endswith(missing):
            return text
        if not text.endswith(self.messages[-1]["content"]):
            text = text.rstrip()
        return text + missing

    def _rendered(self, render: Callable[..., T], messages: Sequence[Mapping], **options: Any) -> T:
        """An error of the chat template that is about this row names it."""
        try:
            options = {**self._variables(), **options}
            return render(self.tokenizer, messages, template_date=self.template_date, **options)
        except PackError as error:
            raise self._named(error) from error

    def _variables(self) -> dict[str, Any]:
        return {**self.variables, "tools": self.tools}

    def _named(self, error: PackError) -> PackError:
        """Return the error of a rendering, with the row if it is about the row."""
        if error.code != "data":
            return error
        return self._error(error.message, "rejected by the chat template")

    def _prefix(self, count: int, asked: bool = False) -> str:
        """Return the first messages as they are rendered, with the header of an answer or not."""
        text = self._prefixes.get((count, asked))
        if text is None:
            return self.render(self.messages[:count], add_generation_prompt=asked)
        if isinstance(text, PackError):
            raise self._named(text)
        return text

    def supervised(self, loss_on: str) -> tuple[str, list[Span]]:
        """Return the text, and the spans of it that are targets (none for ``all``)."""
        text = self._ended(self._prefix(len(self.messages)))
        if loss_on == "all":
            if self.context:
                raise self._error(
                    "has an answer that is marked as no target. Use --loss-on assistant.",
                    "no target",
                    "loss_on",
                )
            return text, []

        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if loss_on == "completion":
            if len(self.messages) - 1 in self.context:
                raise self._error("the completion is marked as no target.", "no target")
            return text, [(self._completion_start(text, answers), len(text))]

        if not answers:
            raise self._error("nothing to supervise: no message has role 'assistant'.", "no target")

        targets = [i for i in answers if i not in self.context]
        if not targets:
            raise self._error("every answer is marked as no target.", "no target")

        self._check_not_empty(answers, targets)
        return text, [self._answer_span(i, text) for i in targets]

    def _prefixes_of(self, loss_on: str) -> Beginnings:
        """Return what `supervised` renders, unless the template is an unusual one."""
        count = len(self.messages)
        places = [(count, False)]
        if loss_on == "completion":
            places.append((count - 1, self.messages[-1]["role"] == "assistant"))
        elif loss_on != "all":
            targets = (i for i in range(count) if i not in self.context)
            answers = [i for i in targets if self.messages[i]["role"] == "assistant"]
            places += [place for i in answers for place in ((i, True), (i + 1, False))]

        places = [place for place in dict.fromkeys(places) if place[0]]
        return Beginnings(self.messages, places, self.template_date, self._variables())

    def _check_not_empty(self, answers: Sequence[int], targets: Sequence[int]) -> None:
        """Raise an error for an empty target before the last answer: nothing to learn from."""
        for number, i in enumerate(answers[:-1], 1):
            message = self.messages[i]
            parts = [message.get(key) for key in ("content", "tool_calls", "reasoning_content")]
            if i in targets and not any(p.strip() if isinstance(p, str) else p for p in parts):
                raise self._error(
                    f"answer {number} is empty (message {i + 1}). Remove it and its question, or "
                    "mark it as no target with 'weight': 0.",
                    "empty",
                )

    def _completion_start(self, text: str, answers: list[int]) -> int:
        """Return where the text after the last prompt begins: mlx-lm's ``--mask-prompt``."""
        last = len(self.messages) - 1
        if answers == [0] == [last]:  # there is no prompt but the header of the answer
            return self._answer_span(0, text)[0]

        prompt = self._prefix(last, last in answers)
        if not text.startswith(prompt):
            # the prompt ends with what no conversation has, such as an empty thought
            if last in answers and (span := self._find_answer(last, text)):
                return span[0]
            raise self._error(
                "the chat template renders the prompt differently when the answer follows, so it "
                "cannot be told apart. Use --loss-on assistant.",
                "rejected by the chat template",
                "loss_on",
            )
        return len(prompt)

    def _answer_span(self, i: int, text: str) -> Span:
        """Include the end-of-turn token of answer ``i``."""
        if span := self._find_answer(i, text):
            return span
        raise self._error(
            f"the chat template does not show where answer {i} is. Use --loss-on completion "
            "or all.",
            "rejected by the chat template",
            "loss_on",
        )

    def _find_answer(self, i: int, text: str) -> Span | None:
        """Return the position of answer ``i``; None if the template does not show it.

        If the template does not render a conversation as its beginning plus more (Qwen3 drops the
        thoughts of earlier turns), the answer is found by rendering another one in its place.
        """

        def attempt(render: Callable[..., str], *arguments: Any) -> str | None:
            try:
                return render(*arguments)
            except RowError:  # some templates reject a part of a conversation
                return None

        messages = self.messages
        if i > 0:  # without a message before it, the header of the answer cannot be rendered
            before = attempt(self._prefix, i, True)
            through = attempt(self._prefix, i + 1) if i + 1 < len(messages) else text
            if before and through and text.startswith(before) and text.startswith(through):
                if len(through) > len(before):
                    return len(before), len(before) + len(through[len(before) :].rstrip())

        bare = {"role": "assistant", "content": SENTINEL}
        for other in (bare, {**messages[i], **bare}):  # without and with its tool calls
            changed = attempt(self.render, [*messages[:i], other, *messages[i + 1 :]]) or ""
            changed = self._ended(changed)

            start, sentinel, rest = changed.partition(SENTINEL)
            if sentinel and text.startswith(start) and text.endswith(rest):
                if len(text) > len(start) + len(rest):
                    return len(start), len(text) - len(rest)

        return None


Content = Conversation | PlainText


def render_ahead(conversations: Sequence[Conversation], loss_on: str) -> None:
    """Render what `Conversation.supervised` reads, in one call for all of one tokenizer."""
    for _, neighbours in groupby(conversations, key=lambda each: id(each.tokenizer)):
        group = list(neighbours)
        prefixes = [conversation._prefixes_of(loss_on) for conversation in group]
        results = render_prefixes(group[0].tokenizer, prefixes)
        for conversation, each, texts in zip(group, prefixes, results, strict=True):
            conversation._prefixes.update(zip(each.places, texts, strict=True))


_MARK = "\n"  # a character after which a text is encoded as one that follows another
Offsets = list[tuple[int, int]]


def split_prompts(
    tokenizer: Any, text: str, spans: Sequence[Span], tokens: list[int], offsets: Offsets | None
) -> tuple[list[int], Offsets | None]:
    """Encode the text before each answer by itself; ``spans`` are the answers in ``text``.

    ``tokens`` are of the whole text, and ``offsets`` their positions, if known.
    """
    edges = sorted({begin for begin, _ in spans if 0 < begin < len(text)})
    if offsets is None or not any(_may_join(text, edge, offsets) for edge in edges):
        return tokens, offsets

    bounds = [0, *edges, len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(bounds)]
    encoded = [*_encoded(tokenizer, pieces[:1]), *continued(tokenizer, pieces[1:])]
    split_tokens = [token for piece, _ in encoded for token in piece]
    split_offsets = [
        (start + begin, stop + begin)
        for begin, (_, places) in zip(bounds, encoded, strict=False)
        for start, stop in places
    ]
    return split_tokens, split_offsets


def _may_join(text: str, edge: int, offsets: Offsets) -> bool:
    """Whether a token may span a position, or depend on both sides of it.

    Tokenizers join white space to what follows it; a single line break before a word stays alone.
    """
    i = bisect_left(offsets, (edge, 0))
    if i and offsets[i - 1][1] > edge:
        return True

    before = text[max(0, edge - 2) : edge]
    after = text[edge : edge + 1]
    if not before[-1:].isspace():
        return False
    is_single_break = before[-1:] == "\n" and not before[:-1].isspace() and not after.isspace()
    return not is_single_break


def continued(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], Offsets]]:
    """Return tokens and offsets of texts that follow others: no space is put before them."""
    unmarked = _encoded(tokenizer, texts)
    if not texts or not _adds_space(tokenizer):
        return unmarked

    ((head, _),) = _encoded(tokenizer, [_MARK])
    marked = _encoded(tokenizer, [_MARK + text for text in texts])
    return [
        (tokens[len(head) :], [(start - 1, stop - 1) for start, stop in places[len(head) :]])
        if tokens[: len(head)] == head
        else plain
        for (tokens, places), plain in zip(marked, unmarked, strict=True)
    ]


def _adds_space(tokenizer: Any) -> bool:
    """Whether a tokenizer puts a space before a text, as sentencepiece does."""
    if (adds := getattr(tokenizer, "_adds_space", None)) is None:
        encoded = _encoded(tokenizer, [_MARK, "a", _MARK + "a"])
        head, letter, both = (tokens for tokens, _ in encoded)
        adds = tokenizer._adds_space = both[len(head) :] != letter
    return adds


def _encoded(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], Offsets]]:
    if not texts:
        return []
    encodings = tokenizer._tokenizer(
        list(texts),
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return list(zip(encodings["input_ids"], encodings["offset_mapping"], strict=True))
