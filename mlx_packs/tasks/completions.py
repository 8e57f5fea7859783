"""Completions that the model generates while it trains, and the batches that hold them."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .. import runtime
from ..config.schema import TrainConfig
from ..data.batches import TokenCollate
from ..data.encoding import Example
from ..data.prompts import PromptCollate
from ..data.shapes import Shape, padded_length, padded_targets, sequence_inputs
from ..inference.generate import sample_batch
from ..packs.base import Base
from ..runtime import mx

MOST_AT_ONCE = 64  # completions that are generated together

TokenSampler = Callable[[mx.array], mx.array]  # log-probabilities [N, V] to tokens [N]


def random_sampler(train: TrainConfig, number: int, first: int = 0) -> TokenSampler:
    """Return what draws tokens at the run's temperature, by the seed of the run.

    A batch has a ``number``. Pieces of it that are generated apart have different ``first``.
    """
    keys = _keys(train.seed, number, first)

    def sampler(log_probs: mx.array) -> mx.array:
        return mx.random.categorical(log_probs / train.temperature, key=next(keys))

    return sampler


def _keys(seed: int, number: int, first: int) -> Iterator[mx.array]:
    """Yield the keys of the random numbers of a batch."""
    key = mx.random.split(mx.random.key(seed), number + 1)[number]
    if first:
        key = mx.random.split(key, first + 1)[first]
    while True:
        key, one = mx.random.split(key)
        yield one


def completions(
    base: Base,
    prompts: Sequence[Sequence[int]],
    train: TrainConfig,
    sampler: TokenSampler | None,
    shares: bool,
) -> list[list[int]]:
    """Return the tokens of a completion of each prompt, at least one.

    ``sampler`` and ``shares`` are as in `sample_batch`. Prompts must be shorter than the longest
    sequence of the run.
    """
    room = [train.max_seq_length - len(tokens) for tokens in prompts]
    limits = [min(train.max_completion_length, each) for each in room]
    at_once = min(len(prompts), MOST_AT_ONCE)
    return sample_batch(base, prompts, limits, at_once, sampler, shares)


def completed_examples(
    prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], places: Sequence[str]
) -> list[Example]:
    """Return prompts with their completions, which are the targets; ``places`` are the rows'."""
    return [
        Example(
            np.array([*prompt, *tokens], np.int32),
            np.arange(len(prompt) + len(tokens)) >= len(prompt),
            place,
        )
        for prompt, tokens, place in zip(prompts, generated, places, strict=True)
    ]


def generated_collate(train: TrainConfig, largest: Shape, sequences: int) -> TokenCollate:
    """Return what lays out generated ``sequences``; ``largest`` is the largest shape of a batch."""
    # each shape is compiled, so few are used
    shapes = PromptCollate(largest).few_shapes(sequences) if runtime.COMPILES else None
    return TokenCollate(sequences, sequence_inputs(train.max_seq_length), shapes)


def largest_batch(train: TrainConfig, longest: int) -> Shape:
    """Return the largest shape of a generated batch; prompts have up to ``longest`` tokens."""
    inputs = sequence_inputs(train.max_seq_length)
    width = padded_length(min(longest + train.max_completion_length - 1, inputs), inputs)
    targets = min(train.max_completion_length, width) * train.sequences
    return width, padded_targets(targets, train.sequences * width)
