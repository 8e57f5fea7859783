"""The interface of tasks: a task is one class in one file, named in `config.choices.TASKS`.

`training.run` makes one task for each run and calls its methods in the order in which they are defined
here. Methods with a body are defaults.
"""

import pkgutil
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ...adapters.trainable import Trainable
from ...bases.families import check_task
from ...bases.geometry import select_targets
from ...config.choices import METHODS, TASKS
from ...config.lora import LoRAConfig
from ...config.schema import TrainConfig
from ...data.bad_rows import shown_counts
from ...data.rows import Splits
from ...display import clock
from ...objectives.objective import Objective
from ...objectives.score import check_best
from ...packs.base import Base
from ...packs.pack import Pack
from ..fit import Fit
from ..phase_data import PhaseData, PhaseTask
from ..planning import MemoryChoice
from ..settings import Run
from ..state import COMPUTED_PER_S

_SEVERAL = "mlx_packs.training.tasks.several:SeveralTasks"  # what trains phases of several tasks


_MOST_PASTED = 300  # characters of a prompt in a command


@dataclass(frozen=True)
class Summary:
    """The outcome of a run, in the task's terms."""

    # Scores before and after, for manifest and report; ``split`` and ``rows`` name the examples.
    eval: dict
    objective: dict  # what was trained, for the manifest
    facts: dict = field(default_factory=dict)  # other parts of the manifest
    held_out: dict = field(default_factory=dict)  # more about the held-out examples, for the report
    report: dict = field(default_factory=dict)  # other keys of the report


class Task(PhaseTask, ABC):
    """A task: the model and the examples that it is trained on."""

    lazy_base = False  # whether the base's weights are read when they are used, not before
    unplanned_recompute = "selective"  # where no memory plan is possible
    validated: ClassVar[tuple[str, ...]] = ()  # numbers of its validations, of which --best is one

    masks: Sequence[dict] = ()  # some training examples as `data.masks` has them
    data: Sequence[PhaseData]  # the encoded examples of its phases

    def __init__(self, run: Run) -> None:
        check_best(run.train.best, self.validated)
        self.run = run

    def check(self, name: str, model_type: str) -> None:
        """Check that the base and the settings go with the task; called before and after loading."""
        check_task(self.run.train.task, name, model_type)

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return the base that the loss goes through, and which of its modules are adapted."""
        return base, self.run.lora

    def checked_target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return `target`, whose modules exist: nothing is encoded or measured before that is known."""
        target, lora = self.target(base)
        if not self.run.train.trains_base:
            select_targets(target.model, lora.target_modules, lora.num_layers, lora.modules_to_save)
        return target, lora

    @abstractmethod
    def encode(self, base: Base, splits: Sequence[Splits]) -> list[PhaseData]:
        """Encode the examples of every phase; errors name file and line of an example."""

    def planned_settings(self) -> TrainConfig:
        """Return the settings to plan memory for, with ``auto`` as the task resolves it."""
        return self.run.train

    @abstractmethod
    def objective(self, trainable: Trainable, memory: MemoryChoice) -> Objective:
        """Return the objective of the model that now has ``trainable``."""

    @abstractmethod
    def summary(
        self, trainable: Trainable, objective: Objective, fit: Fit, sources: Sequence[str]
    ) -> Summary:
        """Return the summary of the run; ``sources`` names the data of each phase in public."""

    @staticmethod
    @abstractmethod
    def report_lines(report: dict) -> list[str]:
        """Return the report of a run for people, the headline first."""

    def gate_values(
        self, gates: Mapping[str, float], pack: Pack, summary: Summary, matmul_path: str
    ) -> dict[str, float]:
        """Return the values of those gates that are not about the size of the pack."""
        return {}


def cost(report: Mapping) -> str:
    """Return time and memory of a run for people."""
    planned = report["plan_peak_gb"]
    planned = "" if planned is None else f" ({planned:.2f} estimated)"
    return (
        f"{clock(report['train_s'])} for {report['steps']} updates · MLX peak "
        f"{report['peak_gb']:.2f} GB{planned}, process RSS {report['process_peak_gb']:.2f} GB"
    )


def try_lines(report: Mapping, prompt: str | None = None) -> list[str]:
    """Return commands that use the pack of a run, which can be pasted as they are."""
    pack = shlex.quote(str(report["pack"]))
    lines = [f"pack    {report['pack']} ({report['pack_mb']:.1f} MB)    try:"]
    if report.get("raw_prompt"):
        start = (prompt or "").strip().partition("\n")[0][:_MOST_PASTED]
        return [*lines, f"packs generate --pack {pack} --raw --prompt {shlex.quote(start)}"]

    if prompt and len(prompt) <= _MOST_PASTED and prompt.isprintable():
        lines.append(f"packs generate --pack {pack} --prompt {shlex.quote(prompt)}")
    return [*lines, f"packs chat --pack {pack}"]


def speed(report: Mapping) -> str:
    """Return the throughput of a run in tokens for people: all that were computed, and targets."""
    supervised = f"{report['tokens_per_s']:,.0f}"
    if COMPUTED_PER_S not in report:
        return f"{supervised} supervised tokens/s"
    return f"{report[COMPUTED_PER_S]:,.0f} tokens/s, {supervised} of them supervised"


def evaluated(held_out: Mapping) -> str:
    """Return how many examples were evaluated, and of how many, for people."""
    rows, available = held_out["rows"], held_out.get("available", held_out["rows"])
    number = f"{rows:,}" if rows == available else f"{rows:,} of {available:,}"
    return f"{number} {held_out['split']} examples"


def bad_rows_lines(report: Mapping) -> list[str]:
    """Return how many examples of each split were left out and why, for people."""
    return [
        f"bad     {sum(counts.values()):,} {split} examples left out: {shown_counts(counts)}"
        for split, counts in report.get("bad_rows", {}).items()
    ]


def make_task(run: Run) -> Task:
    """Return the task of a run, which is of several tasks where its phases are."""
    for task in run.train.tasks:
        TASKS.plugin(task)  # raises if its name is taken
    METHODS.plugin(run.train.method)
    return task_class(run.train.tasks)(run)


def task_class(names: Sequence[str]) -> type[Task]:
    """Return the class of a run of these tasks."""
    if len(names) > 1:
        return pkgutil.resolve_name(_SEVERAL)
    return TASKS.load(names[0], Task)
