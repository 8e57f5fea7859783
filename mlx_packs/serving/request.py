"""What is asked of the thread that computes texts, and what it tells of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..runtime import mx
from .output import Piece
from .sampling import Sampler

Processor = Callable[[mx.array, mx.array], mx.array]  # tokens so far, logits [1, V] -> logits


@dataclass(frozen=True)
class Limits:
    """What a server computes at once, and what it keeps.

    Attributes:
        batch_size: sequences of one batch.
        waiting: requests that wait for a place; more are rejected.
        kv_bytes: keys and values, of running sequences and of earlier prompts.
        prefill_chunk: tokens of a prompt between two tokens of the others.
        context: tokens of prompt and answer together.
        kv_bits: of keys and values, 4 or 8; None keeps them as they are computed.
    """

    batch_size: int
    waiting: int
    kv_bytes: int
    prefill_chunk: int
    context: int
    kv_bits: int | None = None


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, and the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Started:
    """The request computes; so many tokens of its prompt were in memory already."""

    cached: int


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


@dataclass(frozen=True)
class Failed:
    """The request ends without a text."""

    error: Exception


Event = Started | Progress | Finished | Failed


@dataclass(eq=False)
class Request:
    """What is to be generated.

    Attributes:
        model: as `PackRegistry.lease` takes it.
        prompt: its tokens.
        sampler: chooses tokens; None takes the likeliest.
        processors: change the scores before; they are called by the thread that computes.
        state: as `Output` takes it, and ``after`` and ``one_call``.
        top_logprobs: likeliest tokens that are reported with each token; None reports nothing.
        deadline: on the clock of `time.monotonic`.
        on_event: is called by the thread that computes, and must not block.
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
    deadline: float = float("inf")
