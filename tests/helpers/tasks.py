"""A task as a run has it before its first step, and runs that were interrupted."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.adapters.saved_modules import attach_method
from mlx_packs.config.data import DataConfig
from mlx_packs.memory.plan import MatmulPathChoice, MemoryChoice
from mlx_packs.objectives.objective import Objective
from mlx_packs.objectives.reference import PhaseReference
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from mlx_packs.tasks.phases import resolve_phases
from mlx_packs.tasks.task import Binding, Calls, make_tasks
from mlx_packs.training.run_folder import RunFolder, run_folder
from tests.helpers.runs import Lines

# Settings of short runs of tasks.
SHORT = {
    "matmul_path": "dense",
    "lr_schedule": "constant",
    "save_every": 2,
    "steps_per_report": 1,
    "steps_per_eval": 2,
}


def tensors_of(pack: Path) -> dict[str, np.ndarray]:
    """The tensors of a pack's folder."""
    return {name: np.array(t) for name, t in mx.load(str(pack / "adapters.safetensors")).items()}


class EncodedTask:
    """A task whose examples are encoded as in a run.

    Attributes:
        data: of each phase.
        lines: what the user was told.
    """

    def __init__(
        self,
        base: Base,
        data: Path | None,
        train: TrainConfig,
        lora: LoRAConfig,
        reward: Callable | None = None,
    ) -> None:
        display = Lines()
        columns = DataConfig() if data is None else DataConfig(data=str(data))
        self.train = train
        self._phases = resolve_phases(train, columns)

        calls = Calls(display, reward=reward)
        (self.task,) = make_tasks(self._phases, train, lora, calls).values()
        self.task.check(base.name, base.config["model_type"])
        self._target, self._lora = self.task.checked_target(base)

        splits = [phase.load_rows() for phase in self._phases]
        self.data = self.task.encode(base, self._phases, splits)
        self.lines = "\n".join(display.lines)

    def bind(self) -> Objective:
        """Attach what is trained; the objective of the last phase, which begins."""
        self.trainable = attach_method(self._target, self._lora, self.train, "dense")
        names = [phase.name for phase in self._phases]
        starts = {name: PhaseReference(self.trainable, Path("unused"), bare=True) for name in names}
        memory = MemoryChoice(None, MatmulPathChoice("dense", {}, ""), "none")
        objective = self.task.bind(Binding(self.trainable, self.data, starts, memory))[-1]
        objective.begin(fresh=True)
        return objective


def interrupted(pack: Path, out: Path) -> Path:
    """A copy ``out`` of a finished run without its pack and its last checkpoint."""
    shutil.copytree(run_folder(pack), run_folder(out))
    shutil.rmtree(RunFolder.of(out).checkpoints()[-1])
    return out
