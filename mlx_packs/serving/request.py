"""One text: what is asked for, how its tokens are chosen and become pieces, what is told of it.

A text ends at a stop string; its reasoning and its tool calls are pieces apart.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..bases.tokenizer import opens_thoughts
from ..runtime import mx

Kind = Literal["content", "reasoning", "tool_call"]
_KINDS: dict[str | None, Kind] = {"reasoning": "reasoning", "tool": "tool_call"}
Sampler = Callable[[mx.array], mx.array]
# Of a temperature and of top_p: less is 0 in float32, of which samplers make numbers at random.
_LEAST = 1e-6


def sampler_of(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None
) -> Sampler | None:
    """Return what chooses tokens [B] by log-probabilities [B, V]; None always takes the likeliest.

    Each request has its own random numbers: the same seed gives the same tokens whatever else is in
    the batch. ``top_k`` is all if it is 0 or less, or as many as there are.
    """
    if temperature < _LEAST:
        return None

    filters: list[Sampler] = []
    if top_p < 1:
        filters.append(partial(apply_top_p, top_p=max(top_p, _LEAST)))
    if min_p:
        filters.append(partial(apply_min_p, min_p=min_p))
    if top_k > 0:
        filters.append(lambda x: apply_top_k(x, top_k) if top_k < x.shape[-1] else x)

    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
    key = mx.random.key(seed % 2**64)

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        for keep in filters:
            logprobs = keep(logprobs)
        key, now = mx.random.split(key)
        return mx.random.categorical(logprobs / temperature, key=now)

    return sample


Processor = Callable[[mx.array, mx.array], mx.array]  # tokens so far, logits [1, V] -> logits


@dataclass(frozen=True)
class Piece:
    """Text of one kind; a tool call's is the whole call, as the model wrote it."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Limits:
    """What a server computes at once, and what it keeps.

    Attributes:
        batch_size: sequences of one batch.
        waiting: requests that wait for a place; more are rejected.
        kv_bytes: keys and values, of running sequences and of earlier prompts.
        prefill_chunk: tokens of a prompt between two tokens of the others.
        context: tokens of prompt and answer together.
    """

    batch_size: int
    waiting: int
    kv_bytes: int
    prefill_chunk: int
    context: int


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, and the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Started:
    """The request computes.

    Attributes:
        cached: tokens of its prompt that were in memory already.
        adapters: hash of the adapters of its pack; None for the base.
    """

    cached: int
    adapters: str | None = None


@dataclass(frozen=True)
class Progress:
    """Text that one token ended, which may be none."""

    pieces: tuple[Piece, ...]
    logprob: Logprob | None


@dataclass(frozen=True)
class Finished:
    """The text has its end: a stop string or token, or as many tokens as were asked for."""

    reason: Literal["stop", "length"]
    tokens: int


# An exception ends the request without a text.
Event = Started | Progress | Finished | Exception


@dataclass(eq=False)
class TextRequest:
    """What is to be generated.

    Attributes:
        model: as `PackRegistry.lease` takes it.
        prompt: its tokens.
        sampler: chooses tokens; None takes the likeliest.
        processors: change the scores before; they are called by the thread that computes.
        state: as `Output` takes it, and ``after`` and ``one_call``.
        top_logprobs: likeliest tokens that are reported with each token; None reports nothing.
        stop_tokens: tokens that end the text, which is reported with its last token; None takes the
            tokenizer's, which are not reported.
        deadline: on the clock of `time.monotonic`.
        on_event: is called by the thread that computes, and must not block.
        tokenizer: of the model's packs, if it is not the base model's: its tokens end the text.
        images: what the tokens below zero of the prompt name; they exist while the request does.
    """

    model: str
    prompt: list[int]
    max_tokens: int
    on_event: Callable[[Event], None]
    sampler: Callable[[], Sampler | None] = lambda: None
    processors: Sequence[Processor] = ()
    stop: Sequence[str] = ()
    state: str | None = None
    after: Sequence[int] | None = None
    one_call: bool = False
    top_logprobs: int | None = None
    stop_tokens: Sequence[int] | None = None
    deadline: float = float("inf")
    tokenizer: Any = None
    images: Sequence[Any] = ()


# Makes the request of a text by its number, and by what its events are told to.
MakeRequest = Callable[[int, Callable[[Event], None]], TextRequest]


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
