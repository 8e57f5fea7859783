"""How the tokens of one request are chosen inside a batch, each with its own random numbers."""

import os
from collections.abc import Callable
from functools import partial

from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..runtime import mx

Sampler = Callable[[mx.array], mx.array]
# Of a temperature and of top_p: less is 0 in float32, of which samplers make numbers at random.
_LEAST = 1e-6


def sampler_of(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None
) -> Sampler | None:
    """Return what chooses tokens [B] by log-probabilities [B, V]; None always takes the likeliest.

    The same seed gives the same tokens whatever else is in the batch. ``top_k`` 0 is all.
    """
    if temperature < _LEAST:
        return None

    filters: list[Sampler] = []
    if top_p < 1:
        filters.append(partial(apply_top_p, top_p=max(top_p, _LEAST)))
    if min_p:
        filters.append(partial(apply_min_p, min_p=min_p))
    if top_k:
        filters.append(partial(apply_top_k, top_k=top_k))

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
