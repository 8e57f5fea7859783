"""What is asked of the thread that computes texts, what it tells of each, how tokens are chosen."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..runtime import mx
from .output import Piece

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
