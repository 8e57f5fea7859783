"""How fast a base answers, alone and with packs: batched, after a warm-up, in turns."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..errors import PackError
from ..packs.base import Base, activated
from ..packs.pack import Pack
from ..runtime import mx, on_cpu
from .generate import stream_batch


@dataclass(frozen=True)
class Speed:
    """Medians over the rounds, of a batch of prompts that are answered together.

    prompt_tps: tokens of all prompts, by the time until each has its first token, which is
    ``first_token_ms``.   decode_tps: tokens of all answers after the first.   tps_ratio: decode_tps
    over that of the first model in the same round.   peak_gb: MLX's arrays, weights too.
    """

    batch_size: int
    prompt_tps: float
    decode_tps: float
    first_token_ms: float
    tps_ratio: float
    peak_gb: float


def prompts_of(rows: Sequence[np.ndarray], count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens, cut from rows that stand one behind the other."""
    tokens = np.concatenate(rows)
    return np.resize(tokens, (count, length)).tolist()


def answering_path(measured: str) -> str:
    """How frozen weights are multiplied in answers: packed, as `packs generate` does; on a CPU,
    where that is far slower, as was measured to be best."""
    return measured if on_cpu() else "quantized"


def check_tokens(max_tokens: int) -> None:
    """Raises: PackError for answers that are too short to have a speed."""
    if max_tokens < 2:
        raise PackError(f"--max-tokens {max_tokens}: must be 2 or more.")


def race(
    base: Base,
    packs: Sequence[Pack | None],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rounds: int = 3,
    matmul_path: str = "quantized",
    advance=None,
) -> list[Speed]:
    """The speed of the base with each pack (None: alone) on a batch of prompts.

    Each is run once to warm up; then they take turns, forth and back, so that a machine that slows
    down or speeds up favours none.
    """
    check_tokens(max_tokens)
    found: list[list[_Run]] = [[] for _ in packs]
    order = list(range(len(packs)))
    for number in range(rounds + 1):
        for i in order if number % 2 else order[::-1]:
            with activated(base, packs[i], matmul_path):
                run = _timed(base, prompts, max_tokens)
            found[i] += [run] if number else []
            if advance is not None:
                advance()
    size = len(prompts)
    return [
        Speed(
            size,
            median(size * len(prompts[0]) / run.first_s for run in runs),
            median(run.decode_tps for run in runs),
            median(run.first_s for run in runs) * 1e3,
            median(r.decode_tps / o.decode_tps for r, o in zip(runs, found[0], strict=True)),
            max(run.peak_gb for run in runs),
        )
        for runs in found
    ]


@dataclass(frozen=True)
class _Run:
    first_s: float
    decode_tps: float
    peak_gb: float


def _timed(base: Base, prompts: Sequence[Sequence[int]], max_tokens: int) -> _Run:
    """Answer all prompts at once, with ``max_tokens`` each whatever the model says."""
    seen: set[int] = set()
    mx.clear_cache()
    mx.reset_peak_memory()
    count, at_first, first, started = 0, 0, None, time.perf_counter()
    for i, _ in stream_batch(base, prompts, max_tokens, len(prompts), stop=False):
        count += 1
        seen.add(i)
        if first is None and len(seen) == len(prompts):
            at_first, first = count, time.perf_counter()
    ended = time.perf_counter()
    decode_tps = (count - at_first) / (ended - first)
    return _Run(first - started, decode_tps, mx.get_peak_memory() / 1e9)
