"""Time our steps against mlx-lm's on one base and several shapes, within a number of seconds."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np
from mlx.utils import tree_flatten

from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError, is_out_of_memory
from ..memory.estimate import estimate, plan_run
from ..memory.headers import Headers
from ..memory.matmul_path import choose_matmul_path
from ..memory.plan import MatmulPathChoice, MemoryPlan
from ..memory.step_time import StepTime, predict
from ..packs.base import Base
from ..runtime import memory_limits, mx, total_memory
from .implementations import SCALE, Adapters, MlxLmTrainer, Ours, TokenRows
from .race import TOLERANCE, Entry, LossesDiffer, race

MIN_ROUNDS = 3
_TURN_S = 0.5  # of a turn, where a step is shorter
_SEED = 0
# What mlx-lm's step takes beside the weights, times ours: captured graphs of Qwen3 and Llama
# (benchmarks/README.md)
_MORE_MEMORY = 2.0

Shape = tuple[int, int]  # examples, tokens of each


@dataclass(frozen=True)
class Side:
    """Timed steps of one implementation, and MLX's peak if it ran on its own, the base included."""

    step_s: list[float]
    peak_bytes: int


@dataclass(frozen=True)
class StepComparison:
    """One shape of one base.

    Attributes:
        shape: Examples of a batch, tokens of each; all are targets.
        choice: Our matmul path, and why.
        plan: Its planned memory; None where there is no plan.
        predicted: The prediction of `packs plan` before this run; None if there is none.
        ratios: Our speed divided by the speed of mlx-lm, round by round.
        fault: Why there is no speed; empty if there is one.
        differs: Whether that is since the implementations disagree.
    """

    shape: Shape
    choice: MatmulPathChoice
    plan: MemoryPlan | None
    predicted: StepTime | None
    mlx_lm: Side | None = None
    ours: Side | None = None
    ratios: tuple[float, ...] = ()
    fault: str = ""
    differs: bool = False

    @property
    def targets(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Contest:
    """A base on which both are timed.

    Attributes:
        name: What records call it.
        note: Why it is computed in another dtype than the stored one; empty if it is not.
    """

    name: str
    base: Base
    headers: Headers
    adapters: Adapters
    note: str = ""

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return self.base.compute_dtype

    @property
    def lora(self) -> LoRAConfig:
        return LoRAConfig(rank=self.adapters.rank, alpha=SCALE * self.adapters.rank)

    def train(self, shape: Shape, path: str) -> TrainConfig:
        return TrainConfig(
            batch_size=shape[0], max_seq_length=shape[1] + 1, matmul_path=path, recompute="none"
        )


def contest(name: str, base: Base, rank: int, note: str = "") -> Contest:
    """Return the contest on a base; a PackError unless mlx-lm and ours can train it."""
    base.check_architecture("bench", "decoder")
    headers = Headers.of(base)

    if custom := headers.custom_format():
        raise PackError(
            f"--model {name}: is {custom.mode.upper()}, which mlx-lm does not train. Name a dense "
            "base or one of mlx-lm's 4 bits.",
            "unsupported",
        )

    try:
        copy.deepcopy(base.model)
    except TypeError as error:  # a module with a compiled function
        raise PackError(
            f"--model {name}: its modules cannot be copied ({error}).", "unsupported"
        ) from None

    adapters = Adapters.random(base, rank, SCALE, _SEED)
    return Contest(name, base, headers, adapters, note)


def compare_steps(of: Contest, shape: Shape, share_s: float, end: float) -> StepComparison:
    """Time both on batches of a shape, alternating, for about ``share_s`` seconds.

    A round that has begun is finished; none but the first begins that would end after ``end``.
    """
    until = min(monotonic() + share_s, end)
    comparison = _planned(of, shape)
    path = comparison.choice.matmul_path
    if comparison.fault:
        return comparison

    try:
        entries = _entries(of, shape, path)
        turns = _turns(entries, until, end)
        race(of.adapters, entries, turns, TOLERANCE[of.dtype])
    except LossesDiffer as error:
        return replace(comparison, fault=f"losses differ: {error}", differs=True)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return replace(comparison, fault="the memory of this machine was not enough")
    finally:
        mx.clear_cache()

    if not entries[0].step_ms:
        return replace(comparison, fault="no time was left after losses were compared")

    frozen = sum(array.nbytes for _, array in tree_flatten(of.base.model.parameters()))
    mlx_lm, ours = (
        Side([ms / 1e3 for ms in entry.all_ms], frozen + entry.peak_bytes) for entry in entries
    )
    rounds = zip(entries[0].step_ms, entries[1].step_ms, strict=True)
    ratios = tuple(float(np.median(theirs) / np.median(mine)) for theirs, mine in rounds)
    return replace(comparison, mlx_lm=mlx_lm, ours=ours, ratios=ratios)


def _planned(of: Contest, shape: Shape) -> StepComparison:
    """Return the facts known before anything runs."""
    fault = ""
    try:
        fault = _too_large(of, shape)
        train = of.train(shape, "auto")
        plans = plan_run(of.headers, of.lora, train, {(shape[1], math.prod(shape))}, force=True)
    except PackError:  # a family without a plan
        plans = {}

    tokens = math.prod(shape)
    if fault:
        choice = MatmulPathChoice("quantized" if of.headers.is_quantized else "dense", {}, "")
    else:
        choice = choose_matmul_path(of.base.model, tokens, planned=frozenset(plans) or None)

    path = choice.matmul_path
    predicted = predict(of.headers, of.lora, of.train(shape, path))
    return StepComparison(shape, choice, plans.get(path), predicted, fault=fault)


def _too_large(of: Contest, shape: Shape) -> str:
    """Return why a shape does not fit into memory; empty if both should."""
    memory = total_memory()
    train = of.train(shape, "quantized" if of.headers.is_quantized else "dense")
    parts = estimate(of.headers, of.lora, train, {(shape[1], math.prod(shape))}).parts()
    weights = parts.pop("base")
    needed = weights + _MORE_MEMORY * sum(parts.values())
    if needed <= memory:
        return ""
    return f"mlx-lm would take about {needed / 1e9:.0f} GB of {memory / 1e9:.0f}"


def _entries(of: Contest, shape: Shape, path: str) -> list[Entry]:
    """Return mlx-lm's side and ours; both use the same weights, since MLX copies no arrays."""
    rows = TokenRows.random(*shape, of.base.vocab_size, _SEED, offset=1)

    def fresh() -> Base:
        return replace(of.base, model=copy.deepcopy(of.base.model))

    peer = MlxLmTrainer(fresh, of.adapters)
    ours = Ours(fresh, of.adapters, path)
    return [
        Entry("mlx-lm", peer, rows, rows.for_mlx_lm()),
        Entry("mlx_packs", ours, rows, rows.for_ours(), untimed=1, around=memory_limits),
    ]


def _turns(entries: Sequence[Entry], until: float, end: float) -> Iterator[int]:
    """Yield the numbers of rounds there is time for; set the steps of a turn before the first."""
    left = until - monotonic()
    for entry in entries:
        step_s = entry.checked_ms[-1] / 1e3
        most = left / (MIN_ROUNDS * len(entries) * step_s) - entry.untimed
        entry.steps = max(1, math.floor(min(math.ceil(_TURN_S / step_s), most)))

    number = 0
    last = 0.0
    limit = end  # of the first round
    while monotonic() + last <= limit:
        start = monotonic()
        yield number
        last = monotonic() - start
        number += 1
        limit = until
