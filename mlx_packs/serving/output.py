"""Tokens of one request to pieces of text: up to a stop string, with reasoning and tools apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from ..bases.tokenizer import opens_thoughts

Kind = Literal["content", "reasoning", "tool_call"]
_KINDS: dict[str | None, Kind] = {"reasoning": "reasoning", "tool": "tool_call"}


@dataclass(frozen=True)
class Piece:
    """Text of one kind; that of a tool call is the whole call, as the model wrote it."""

    kind: Kind
    text: str


class Output:
    """The text of one request as it grows.

    Args:
        tokenizer: mlx-lm's wrapper, which knows how a model marks reasoning and tool calls.
        stop: strings that end the text, and are not part of it.
        state: where the text begins: ``normal``, ``reasoning``, or None to look for no marks.
        after: last tokens of a text that is continued, so that its first space is kept; None
            begins a new text.
        one_call: whether the text ends with its first tool call.

    Attributes:
        stopped: whether a stop string was found, or the only call has ended.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        state: str | None,
        after: Sequence[int] | None = None,
        one_call: bool = False,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer
        if after is not None:
            for token in after:
                self._detokenizer.add_token(token)
            _ = self._detokenizer.last_segment  # is not part of the text

        self._stop = stop_words(tuple(stop)).make_state()

        marks = make_text_state_machine(tokenizer) if state is not None else TextStateMachine()
        self._marks = marks.make_state(state or "normal")
        self._call = ""
        self._one_call = one_call
        self.stopped = False

    def add(self, token: int) -> Iterator[Piece]:
        self._detokenizer.add_token(token)
        yield from self._take(self._detokenizer.last_segment)

    def finish(self) -> Iterator[Piece]:
        """Yield what was held back, because it could have been the beginning of a mark."""
        self._detokenizer.finalize()
        yield from self._take(self._detokenizer.last_segment)

        if not self.stopped:
            _, rest, _ = TextStateMachine.flush(self._stop)
            yield from self._marked(rest)

        state, rest, name = TextStateMachine.flush(self._marks)
        yield from self._pieces([(name, rest)])
        if self._call:
            yield Piece("tool_call", self._call)
            self._call = ""

    def _take(self, text: str) -> Iterator[Piece]:
        if self.stopped or not text:
            return
        self._stop, segments = TextStateMachine.split(self._stop, text)
        self.stopped = segments[-1][0] is None
        yield from self._marked("".join(part for name, part in segments if name is not None))

    def _marked(self, text: str) -> Iterator[Piece]:
        if text:
            self._marks, segments = TextStateMachine.split(self._marks, text)
            yield from self._pieces(segments)

    def _pieces(self, segments: Sequence[tuple[str | None, str]]) -> Iterator[Piece]:
        """Yield segments by kind; a tool call when it has ended."""
        for name, text in segments:
            kind = _KINDS.get(name, "content")
            if kind == "tool_call":
                self._call += text
                continue

            if self._call:
                yield Piece("tool_call", self._call)
                self._call = ""
                if self._one_call:
                    self.stopped = True
                    return
            if text:
                yield Piece(kind, text)


@lru_cache(maxsize=8)  # of the sequences of a request, which share it
def stop_words(words: tuple[str, ...]) -> TextStateMachine:
    if not words:
        return TextStateMachine()
    return TextStateMachine({"normal": [(word, None) for word in words]})


def first_state(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return where the answer to a prompt begins: in the thoughts that the template has opened?"""
    if tokenizer.response_initial_state:
        return tokenizer.response_initial_state
    if tokenizer.has_thinking and opens_thoughts(tokenizer, prompt):
        return "reasoning"
    return "normal"
