"""Completions that the model generates while it trains, and the batches that hold them."""

from collections.abc import Callable, Iterator, Sequence

from ..config.schema import TrainConfig
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


def largest_batch(train: TrainConfig, longest: int) -> Shape:
    """Return the largest shape of a generated batch; prompts have up to ``longest`` tokens."""
    inputs = sequence_inputs(train.max_seq_length)
    width = padded_length(min(longest + train.max_completion_length - 1, inputs), inputs)
    targets = min(train.max_completion_length, width) * train.sequences
    return width, padded_targets(targets, train.sequences * width)
