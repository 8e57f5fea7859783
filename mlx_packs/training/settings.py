"""The settings of one training run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.data import DataConfig
from ..config.lora import LoRAConfig
from ..config.optimizer import arguments_of
from ..config.schema import TrainConfig
from ..display import Display
from ..errors import PackError, flag_of
from ..objectives.causal_lm import TargetLoss
from .observer import Observer
from .phases import RunPhase
from .run_folder import ResumePoint

if TYPE_CHECKING:
    from ..packs.base import Base
    from .rewards import RewardFunction


@dataclass(frozen=True)
class Run:
    """A training run: what to train on what, and where."""

    base: "Base | str | Path"  # a loaded base, or what `load_base` takes
    lora: LoRAConfig
    train: TrainConfig
    columns: DataConfig
    phases: tuple[RunPhase, ...]  # that ``train`` resolves to, at least one
    pack: Path  # its folder
    folder: Path  # the run folder
    display: Display
    overwrite: bool = False  # whether a pack and a run that are there may be replaced
    resume: bool = False  # whether to continue from a checkpoint of ``folder``
    resume_point: ResumePoint | None = None  # which one, once it is chosen
    resume_adapter_file: str | None = None  # adapters to start from
    report_to: str | None = None  # experiment trackers, separated by commas
    project_name: str | None = None  # of the trackers
    trust_remote_code: bool = False
    overflow: str = ""  # why a run that began in float16 goes on in bfloat16
    begins_with_adapters: bool = (
        False  # whether the run began with adapters, not with the base alone
    )
    callbacks: tuple[Observer, ...] = ()  # that the caller gives
    loss: TargetLoss | None = None  # in place of the cross-entropy
    reward: "RewardFunction | None" = None  # of generated completions
    force: bool = False  # whether to train although the memory plan exceeds the machine

    def __post_init__(self) -> None:
        train = self.train
        for callback in self.callbacks:
            if not isinstance(callback, Observer):
                raise PackError(
                    f"callbacks: must be objects of a class of mlx_packs.Observer, but one is of "
                    f"{type(callback).__name__}.",
                    flag="callbacks",
                )
        if self.loss is not None and train.tasks != ("lm",):
            raise PackError(
                f"loss: is for task lm, but the task is {', '.join(train.tasks)}.",
                "conflict",
                "loss",
            )
        if self.reward is not None and "grpo" not in train.tasks:
            raise PackError(
                f"reward: is for task grpo, but the task is {', '.join(train.tasks)}.",
                "conflict",
                "reward",
            )
        if self.loss is not None and (named := train.changed(("z_loss", "label_smoothing"))):
            text = "loss: replaces the cross-entropy that it belongs to. Leave one of them out."
            raise PackError(f"{flag_of(named[0])} and {text}", "conflict", named[0])

    @property
    def loss_name(self) -> str | None:
        """The name of the function that is in place of the cross-entropy; None without one."""
        if self.loss is None:
            return None
        return getattr(self.loss, "__qualname__", type(self.loss).__qualname__)

    def with_settings(self, train: Mapping[str, Any], columns: Mapping[str, Any]) -> "Run":
        """Return the run with other settings, in all phases; where those begin stays."""
        return replace(
            self,
            train=replace(self.train, **train),
            columns=replace(self.columns, **columns),
            phases=tuple(phase.with_settings(train, columns) for phase in self.phases),
        )

    def as_it_began(self, earlier: dict | None) -> "Run":
        """Return the run with the earlier defaults of the run that it resumes, by its identity."""
        if earlier is None:
            return self
        train, earlier_columns = self.train, {}
        if not self.columns.changed(["hold_out"]):
            earlier_columns["hold_out"] = earlier["recipe"]["hold_out"]
        if self.columns.template_date is None:
            earlier_columns["template_date"] = earlier["recipe"].get("template_date")
        earlier_defaults = {
            name: earlier["recipe"][name]
            for name in ("bias_correction", "warmup_from_zero")
            if not train.changed([name]) and name not in arguments_of(vars(train))
        }
        if train.test_batches is None:  # older runs evaluate all
            earlier_defaults["test_batches"] = earlier["recipe"].get("test_batches", -1)
        return self.with_settings(earlier_defaults, earlier_columns)

    @property
    def goal(self) -> RunPhase:
        """The last phase: the pack is evaluated on its held-out examples."""
        return self.phases[-1]
