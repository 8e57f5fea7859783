"""Estimate the disk space of a run: checkpoints and the pack."""

from pathlib import Path

from ..config.schema import TrainConfig
from ..display import size
from ..errors import PackError
from ..files import free_bytes
from .plan import DiskPlan, MemoryPlan

# Measured, by tensor: an entry in the header of safetensors, and one of a manifest.
_ENTRY_BYTES = 110
_MANIFEST_BYTES = 170
# Measured: the rest of a checkpoint and of a pack.
_STATE_BYTES = 1_000
_PACK_BYTES = 5_700
_COPIES = 3  # of each trainable parameter in a checkpoint: itself and two moments
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
