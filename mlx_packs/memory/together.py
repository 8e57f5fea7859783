"""Several packs in one batch: the memory of their step, and the time that it saves."""

import math
from dataclasses import dataclass, replace

from .. import runtime
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.shapes import sequence_inputs
from ..display import size
from ..errors import PackError
from .estimate import estimate, estimator_of, plan_run
from .headers import Headers
from .plan import MemoryPlan, Shape, verdict
from .planned_adapters import LoRAOfPacks
from .step_time import measured_steps, predict

# Of their rate at many rows, what products of this many reach on a GPU: ml-explore/mlx#3584, an M3
# Max, 4-bit and float16 alike.
_ROWS = (64, 128, 256)
_REACHED = (0.68, 0.85, 1.0)
UNKNOWN = "what several packs in one batch save is not known on this device before `packs bench`"
_WORTH = 0.1  # of the time: less than that is none


@dataclass(frozen=True)
class Saving:
    """Predicted seconds of a step of several packs, and of a step of each alone."""

    packs: int
    together_s: float
    alone_s: float  # of all packs, one after the other
    source: str  # of the prediction, in words

    @property
    def share(self) -> float:
        """The share of the time that training them together saves."""
        return 1 - self.together_s / self.alone_s

    def line(self) -> str:
        times = f"{self.together_s:.2g} s a step, {self.alone_s:.2g} s one after the other"
        if self.share < _WORTH:
            return (
                f"{self.packs} packs in one batch save nothing here, as one fills the device: "
                f"{times} ({self.source})"
            )
        return f"{self.packs} packs in one batch save {self.share:.0%}: {times} ({self.source})"

    def to_json(self) -> dict:
        return {**vars(self), "share": self.share}


@dataclass(frozen=True)
class Together:
    """The plan of several packs in one batch."""

    packs: int
    plan: MemoryPlan
    fit: str  # as `verdict` has it
    saving: Saving | None

    def lines(self) -> list[str]:
        fits = {"fits": "fits", "tight": "fits barely", "no": "does not fit: lower --batch-size"}
        peak = f"{self.packs} packs in one batch: peak {size(self.plan.peak_bytes)}, which "

        saves = UNKNOWN
        if self.saving is not None:
            saves = self.saving.line()
        return [peak + fits[self.fit], saves]

    def to_json(self) -> dict:
        return {
            "packs": self.packs,
            "peak_gb": self.plan.peak_gb,
            "fit": self.fit,
            "saving": self.saving and self.saving.to_json(),
        }


def plan_together(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, packs: int, memory: int
) -> Together:
    """Return the plan of a step of several packs that may take ``memory`` bytes."""
    joint = estimate(headers, *of_packs(lora, train, packs))
    saved = saving(headers, lora, train, packs)
    return Together(packs, joint, verdict(joint, memory), saved)


def plan_packs(
    headers: Headers,
    lora: LoRAConfig,
    train: TrainConfig,
    packs: int,
    shapes: set[Shape],
    force: bool,
) -> tuple[dict[str, MemoryPlan], TrainConfig, str]:
    """Return `plan_run` of a step of several packs, its settings, and what it saves, in words.

    ``shapes`` are of the batches of one pack.
    """
    joint_lora, joint = of_packs(lora, train, packs)
    resized = estimator_of(headers.config).resized
    joint_shapes = {resized(shape, train, joint) for shape in shapes}

    try:
        plans = plan_run(headers, joint_lora, joint, joint_shapes, force)
    except PackError as error:
        if error.code != "memory":
            raise
        text = f"--seeds: {packs} packs in one batch: {error.message} Fewer packs take less, too."
        raise PackError(text, "memory", "seeds") from None

    saved = saving(headers, lora, train, packs)
    if saved is None:
        return plans, joint, UNKNOWN
    return plans, joint, saved.line()


def of_packs(lora: LoRAConfig, train: TrainConfig, packs: int) -> tuple[LoRAConfig, TrainConfig]:
    """Return settings of one pack with the rows, and as many adapters, as several have."""
    adapters = LoRAOfPacks(**vars(lora), packs=packs)
    return adapters, replace(train, batch_size=train.batch_size * packs)


def saving(headers: Headers, lora: LoRAConfig, train: TrainConfig, packs: int) -> Saving | None:
    """Return what a step of several packs saves on this device, with rows of the longest length.

    None where no step can be predicted: on a CPU, and on an unknown chip, before `packs bench`.
    """
    one = predict(headers, lora, train)
    # each row meets the adapters of its own pack alone
    all_rows = replace(train, batch_size=train.batch_size * packs)
    together = predict(headers, lora, all_rows)
    if one is None or together is None:
        return None

    alone_s = packs * one.seconds
    together_s = together.seconds
    if not measured_steps() and not runtime.on_cpu():
        rows = train.sequences * sequence_inputs(train.max_seq_length)
        alone_s /= _reached(rows)
        together_s /= _reached(packs * rows)
    return Saving(packs, together_s, alone_s, one.source)


def _reached(rows: int) -> float:
    if rows >= _ROWS[-1]:
        return 1.0
    if rows <= _ROWS[0]:
        return _REACHED[0]

    at = math.log2(rows / _ROWS[0])
    lower = int(at)
    return _REACHED[lower] + (at - lower) * (_REACHED[lower + 1] - _REACHED[lower])
