"""Estimate memory and disk space of a run, and check that it fits before a weight is read."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import runtime
from ..config.choices import MATMUL_PATHS, MatmulPathFacts
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..display import size
from ..errors import PackError, any_of
from ..files import free_bytes
from .headers import Headers
from .plan import ERROR, DiskPlan, MemoryPlan, Shape, recompute_policies, unquantized, verdict
from .read import estimator_of, teacher_bytes

SHORTEST = 256  # tokens; a plan proposes nothing shorter
LEAST_RANK = 4  # and no smaller rank
_HELPS = 0.98  # a remedy takes less than this share
# Measured, by tensor: an entry in the header of safetensors, and one of a manifest.
_ENTRY_BYTES = 110
_MANIFEST_BYTES = 170
# Measured: the rest of a checkpoint and of a pack.
_STATE_BYTES = 1_000
_PACK_BYTES = 5_700
_COPIES = 3  # of each trainable parameter in a checkpoint: itself and two moments
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


# The peak memory of a run, or of a rank of it, by headers, lora, train and shapes: `estimate`.
Estimate = Callable[..., MemoryPlan]


def estimate(
    headers: Headers,
    lora: LoRAConfig,
    train: TrainConfig,
    shapes: Iterable[Shape] | None = None,
) -> MemoryPlan:
    """Return the peak memory of training with these settings, by part.

    Matmul path ``auto`` counts as quantized, recomputation ``auto`` as keeping all. ``shapes`` are
    those of the run's batches, by default the largest possible.
    """
    train = headers.as_loaded(train)
    one = estimator_of(headers.config).estimate
    if shapes is None:
        plans = [one(headers, lora, train)]
    else:
        # of shapes that only differ in their targets: estimates rise with these, to 2 %
        largest = {(type(shape), shape[0], *shape[2:]): shape for shape in sorted(shapes)}
        plans = [one(headers, lora, train, shape) for shape in largest.values()]

    plan = max(plans, key=lambda plan: plan.peak_bytes)
    if train.teacher is not None:
        return replace(plan, base=plan.base + teacher_bytes(train.teacher))
    return plan


def matmul_paths(headers: Headers, train: TrainConfig) -> list[str]:
    """Return the matmul paths that a run may take, the cheapest in memory first."""
    if train.trains_base:
        return ["dense"]
    if train.matmul_path != "auto":
        return [train.matmul_path]

    quantized = headers.is_quantized or headers.as_loaded(train).quantize != "none"
    if not quantized:
        return ["dense"]
    if train.offloads:
        return [path for path, facts in MATMUL_PATHS.items() if not facts.keeps_dense]
    return list(MATMUL_PATHS)


def cheapest(
    headers: Headers,
    lora: LoRAConfig,
    train: TrainConfig,
    estimate_of: Estimate = estimate,
    shapes: Iterable[Shape] | None = None,
) -> MemoryPlan:
    """Return the plan of the matmul path and the policy of recomputation that take the least."""
    plans = [
        estimate_of(headers, lora, replace(train, matmul_path=path, recompute=policy), shapes)
        for path in matmul_paths(headers, train)
        for policy in recompute_policies(train)
    ]
    return min(plans, key=lambda plan: plan.peak_bytes)


def least(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, estimate_of: Estimate = estimate
) -> MemoryPlan:
    """Return the cheapest plan of the shortest batches."""
    shape = estimator_of(headers.config).smallest_shape(train)
    return cheapest(headers, lora, train, estimate_of, [shape])


def check_least(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, estimate_of: Estimate = estimate
) -> MemoryPlan:
    """Return the plan of `least`; raise a PackError unless it fits into this machine."""
    plan = least(headers, lora, train, estimate_of)
    if verdict(plan, runtime.total_memory()) == "no":
        ways = remedies(headers, lora, train, partial(least, headers, estimate_of=estimate_of))
        raise _too_large(plan, ways, "at least ")
    return plan


def plan_run(
    headers: Headers,
    lora: LoRAConfig,
    train: TrainConfig,
    shapes: set[Shape],
    force: bool = False,
    estimate_of: Estimate = estimate,
) -> dict[str, MemoryPlan]:
    """Return the plan of each matmul path that a run may take, with the first policy that fits.

    Paths that do not fit, or not as well as another one, are left out; with ``force`` the cheapest
    is taken all the same. ``headers`` are those of the base as it is loaded (`Headers.of`). Raises
    a PackError (code ``memory``) if nothing fits, or no plan is possible.
    """
    train = unquantized(train)  # it is done already
    memory = runtime.total_memory()
    plans = {
        path: _first_fitting(
            partial(estimate_of, headers, lora), replace(train, matmul_path=path), shapes, memory
        )
        for path in matmul_paths(headers, train)
    }

    for wanted in ("fits", "tight"):
        if fitting := {p: plan for p, plan in plans.items() if verdict(plan, memory) == wanted}:
            return fitting

    smallest = min(plans.values(), key=lambda plan: plan.peak_bytes)
    if force:
        return {smallest.matmul_path: smallest}
    resized = estimator_of(headers.config).resized

    def plan_of(lora: LoRAConfig, less: TrainConfig) -> MemoryPlan:
        return estimate_of(headers, lora, less, {resized(shape, train, less) for shape in shapes})

    planned = replace(
        train,
        matmul_path=smallest.matmul_path,
        recompute=smallest.recompute,
        grad_checkpoint=False,
    )
    raise _too_large(smallest, remedies(headers, lora, planned, plan_of))


def _first_fitting(
    estimate_of: Callable[..., MemoryPlan], train: TrainConfig, shapes: set[Shape], memory: int
) -> MemoryPlan:
    """Return the plan of the first policy of recomputation that fits, else of the cheapest."""
    plans = []
    for policy in recompute_policies(train):
        plans.append(estimate_of(replace(train, recompute=policy), shapes))
        if verdict(plans[-1], memory) == "fits":
            return plans[-1]
    return min(plans, key=lambda plan: plan.peak_bytes)


def _too_large(plan: MemoryPlan, ways: list[str], bound: str = "") -> PackError:
    return PackError(
        f"training would take {bound}{size(plan.peak_bytes)} (± {ERROR:.0%}) of "
        f"{size(runtime.total_memory())}. Use {any_of(ways)}, or pass --force to try anyway.",
        "memory",
    )


def remedies(
    headers: Headers,
    lora: LoRAConfig,
    train: TrainConfig,
    plan_of: Callable[[LoRAConfig, TrainConfig], MemoryPlan],
) -> list[str]:
    """Return settings that would take less memory by ``plan_of``, the mildest first."""
    shorter = max(train.max_seq_length // 2, SHORTEST)
    smaller_batches = {
        "a smaller --batch-size": (lora, replace(train, batch_size=-(-train.batch_size // 2))),
        "--recompute block": (lora, replace(train, recompute="block")),
        "a smaller --max-seq-length": (lora, replace(train, max_seq_length=shorter)),
    }

    if train.trains_base:
        path = "quantized" if headers.is_quantized else "dense"
        ways = {
            "--method lora": (lora, replace(train, method="lora", matmul_path=path)),
            **smaller_batches,
            "--optimizer adamw_8bit": (lora, replace(train, optimizer="adamw_8bit")),
            "a smaller --num-layers": (replace(lora, num_layers=1), train),
        }
    else:
        less_rank = replace(lora, rank=max(lora.rank // 2, LEAST_RANK))
        ways = {**smaller_batches, "a smaller --rank": (less_rank, train)}
        transient = replace(train, matmul_path="transient")
        if offloaded := _with_base_on_disk(train):
            ways["--offload-base on"] = (lora, offloaded)
        if train.quantize == "none" and not headers.is_quantized and not train.offloads:
            ways = {"--quantize nf4": (lora, replace(transient, quantize="nf4")), **ways}
        elif MATMUL_PATHS.get(train.matmul_path, MatmulPathFacts()).keeps_dense:
            ways = {"--matmul-path transient": (lora, transient), **ways}

    enough = _HELPS * plan_of(lora, train).peak_bytes
    helpful = [way for way, settings in ways.items() if plan_of(*settings).peak_bytes < enough]
    if train.teacher is not None:
        helpful.insert(0, "a --teacher-cache, which --teacher writes before the run")
    return [*helpful, "a smaller base"]


def _with_base_on_disk(train: TrainConfig) -> TrainConfig | None:
    """Return settings with the base on disk; None if others exclude it."""
    path = train.matmul_path
    if MATMUL_PATHS.get(path, MatmulPathFacts()).keeps_dense:
        path = "transient"
    try:
        return replace(train, offload_base="on", recompute="block", matmul_path=path)
    except PackError:
        return None


def plan_disk(plan: MemoryPlan, train: TrainConfig) -> DiskPlan:
    entries = plan.tensors * _ENTRY_BYTES
    adapters = _ITEM_BYTES[train.pack_dtype] * plan.adapter_weights
    return DiskPlan(
        checkpoint=plan.adapters + plan.optimizer + _COPIES * entries + _STATE_BYTES,
        checkpoints=_most_checkpoints(train),
        pack=adapters + entries + plan.tensors * _MANIFEST_BYTES + _PACK_BYTES,
    )


def _most_checkpoints(train: TrainConfig) -> int:
    """Return how many checkpoints a run has at a time: those it keeps, the best, and a new one."""
    lengths = [phase.iters or train.iters for phase in train.phases] or [train.iters]

    written = sum(-(-length // train.save_every) for length in lengths)
    if train.keep_last == -1:
        return written
    scored = train.val_batches != 0 and train.steps_per_eval < max(lengths)
    return min(written, train.keep_last + scored + 1)


def disk_summary(plan: DiskPlan) -> str:
    plural = "s" if plan.checkpoints > 1 else ""
    return (
        f"{size(plan.total_bytes)} ({plan.checkpoints} checkpoint{plural} of "
        f"{size(plan.checkpoint)}, pack {size(plan.pack)})"
    )


def check_disk(plan: DiskPlan, folder: Path, present: int = 0) -> None:
    """Raise a PackError if a run does not fit; ``present`` are bytes that it will replace there."""
    free = free_bytes(folder)
    if free is not None and plan.total_bytes > free + present:
        raise PackError(
            f"{folder}: the run would take {disk_summary(plan)} of disk, but "
            f"{size(free + present)} are free. Free some space, choose another --out, take a "
            "smaller --keep-last, or pass --force to try anyway.",
            "unwritable",
            "out",
        )
