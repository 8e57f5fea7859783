"""Phases of several tasks, as completions and then preferences: each phase has a task of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...adapters.trainable import Trainable
from ...config.lora import LoRAConfig
from ...data.rows import Splits
from ...memory.plan import Shape
from ...objectives.objective import Batch, Objective
from ...packs.base import Base
from ...packs.pack import Pack
from ..dataset import Dataset
from ..fit import Fit
from ..phases import RunPhase
from ..planning import MemoryChoice
from ..settings import Run
from .task import Summary, Task, task_class


class SeveralTasks(Task):
    """A task for each phase; the pack and its results are those of the last one."""

    def __init__(self, run: Run) -> None:
        self.parts: dict[str, Task] = {
            name: task_class([name])(_with_phases_of(run, name)) for name in run.train.tasks
        }
        super().__init__(run)

    @property
    def run(self) -> Run:
        """The run, whose phases the parts share."""
        return self._run

    @run.setter
    def run(self, run: Run) -> None:
        self._run = run
        for name, part in self.parts.items():
            part.run = _with_phases_of(run, name)

    def check(self, name: str, model_type: str) -> None:
        """Check the base and the settings of every task."""
        for part in self.parts.values():
            part.check(name, model_type)

    @property
    def last(self) -> Task:
        """The task of the last phase."""
        return self.parts[self.run.goal.train.task]

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return what the last task adapts, which the others train too."""
        for part in self.parts.values():
            target = part.target(base)
            if part is self.last:
                of_last = target
        return of_last

    def encode(self, base: Base, splits: Sequence[Splits]) -> "SeveralDatasets":
        """Encode the examples of every phase by its task."""
        read = dict(zip((phase.name for phase in self.run.phases), splits, strict=True))
        datasets = {
            name: part.encode(base, [read[phase.name] for phase in part.run.phases])
            for name, part in self.parts.items()
        }
        return SeveralDatasets(self.run.phases, datasets)

    def objective(self, trainable: Trainable, memory: MemoryChoice) -> "SeveralObjectives":
        """Return the objectives of all phases."""
        objectives = {name: part.objective(trainable, memory) for name, part in self.parts.items()}
        return SeveralObjectives(self.run.phases, objectives)

    def summary(
        self, trainable: Trainable, objective: "SeveralObjectives", fit: Fit, sources: Sequence[str]
    ) -> Summary:
        """Return the summary of the last task, with the phases of all."""
        reports: dict[str, dict] = {}
        for name, part in self.parts.items():
            own = [
                source
                for phase, source in zip(self.run.phases, sources, strict=True)
                if phase.train.task == name
            ]
            summary = part.summary(trainable, objective.objectives[name], fit, own)
            reports |= {each["name"]: each for each in summary.report["phases"]}
            if part is self.last:
                of_last = summary
        phases = [reports[phase.name] for phase in self.run.phases]
        return replace(
            of_last,
            facts={**of_last.facts, "phases": phases},
            report={**of_last.report, "task": self.run.goal.train.task, "phases": phases},
        )

    @staticmethod
    def report_lines(report: dict) -> list[str]:
        """Return the lines of the last task."""
        return task_class([report["task"]]).report_lines(report)

    def gate_values(
        self, gates: Mapping[str, float], pack: Pack, summary: Summary, matmul_path: str
    ) -> dict[str, float]:
        """Return the values of the gates that the last task has."""
        return self.last.gate_values(gates, pack, summary, matmul_path)


def _with_phases_of(run: Run, task: str) -> Run:
    return replace(run, phases=tuple(phase for phase in run.phases if phase.train.task == task))


class SeveralDatasets(Dataset):
    """The examples of phases of several tasks."""

    def __init__(self, phases: Sequence[RunPhase], datasets: Mapping[str, Dataset]) -> None:
        self.phases, self.datasets = phases, datasets
        self._trained = self._of(phases[-1])
        self.masks = self._trained.masks

    def _of(self, phase: RunPhase) -> Dataset:
        return self.datasets[phase.train.task]

    def counts(self) -> dict[str, int]:
        """Return the number of examples by phase and split."""
        return {key: n for each in self.datasets.values() for key, n in each.counts().items()}

    def shapes(self) -> set[Shape]:
        """Return the shapes of all training batches."""
        return {shape for each in self.datasets.values() for shape in each.shapes()}

    def batches(self, phase: RunPhase, start: int) -> Iterator[Batch]:
        """Batches of a phase without end, from batch number ``start``."""
        self._trained = self._of(phase)
        return self._trained.batches(phase, start)

    def batches_per_epoch(self) -> int:
        """Return the batches of an epoch of the last phase."""
        return self._of(self.phases[-1]).batches_per_epoch()

    def mean_inputs(self) -> None:
        """Batches of several tasks have no common measure."""

    def resized(self, phases: Sequence[RunPhase]) -> "SeveralDatasets":
        """Return the same examples for phases with other numbers of batches."""
        datasets = {
            name: each.resized([phase for phase in phases if phase.train.task == name])
            for name, each in self.datasets.items()
        }
        return SeveralDatasets(phases, datasets)

    def rows(self, batch: Any) -> list[str]:
        """Return the rows of a batch of the phase at work, as messages name them."""
        return self._trained.rows(batch)

    def validation(self, phase: RunPhase) -> Sequence[Any]:
        """Return what a phase is validated on."""
        return self._of(phase).validation(phase)

    def held_out(self, phase: RunPhase) -> Sequence[Any]:
        """Return what a phase is evaluated on."""
        return self._of(phase).held_out(phase)

    def typical_rows(self) -> tuple[int, int] | None:
        """Return the rows of a typical batch of the last phase."""
        return self._of(self.phases[-1]).typical_rows()


class SeveralObjectives(Objective):
    """The objectives of phases of several tasks."""

    unit = "tokens"

    def __init__(self, phases: Sequence[RunPhase], objectives: Mapping[str, Objective]) -> None:
        self.phases, self.objectives = phases, objectives
        self._trained = self.of_phase(phases[-1].start)

    def of_phase(self, start: int) -> Objective:
        """Return the objective of a phase."""
        (phase,) = (phase for phase in self.phases if phase.start == start)
        return self.objectives[phase.train.task]

    def begin_phase(self, start: int, fresh: bool) -> None:
        """Prepare for the steps of a phase."""
        self._trained = self.of_phase(start)
        self._trained.begin_phase(start, fresh)

    def split(self, batch: Any, parts: int) -> Sequence[Any]:
        """Return a batch of the phase at work in pieces."""
        return self._trained.split(batch, parts)

    def close(self) -> None:
        """Release what all of them hold."""
        for objective in self.objectives.values():
            objective.close()
