"""The settings of one training run."""

from dataclasses import dataclass
from pathlib import Path

from ..config.schema import DataConfig, LoRAConfig, TrainConfig
from ..display import Display
from ..packs.base import Base
from .phases import RunPhase


@dataclass(frozen=True)
class Run:
    """A training run: what to train on what, and where.

    Attributes:
        base: a loaded base, or what `load_base` takes.
        phases: the phases that ``train`` resolves to, at least one.
        pack: folder of the pack.
        folder: the run folder.
        overwrite: whether a pack and a run that are there may be replaced.
        resume: whether to continue from the last checkpoint of ``folder``.
        resume_adapter_file: adapters to start from.
        report_to: experiment trackers, separated by commas.
        force: whether to train although the memory plan exceeds the machine.
    """

    base: Base | str | Path
    lora: LoRAConfig
    train: TrainConfig
    columns: DataConfig
    phases: tuple[RunPhase, ...]
    pack: Path
    folder: Path
    display: Display
    overwrite: bool = False
    resume: bool = False
    resume_adapter_file: str | None = None
    report_to: str | None = None
    project_name: str | None = None
    trust_remote_code: bool = False
    force: bool = False

    @property
    def goal(self) -> RunPhase:
        """The last phase: the pack is evaluated on its held-out examples."""
        return self.phases[-1]
