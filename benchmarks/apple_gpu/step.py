"""Costs of a step of a whole model, of the graphs of its first two and three blocks.

Their difference is a block, and everything but the blocks is in both.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from .capture import MLX_LM, OURS, Captured, StepJob, capture
from .costs import Graph, Op, priced
from .peak import Queue, peak_bytes
from .seconds import CHIPS, DEFAULT_CHIPS, STEP_S, TRACE_S, seconds

_FEW, _MORE = 2, 3  # blocks


@dataclass(frozen=True)
class Costs:
    """Sums over ops: dispatching primitives, kernels, bytes moved, operations, seconds by chip.

    peak_bytes: arrays of the step that are alive together, without weights.
    """

    primitives: float
    dispatches: float
    bytes: float
    operations: float
    peak_bytes: float
    seconds: dict[str, float]

    def plus(self, other: "Costs", times: float) -> "Costs":
        """Return the sum of these and of others so many times."""
        names = ("primitives", "dispatches", "bytes", "operations", "peak_bytes")
        sums = {name: getattr(self, name) + times * getattr(other, name) for name in names}
        chips = {chip: s + times * other.seconds[chip] for chip, s in self.seconds.items()}
        return Costs(**sums, seconds=chips)


@dataclass(frozen=True)
class Step:
    """A step of one implementation.

    Args:
        job: what was laid out, with the blocks of the whole model.
        targets: rows of the head.
        block: what one block costs.
        block_kinds: the same by kind of op.
        rest: embedding, head, loss, gradient norm and whatever else is no block.
        in_flight_bytes: at most, beside the peak: arrays that only command buffers still hold.
        fixed_s: what every step takes, whatever it computes.
    """

    implementation: str
    job: StepJob
    targets: int
    block: Costs
    block_kinds: dict[str, Costs]
    rest: Costs
    in_flight_bytes: int
    fixed_s: float = STEP_S

    @property
    def name(self) -> str:
        method = f" {self.job.method}" if self.job.method != "lora" else ""
        if self.job.weights != "affine4":
            method += f" {self.job.weights}"
        if self.implementation == MLX_LM:
            return MLX_LM + method + " --grad-checkpoint" * (self.job.recompute == "block")
        name = f"{OURS}{method} {self.job.path}"
        name += f", recompute {self.job.recompute}" if self.job.recompute != "none" else ""
        if self.job.groups:
            name += ", tree"
        name += ", packed" if self.job.packed else ""
        return name + ("" if self.job.compiled else ", not compiled")

    @property
    def whole(self) -> Costs:
        """Of all blocks; seconds with the fixed time of a step."""
        costs = self.rest.plus(self.block, self.job.config["num_hidden_layers"])
        fixed = {chip: s + self.fixed_s for chip, s in costs.seconds.items()}
        return replace(costs, seconds=fixed)

    @property
    def trace_s(self) -> float:
        """Predicted seconds of tracing and compiling it once."""
        return TRACE_S * self.whole.primitives


def lay_out(
    asked: Sequence[tuple[str, StepJob]],
    chips: Sequence[str] = DEFAULT_CHIPS,
    fixed_s: float = STEP_S,
) -> list[Step]:
    """Return the steps of implementations, each implementation's in a process of its own.

    Raises: capture.Failed, costs.Unpriced.
    """

    def of(implementation: str) -> list[Step]:
        jobs = [job for name, job in asked if name == implementation]
        cut = [_cut(job, blocks) for job in jobs for blocks in (_FEW, _MORE)]
        captured = capture(implementation, cut)
        pairs = zip(jobs, captured[::2], captured[1::2], strict=True)
        return [_step(implementation, job, few, more, chips) for job, few, more in pairs]

    names = list(dict.fromkeys(name for name, _ in asked))
    with ThreadPoolExecutor() as pool:
        steps = dict(zip(names, map(iter, pool.map(of, names)), strict=True))
    return [replace(next(steps[name]), fixed_s=fixed_s) for name, _ in asked]


def _cut(job: StepJob, blocks: int) -> StepJob:
    return replace(job, config=job.config | {"num_hidden_layers": blocks})


def _step(
    implementation: str, job: StepJob, few: Captured, more: Captured, chips: Sequence[str]
) -> Step:
    less, whole = (priced(captured.nodes, captured.outputs) for captured in (few, more))
    less_costs, costs = (
        replace(sums(graph.ops, chips), peak_bytes=peak_bytes(graph)) for graph in (less, whole)
    )
    block = costs.plus(less_costs, -1)
    kinds = _by_kind(whole, chips)
    for kind, own in _by_kind(less, chips).items():
        kinds[kind] = kinds.get(kind, sums([], chips)).plus(own, -1)
    kinds = {kind: own for kind, own in kinds.items() if own.dispatches}
    in_flight = peak_bytes(whole, Queue()) - int(costs.peak_bytes)
    rest = costs.plus(block, -_MORE)
    return Step(implementation, job, more.targets, block, kinds, rest, in_flight)


def _by_kind(graph: Graph, chips: Sequence[str]) -> dict[str, Costs]:
    """Return the costs of ops by name and dtypes."""
    kinds: dict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        if op.dispatches:
            inputs = dict.fromkeys(_short(a.dtype) for a in op.inputs if a.layout.size > 1)
            kinds[f"{op.name} {' '.join(inputs)} > {_short(op.outputs[0].dtype)}"].append(op)
    return {kind: sums(ops, chips) for kind, ops in kinds.items()}


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "f").replace("int", "i")


def sums(ops: Sequence[Op], chips: Sequence[str]) -> Costs:
    """Return the costs of ops, but for their peak, which depends on the order of all."""
    return Costs(
        primitives=sum(op.dispatches > 0 for op in ops),
        dispatches=sum(op.dispatches for op in ops),
        bytes=sum(op.bytes for op in ops),
        operations=sum(op.operations for op in ops),
        peak_bytes=0,
        seconds={name: sum(seconds(op, CHIPS[name]) for op in ops) for name in chips},
    )
