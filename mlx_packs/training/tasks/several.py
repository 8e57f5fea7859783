"""Phases of several tasks, as completions and then preferences: each phase has a task of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...adapters.trainable import Trainable
from ...config.lora import LoRAConfig
from ...data.rows import Splits
from ...objectives.objective import Objective
from ...packs.base import Base
from ...packs.pack import Pack
from ..fit import Fit
from ..phase_data import PhaseData
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

    @property
    def data(self) -> Sequence[PhaseData]:
        """The examples of all phases, each encoded by its task."""
        return self._data

    @data.setter
    def data(self, data: Sequence[PhaseData]) -> None:
        self._data = data
        for part in self.parts.values():
            part.data = [each for each in data if each.task is part]

    def encode(self, base: Base, splits: Sequence[Splits]) -> list[PhaseData]:
        """Encode the examples of every phase by its task."""
        read = dict(zip((phase.name for phase in self.run.phases), splits, strict=True))
        encoded: dict[str, PhaseData] = {}
        for part in self.parts.values():
            data = part.encode(base, [read[phase.name] for phase in part.run.phases])
            encoded |= {each.phase.name: each for each in data}
        self.masks = self.last.masks
        return [encoded[phase.name] for phase in self.run.phases]

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


class SeveralObjectives(Objective):
    """The objectives of phases of several tasks."""

    unit = "tokens"

    def __init__(self, phases: Sequence[RunPhase], objectives: Mapping[str, Objective]) -> None:
        self.phases, self.objectives = phases, objectives

    def of_phase(self, start: int) -> Objective:
        """Return the objective of a phase."""
        (phase,) = (phase for phase in self.phases if phase.start == start)
        return self.objectives[phase.train.task]

    def begin_phase(self, start: int, fresh: bool) -> None:
        """Prepare for the steps of a phase."""
        self.of_phase(start).begin_phase(start, fresh)

    def close(self) -> None:
        """Release what all of them hold."""
        for objective in self.objectives.values():
            objective.close()
