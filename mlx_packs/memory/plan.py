"""The plan of a training run: its memory by part at the moments that can be its worst, its disk.

An estimator (`decoder`, `encoder`) follows a step by hand: what the forward pass keeps for the
backward pass, and what is in flight. What the estimators share is here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config.choices import LOSSES, POLICIES, TASKS, LossFacts
from ..offload.sizes import BlocksOnDisk

if TYPE_CHECKING:
    from ..config.schema import TrainConfig

ERROR = 0.15  # the largest error seen in benchmarks/plan_accuracy.py is below this
PARTS = "base adapters gradients optimizer activations logits working".split()

# Of a batch: (inputs of a row, target slots of the batch). Of a task `by_text`: (tokens of a text,
# texts of a row).
Shape = tuple[int, int]


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run at the moments that can be its worst, in bytes by part.

    The buffers that MLX has freed and caches are no part of it: neither `mx.get_peak_memory` nor
    the need of a run counts them, since MLX takes them first when memory is short.

    Attributes:
        base: The frozen weights, quantized and dense.
        adapters: The trainable parameters.
        moments: What comes and goes, by moment (``loss``, ``mlp``, ``attention``, ``update``; of
            encoders ``backward``, ``update``): gradients; activations kept for the backward pass;
            logits in slices; working: temporaries in flight, dequantized weights among them.
        adapter_weights: Number of trainable parameters.
        tensors: Number of arrays that they are in.
        offload: The blocks of the base that are on disk; None if all of it is in memory.
    """

    base: int
    adapters: int
    optimizer: int
    moments: Mapping[str, Mapping[str, int]]
    matmul_path: str
    recompute: str
    adapter_weights: int
    base_weights: int
    tensors: int
    offload: BlocksOnDisk | None = None

    def with_batches_together(self, memory: int) -> "MemoryPlan":
        """Return the plan with an update's batches passing blocks together, if that safely fits."""
        if self.offload is None or self.offload.together_bytes is None:
            return self

        moments = {name: dict(parts) for name, parts in self.moments.items()}
        for name, parts in moments.items():
            if name != "update":
                parts["activations"] += self.offload.together_bytes
            if name in ("update", "loss"):
                parts["gradients"] -= self.offload.accumulated_bytes

        plan = replace(self, moments=moments, offload=replace(self.offload, together=True))
        return plan if verdict(plan, memory) == "fits" else self

    def with_blocks_in_memory(self, memory: int) -> "MemoryPlan":
        """Return the plan with as many blocks in memory as safely fit."""
        spare = int(memory / (1 + ERROR)) - self.peak_bytes
        offload = self.offload.in_memory(spare)
        kept = self.offload.saved_bytes - offload.saved_bytes
        return replace(self, base=self.base + kept, offload=offload)

    @property
    def moment(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts().values())

    @property
    def peak_gb(self) -> float:
        """What `mx.get_peak_memory` should report, in GB of 10^9 bytes."""
        return self.peak_bytes / 1e9

    def parts(self) -> dict[str, int]:
        """Return the bytes by part at the worst moment; they add up to the peak."""
        constant = {"base": self.base, "adapters": self.adapters, "optimizer": self.optimizer}
        parts = constant | self.moments[self.moment]
        return {name: parts[name] for name in PARTS}


@dataclass(frozen=True)
class DiskPlan:
    """The most that a run has on disk at a time, in bytes.

    Attributes:
        checkpoint: One checkpoint.
        checkpoints: How many there are at most, the one that is being written among them.
        pack: The pack.
    """

    checkpoint: int
    checkpoints: int
    pack: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoint * self.checkpoints + self.pack

    def to_json(self) -> dict:
        return {
            "total_gb": self.total_bytes / 1e9,
            "checkpoint_bytes": self.checkpoint,
            "checkpoints": self.checkpoints,
            "pack_bytes": self.pack,
        }


@dataclass(frozen=True)
class MatmulPathChoice:
    matmul_path: str
    step_ms: dict[str, float]  # that each measured path would take
    reason: str  # where the times are from or why there are none, why another path was left out

    def line(self) -> str:
        times = " · ".join(f"{name} {ms:,.0f} ms" for name, ms in self.step_ms.items())
        choice = self.matmul_path
        if times:
            choice = f"{times} → {choice}"
        if self.reason:
            choice = f"{choice} ({self.reason})"
        return choice


@dataclass(frozen=True)
class MemoryChoice:
    """The plans of a run (None where none is possible) and their decisions."""

    plan: MemoryPlan | None
    choice: MatmulPathChoice
    recompute: str
    disk: DiskPlan | None = None
    unplanned: str = ""  # why there is no plan

    @property
    def peak_gb(self) -> float | None:
        if self.plan is None:
            return None
        return self.plan.peak_gb


def verdict(plan: MemoryPlan, memory: int) -> str:
    """Return ``fits`` (with the error of the estimate to spare), ``tight`` (without) or ``no``.

    One rule for `packs plan`, which recommends what fits, and for `packs train`, which warns of
    what is tight and rejects the rest.
    """
    if plan.peak_bytes * (1 + ERROR) <= memory:
        return "fits"
    return "tight" if plan.peak_bytes <= memory else "no"


def moment_parts(
    gradients: float, activations: float = 0, logits: float = 0, working: float = 0
) -> dict[str, int]:
    return {
        "gradients": int(gradients),
        "activations": int(activations),
        "logits": int(logits),
        "working": int(working),
    }


def recompute_policies(train: "TrainConfig") -> tuple[str, ...]:
    """Return the policies of activation checkpointing that a run may take, the fastest first."""
    if train.recomputes == "auto":
        return tuple(POLICIES)
    return (train.recomputes,)


def has_score_head(train: "TrainConfig") -> bool:
    """Return whether a run trains a head for scores, which goes with adapters alone."""
    return any(train.head_of(task) == "score" for task in train.tasks)


def has_logits(train: "TrainConfig") -> bool:
    """Return whether a run computes logits: one of heads for scores, or of vectors, does not."""
    facts = [TASKS[task] for task in train.tasks]
    if all(each.by_text for each in facts):
        return False
    return any(train.head_of(task) != "score" for task in train.tasks)


def embedding_loss(train: "TrainConfig") -> LossFacts:
    """Return the facts of the loss of embeddings; before the rows are known, the loss of pairs."""
    return LOSSES.get(train.loss, LOSSES["mnrl"])


def unquantized(train: "TrainConfig", **settings: Any) -> "TrainConfig":
    """Return settings, some replaced, that quantize nothing on loading."""
    return replace(train, quantize="none", keep=(), double_quant=True, **settings)


def accumulates(train: "TrainConfig") -> bool:
    """Return whether a run adds up the gradients of several batches, in a copy of their size."""
    return train.grad_accumulation_steps > 1
