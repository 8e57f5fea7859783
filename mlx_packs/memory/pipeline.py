"""The memory of a rank of a pipeline, and on how many machines a run fits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ..bases.families import SPLITTABLE
from ..bases.precision import activation_bytes
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..display import size
from .decoder_sizes import plan_of, sizes_of
from .estimate import Estimate, cheapest, estimate
from .headers import Headers
from .plan import MemoryPlan, Shape, verdict
from .read import estimator_of

_BLOCKS = "model.layers."
_TABLE = "model.embed_tokens."
_HEAD = "lm_head."


def stage_blocks(blocks: int, stages: int) -> list[range]:
    """Return the blocks of each stage; the first ones have more where they cannot be equal."""
    least, more = divmod(blocks, stages)
    starts = [stage * least + min(stage, more) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def estimate_stage(
    headers: Headers,
    lora: LoRAConfig,
    train: TrainConfig,
    shapes: Iterable[Shape] | None = None,
    stages: int = 1,
) -> MemoryPlan:
    """Return the peak memory of the rank of a pipeline that takes the most.

    Beside its blocks it has the states that enter them, of the whole batch; all else is of one
    piece of ``--micro-batches``. Every rank counts the loss, which the last one computes. Raises a
    PackError for a family without a plan.
    """
    blocks = sizes_of(headers.config, headers.tensors).blocks
    if shapes is not None:
        shapes = set(shapes)
    resized = estimator_of(headers.config).resized

    piece = replace(train, batch_size=-(-train.batch_size // train.micro_batches))
    pieces = None
    length = train.max_seq_length
    if shapes is not None:
        resized_shapes = (resized(shape, train, piece) for shape in shapes)
        pieces = {(inputs, max(1, targets)) for inputs, targets in resized_shapes}
        length = max(inputs for inputs, _ in shapes)

    numbers = train.batch_size * length * headers.config["hidden_size"]
    states = numbers * activation_bytes(headers.config, train.compute_dtype)

    adapted = min(lora.num_layers, blocks) if lora.num_layers > 0 else blocks
    plans = []
    for own in stage_blocks(blocks, stages):
        of_stage = replace(lora, num_layers=max(1, min(len(own), adapted - (blocks - own.stop))))
        plans.append(estimate(stage_headers(headers, own, blocks), of_stage, piece, pieces))

    plan = max(plans, key=lambda each: each.peak_bytes)
    moments = {
        name: {**parts, "activations": parts["activations"] + states}
        for name, parts in plan.moments.items()
    }
    return replace(plan, moments=moments)


def of_stages(stages: int) -> Estimate:
    return partial(estimate_stage, stages=stages)


def stage_headers(headers: Headers, own: range, blocks: int) -> Headers:
    """Return the headers of a rank's part of a base: its blocks, counted from 0, table or head."""
    tied = not any(name.startswith(_HEAD) for name in headers.tensors)
    is_first = own.start == 0
    is_last = own.stop == blocks

    tensors = {}
    for name, tensor in headers.tensors.items():
        if name.startswith(_BLOCKS):
            number, _, rest = name.removeprefix(_BLOCKS).partition(".")
            if int(number) in own:
                tensors[f"{_BLOCKS}{int(number) - own.start}.{rest}"] = tensor
        elif name.startswith(_TABLE):
            if is_first or (is_last and tied):
                tensors[name] = tensor
        elif is_last or not name.startswith(_HEAD):
            tensors[name] = tensor

    config = headers.config | {"num_hidden_layers": len(own)}
    return Headers(headers.name, config, tensors)


@dataclass(frozen=True)
class Machines:
    """How a run fits on some machines.

    Attributes:
        count: of them.
        plans: of a rank by the way of sharing the run, the simplest first, up to one that fits.
        memory: of a machine, in bytes.
    """

    count: int
    plans: dict[str, MemoryPlan]
    memory: int

    @property
    def needed(self) -> str:
        """The simplest way that fits; ``none`` without one."""
        *_, (way, plan) = self.plans.items()
        if verdict(plan, self.memory) == "fits":
            return way
        return "none"

    def to_json(self) -> dict:
        peaks = {way: plan.peak_gb for way, plan in self.plans.items()}
        return {"count": self.count, "needed": self.needed, "peak_gb": peaks}

    def line(self) -> str:
        peaks = " · ".join(f"{size(plan.peak_bytes)} ({way})" for way, plan in self.plans.items())
        return (
            f"ranks   {self.count} machines (--hosts, --pipeline): each takes {peaks}, of "
            f"{size(self.memory)}; the simplest that fits: {self.needed}"
        )


def plan_machines(
    headers: Headers, memory: int, lora: LoRAConfig, train: TrainConfig, count: int
) -> Machines:
    """Return how a run fits on ``count`` machines with ``memory`` bytes each.

    Of matmul paths and policies of activation checkpointing that are ``auto`` the cheapest count.
    """
    plans = {}
    for way, plan in _ways(headers, lora, train, count):
        plans[way] = plan
        if verdict(plan, memory) == "fits":
            break
    return Machines(count, plans, memory)


def _ways(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, count: int
) -> Iterator[tuple[str, MemoryPlan]]:
    yield "one machine", cheapest(headers, lora, train)
    if train.batch_size % count == 0:
        share = replace(train, batch_size=train.batch_size // count)
        yield "data-parallel", cheapest(headers, lora, share)

    blocks = 0
    if headers.config["model_type"] in SPLITTABLE and plan_of(headers.config) == "dense":
        blocks = sizes_of(headers.config, headers.tensors).blocks
    for stages in range(2, min(count, blocks) + 1):
        yield f"pipeline {stages}", cheapest(headers, lora, train, of_stages(stages))
