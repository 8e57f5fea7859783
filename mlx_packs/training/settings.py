"""The settings of one training run."""

from dataclasses import dataclass
from pathlib import Path

from ..config.schema import DataConfig, LoRAConfig, TrainConfig
from ..display import Display
from ..packs.base import Base
from .phases import RunPhase
from .run_folder import ResumePoint


@dataclass(frozen=True)
class Run:
    """A training run: what to train on what, and where."""

    base: Base | str | Path  # a loaded base, or what `load_base` takes
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
    force: bool = False  # whether to train although the memory plan exceeds the machine

    @property
    def goal(self) -> RunPhase:
        """The last phase: the pack is evaluated on its held-out examples."""
        return self.phases[-1]
