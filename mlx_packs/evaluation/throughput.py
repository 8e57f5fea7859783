"""Throughput of batched generation by a base, alone and with packs alternating."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..inference.generate import stream_batch
from ..packs.base import Base, activated
from ..packs.pack import Pack
from ..runtime import mx


@dataclass(frozen=True)
class Speed:
    """Figures of a batch of prompts that are completed together, as `BatchReport` has them."""

    batch_size: int
    prompt_tps: float
    decode_tps: float
    first_token_ms: float
    tps_ratio: float
    peak_gb: float


def cut_prompts(rows: Sequence[np.ndarray], count: int, length: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` tokens, cut from the concatenated rows.

    Tokens of images are left out, since a cut would leave a part of one.
    """
    tokens = np.concatenate(rows)
    tokens = tokens[tokens >= 0]
    return np.resize(tokens, (count, length)).tolist()


def time_generation(base: Base, prompts: Sequence[Sequence[int]], max_tokens: int) -> Speed:
    """Complete all prompts together, with exactly ``max_tokens`` each; time one round."""
    started_prompts: set[int] = set()
    mx.clear_cache()
    mx.reset_peak_memory()
    count = at_first = 0
    start = first = time.perf_counter()

    texts = stream_batch(base, prompts, max_tokens, len(prompts), stop=False, shares=False)
    for i, _, _ in texts:
        count += 1
        if len(started_prompts) < len(prompts):
            started_prompts.add(i)
            at_first = count
            first = time.perf_counter()

    decode_s = time.perf_counter() - first
    return Speed(
        batch_size=len(prompts),
        prompt_tps=sum(map(len, prompts)) / (first - start),
        decode_tps=(count - at_first) / decode_s,
        first_token_ms=1e3 * (first - start),
        tps_ratio=1.0,
        peak_gb=mx.get_peak_memory() / 1e9,
    )


def measure_throughput(
    base: Base,
    packs: Sequence[Pack | None],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rounds: int = 3,
    matmul_path: str = "quantized",
    advance: Callable[[], None] | None = None,
) -> list[Speed]:
    """Return the throughput of the base with each pack (None: alone) on a batch of prompts.

    Each runs once to warm up; then they alternate, forth and back, so that a machine that slows
    down or speeds up favours none. Prompts have one length, completions 2 or more tokens; after
    each measurement ``advance`` is called.
    """
    timings: list[list[Speed]] = [[] for _ in packs]
    order = list(range(len(packs)))

    for number in range(rounds + 1):
        models = order if number % 2 else order[::-1]
        for i in models:
            with activated(base, packs[i], matmul_path):
                timing = time_generation(base, prompts, max_tokens)
            if number > 0:  # the first round warms up
                timings[i].append(timing)
            if advance is not None:
                advance()

    return [_medians(of_model, timings[0]) for of_model in timings]


def _medians(rounds: Sequence[Speed], firsts: Sequence[Speed]) -> Speed:
    """Return the medians over rounds; ``firsts`` are the rounds of the first model."""
    return Speed(
        batch_size=rounds[0].batch_size,
        prompt_tps=median(each.prompt_tps for each in rounds),
        decode_tps=median(each.decode_tps for each in rounds),
        first_token_ms=median(each.first_token_ms for each in rounds),
        tps_ratio=median(map(lambda a, b: a.decode_tps / b.decode_tps, rounds, firsts)),
        peak_gb=max(each.peak_gb for each in rounds),
    )
