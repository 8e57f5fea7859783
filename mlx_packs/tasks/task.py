"""The interface of tasks: a task is one class in one file, named in `config.choices.TASKS`.

`training.prepare` makes a task for all phases that name it. A run calls its methods in the order in
which they are defined here. The pack and its results are of the last phase's task. Methods with a
body are defaults.
"""

import math
import pkgutil
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ..adapters.full_tensors import fresh_score_head, with_score_head
from ..adapters.spec import SCORE
from ..adapters.trainable import Trainable
from ..bases.geometry import select_targets
from ..bases.supported import check_task
from ..config.choices import METHODS, OBJECTIVES, TASKS
from ..config.lora import LoRAConfig
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..data.dataset import Dataset, ExampleSet
from ..data.row_format import shown_counts
from ..data.rows import Splits
from ..data.sampler import Draw
from ..display import Display, clock
from ..evaluation.metrics import Metric
from ..gates import gates_text
from ..memory.plan import MemoryChoice
from ..objectives.causal_lm import TargetLoss
from ..objectives.objective import Objective
from ..objectives.reader import hidden_states
from ..objectives.reference import PhaseReference
from ..objectives.score import Score, check_best
from ..packs.base import Base
from ..packs.facts import answer_line, format_change, mistake_lines, phase_lines
from ..packs.pack import Pack
from .phases import PHASE_SETTINGS, PhaseData, RunPhase, counted, show_cut, show_notes, show_phase
from .sample_prompt import SamplePrompt

# Takes prompts, completions and the other columns of the rows, a list each; returns a number each,
# or None for a completion that it does not score.
RewardFunction = Callable[..., Sequence[float | None]]

_MOST_PASTED = 300  # characters of a prompt in a command
_LEAST_TO_CHAT = 5e7  # weights; a smaller base, as the bundled one, repeats its examples
_SHOWN_CHARACTERS = 160  # of each text of a sample


@dataclass(frozen=True)
class Calls:
    """What a task calls of the user's: functions, and the display."""

    display: Display
    loss: TargetLoss | None = None  # in place of the cross-entropy
    reward: RewardFunction | None = None  # of generated completions
    metric: Metric | None = None  # of answers, in place of --metric

    @property
    def loss_name(self) -> str | None:
        """The name of the function that is in place of the cross-entropy; None without one."""
        if self.loss is None:
            return None
        return getattr(self.loss, "__qualname__", type(self.loss).__qualname__)


@dataclass(frozen=True)
class Binding:
    """A model that now has its trainable parameters, and the phases of the task that trains them.

    ``references`` has the model as each phase began, by the phase's name.
    """

    trainable: Trainable
    data: Sequence[PhaseData]
    references: Mapping[str, PhaseReference]
    memory: MemoryChoice


@dataclass(frozen=True)
class Trained:
    """What a run has measured of its phases, when they are over."""

    trainable: Trainable
    data: Sequence[PhaseData]  # of every phase
    sources: Sequence[str]  # the public name of the examples of every phase
    phases: Sequence[RunPhase]  # of the whole run, of other tasks too
    curve: Sequence[Mapping]  # the lines of metrics.jsonl
    scores: Sequence[Mapping[str, Score]]  # by phase: before the first one and after each
    initial: PhaseReference  # of the run: what every number and sample "before" is of

    @property
    def last(self) -> PhaseData:
        """The last phase, whose held-out examples the results are of."""
        return self.data[-1]

    def ends(self) -> tuple[Any, Any]:
        """Return the scores of the last phase's held-out examples before and after the run."""
        name = self.last.phase.name
        return self.scores[0][name], self.scores[-1][name]


@dataclass(frozen=True)
class Summary:
    """The outcome of a run, in the task's terms."""

    # Scores before and after, for manifest and report; ``split`` and ``rows`` name the examples.
    eval: dict
    objective: dict  # what was trained, for the manifest
    facts: dict = field(default_factory=dict)  # other parts of the manifest
    held_out: dict = field(default_factory=dict)  # more about the held-out examples, for the report
    report: dict = field(default_factory=dict)  # other keys of the report


class Task(ABC):
    """A task: the model and the examples that it is trained on."""

    lazy_base = False  # whether the base's weights are read when they are used, not before
    unplanned_recompute = "selective"  # where no memory plan is possible
    cut_parts: ClassVar[str] = "texts"  # what is cut if it has too many tokens; "" if none is
    validated: ClassVar[tuple[str, ...]] = ()  # numbers of its validations, of which --best is one

    base: Base
    followed: Sequence[SamplePrompt] = ()  # with --sample-every; `encode` sets them

    def __init__(self, phase: RunPhase, lora: LoRAConfig, calls: Calls) -> None:
        check_best(phase.train.best, self.validated)
        # of its last phase; with --epochs only the phases of `PhaseData` have the final `iters`
        self.train = phase.train
        self.columns = phase.columns
        self.lora = lora
        self.calls = calls

    @property
    def display(self) -> Display:
        return self.calls.display

    @staticmethod
    def prepared_recipe(recipe: Recipe, display: Display) -> Recipe:
        """Return the recipe of a run, after what has to be written before its base is loaded."""
        return recipe

    @staticmethod  # noqa: B027 - most tasks need no more
    def join_ranks(lora: LoRAConfig) -> None:
        """Let ranks do more than share the batches of a run; called before the base is read."""

    @staticmethod
    def trained_here(trainable: Trainable, display: Display) -> Trainable:
        """Return what this rank trains of what the run trains."""
        return trainable

    def check(self, name: str, model_type: str) -> None:
        """Check that base and settings go with the task; called before and after loading."""
        check_task(self.train.task, name, model_type)

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return the base that the loss goes through, and which of its modules are adapted."""
        return base, self.lora

    def with_trained_head(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return the base with a new head of scores, which is trained in full."""
        hidden_states(base.model, base.name, self.train.task)
        model = with_score_head(base.model, fresh_score_head(base, self.train.seed))
        saved = (*self.lora.modules_to_save, SCORE)
        return replace(base, model=model), replace(self.lora, modules_to_save=saved)

    def checked_target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return `target`, once its modules are known to exist: nothing is encoded before."""
        target, lora = self.target(base)
        if not self.train.trains_base:
            select_targets(target.model, lora.target_modules, lora.num_layers, lora.modules_to_save)
        return target, lora

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        """Encode the examples of its phases; errors name file and line of an example."""
        self.base = base
        encoded = []
        for phase, read in zip(phases, splits, strict=True):
            show_phase(phase, self.display)
            examples = self.encoded(phase, read)
            line = f"{read.source} · {counted(examples)} {self.described(examples)}"
            self.display.line("data", line)
            if self.cut_parts:
                limit = self.longest_text(phase.train)
                show_cut(examples, limit, self.cut_parts, self.display)
            show_notes(read, phase.columns, base.tokenizer, self.display)
            encoded.append(examples)
        return self.phase_data(phases, encoded)

    def encoded(self, phase: RunPhase, read: Splits) -> Mapping[str, Any]:
        """Return the examples of every split of a phase, by `phases.encode_each`."""
        raise NotImplementedError

    def longest_text(self, train: TrainConfig) -> int:
        """Return how many tokens of a text or an example are read."""
        return train.max_seq_length

    def described(self, examples: Mapping[str, Any]) -> str:
        """Return what the examples of the splits are, after their number: ``examples · text``."""
        raise NotImplementedError

    def phase_data(
        self, phases: Sequence[RunPhase], encoded: Sequence[Mapping[str, Any]]
    ) -> list[PhaseData]:
        """Return the data of phases, each of which may draw from the examples of all."""
        parts = [each["train"] for each in encoded]
        joined = type(parts[0]).joined(parts)

        data = []
        start = 0
        for phase, splits in zip(phases, encoded, strict=True):
            stop = start + len(splits["train"])
            train = self.training(phase, joined, Draw(start, stop, phase.replay))
            data.append(PhaseData(self, phase, splits, train))
            start = stop
        return data

    def training(self, phase: RunPhase, examples: Any, draw: Draw) -> Dataset:
        """Return the training batches of a phase, whose examples are drawn from all."""
        raise NotImplementedError

    @abstractmethod
    def evaluation(self, phase: RunPhase, examples: Any, chosen: np.ndarray) -> Dataset:
        """Return what `Objective.score` scores, of a split the examples with these indices."""

    @abstractmethod
    def sampled(self, data: PhaseData) -> np.ndarray:
        """Return which held-out examples a phase is evaluated on by default, in random order."""

    def typical_rows(self, data: PhaseData) -> tuple[int | tuple[int, ...], int] | None:
        """Rows of a typical batch through a frozen weight and the head; None if all is dense.

        Where a batch takes several passes over the blocks, the rows of each.
        """
        return None

    def planned_facts(self) -> dict[str, int]:
        """Return what memory depends on besides settings and shapes: fields of `memory.Headers`."""
        return {}

    def planned_settings(self, train: TrainConfig) -> TrainConfig:
        """Return settings to plan memory for, with ``auto`` as the task resolves it."""
        return train

    @abstractmethod
    def bind(self, binding: Binding) -> list[Objective]:
        """Return the objective of each of its phases."""

    @abstractmethod
    def summary(self, trained: Trained) -> Summary:
        """Return the summary of the run, whose last phase is of this task."""

    @staticmethod
    def report_lines(report: dict) -> list[str]:
        """Return the report of a run for people, the headline first."""
        return run_lines(report)

    def gate_values(
        self, gates: Mapping[str, float], pack: Pack, summary: Summary, held_out: ExampleSet
    ) -> dict[str, float]:
        """Return the values of those gates that are not about the size of the pack."""
        return {}


def summarized(
    trained: Trained,
    objective: Mapping,
    facts: Mapping | None = None,
    report: Mapping | None = None,
    results: Mapping | None = None,
    held_out: Mapping | None = None,
    ends: tuple[Score, Score] | None = None,
) -> Summary:
    """Return the summary of a run by the scores of the last phase's held-out examples.

    ``results`` are entries of its ``eval`` besides what the scores report, and ``ends`` are the
    scores before and after, if others. The other arguments are as in `Summary`.
    """
    last = trained.last
    before, after = ends or trained.ends()
    phases = phase_reports(trained)
    named = {"phases": phases} if phases else {}

    return Summary(
        eval={
            "split": last.held_out_split,
            "available": last.held_out_examples.count,
            **after.described,
            **_before_and_after(before.reported, after.reported),
            **(results or {}),
        },
        objective=dict(objective),
        facts={**named, **(facts or {})},
        held_out=dict(held_out or {}),
        report={"phases": phases, "objective": objective, **(report or {})},
    )


def _before_and_after(before: Mapping, after: Mapping) -> dict[str, float | None]:
    """Return numbers as a report of a run names them: ``mae_before``, ``mae_before_se``."""
    entries = {}
    for when, metrics in (("before", before), ("after", after)):
        for name, value in metrics.items():
            metric = name.removesuffix("_se")
            entries[f"{metric}_{when}{name.removeprefix(metric)}"] = value
    return entries


def phase_reports(trained: Trained) -> list[dict]:
    """Return the report of each phase of a run; empty if the run has no phases."""
    reports = []
    # the phases of other tasks count, too
    numbers = {phase.name: at for at, phase in enumerate(trained.phases)}

    for own, source in zip(trained.data, trained.sources, strict=True):
        phase = own.phase
        if not phase.name:
            continue

        losses = [
            x["loss"]
            for x in trained.curve
            if "loss" in x and phase.first_batch < x["batch"] <= phase.stop
        ] or [None]
        rows = {split: examples.count for split, examples in own.splits.items()}
        split = own.held_out_split
        optimizer_state = "carry" if phase.carries_optimizer else "fresh"

        number = numbers[phase.name]
        reports.append(
            {
                "name": phase.name,
                "data": source,
                "batches": [phase.first_batch, phase.stop],
                "steps": -(-phase.train.iters // phase.train.grad_accumulation_steps),
                **{key: getattr(phase.train, key) for key in PHASE_SETTINGS},
                "replay": phase.replay,
                "optimizer_state": optimizer_state,
                "rows": rows,
                "loss_first": losses[0],
                "loss_last": losses[-1],
                "held_out": {"split": split, "rows": rows[split]},
                "before": _perplexities(trained.scores[number]),
                "after": _perplexities(trained.scores[number + 1]),
            }
        )

    return reports


def _perplexities(scores: Mapping[str, Score]) -> dict:
    named = {name: score.perplexity for name, score in scores.items()}
    return {name: values for name, values in named.items() if values is not None}


def run_lines(report: Mapping) -> list[str]:
    """Return the report of a run for people: whatever it has of what tasks report."""
    examples = _evaluated(report["held_out"])
    result = f"held-out {format_change(report)} on {examples}{gates_text(report['gates'])}"
    lines = [f"done    {result}"]
    if answers := report.get("answers"):
        lines.insert(0, answer_line(answers, f"{report['held_out']['split']} examples"))
    if teacher := report.get("teacher"):
        lines.append(_teacher_line(report, teacher))

    lines += mistake_lines(report.get("mistakes", ()))
    lines += [f"phase   {line}" for line in phase_lines(report["phases"])]
    lines += [
        f"bad     {sum(counts.values()):,} {split} examples left out: {shown_counts(counts)}"
        for split, counts in report.get("bad_rows", {}).items()
    ]
    lines.append(f"speed   {_speed(report)} · {_cost(report)}")

    if "sample" in report:
        samples = report.get("samples") or [report["sample"]]
        lines += [line for sample in samples for line in _sample_lines(sample)]
        return lines + try_lines(report, samples[0].get("prompt"))

    pack = shlex.quote(report["pack"])
    if "mistakes" in report:
        return lines + _pack_lines(report, f"echo Text to label | packs classify {pack}")
    return lines + _pack_lines(report, f"packs eval {pack} --data DATA", f"packs inspect {pack}")


def _teacher_line(report: Mapping, teacher: Mapping) -> str:
    # no divergence is negative, but for rounding
    before, after = (max(0.0, report[f"teacher_loss_{when}"]) for when in ("before", "after"))
    return (
        f"teacher {teacher['loss']} from {teacher['teacher']} {before:.4f} → {after:.4f} nats "
        f"per token, by its {teacher['top_k']:,} most likely tokens"
    )


def _sample_lines(sample: Mapping[str, str | None]) -> list[str]:
    """Return a sample for people, without the expected answer if the pack gives it."""
    labels = {"sample": "prompt", "expected": "wanted", "before": "before", "after": "after"}
    if not sample.get("wanted") or sample["wanted"] == sample["after"]:
        labels.pop("expected")

    if sample.get("before") is None and sample.get("after") is None:  # it was not completed
        return []

    texts = {label: sample.get(key) for label, key in labels.items()}
    return [f"{label:<7} {_shortened(text)}" for label, text in texts.items() if text is not None]


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return text[: _SHOWN_CHARACTERS - 1] + "…"


def _speed(report: Mapping) -> str:
    for unit, digits in (("pairs", 0), ("queries", 1)):
        if (rate := report.get(f"{unit}_per_s")) is not None:
            return f"{rate:,.{digits}f} {unit}/s"

    supervised = f"{report['tokens_per_s']:,.0f}"
    if (rate := report.get("computed_tokens_per_s")) is None:
        return f"{supervised} supervised tokens/s"
    return f"{rate:,.0f} tokens/s, {supervised} of them supervised"


def _cost(report: Mapping) -> str:
    planned = ""
    if report["plan_peak_gb"] is not None:
        planned = f" ({report['plan_peak_gb']:.2f} estimated)"

    return (
        f"{clock(report['train_s'])} for {report['steps']} updates · MLX peak "
        f"{report['peak_gb']:.2f} GB{planned}, process RSS {report['process_peak_gb']:.2f} GB"
    )


def _evaluated(held_out: Mapping) -> str:
    rows = held_out["rows"]
    available = held_out.get("available", rows)
    number = f"{rows:,}"
    if rows != available:
        number += f" of {available:,}"
    return f"{number} {held_out['split']} examples"


def _pack_lines(report: Mapping, *commands: str) -> list[str]:
    return [f"pack    {report['pack']} ({report['pack_mb']:.1f} MB)    try:", *commands]


def try_lines(report: Mapping, prompt: str | None = None) -> list[str]:
    """Return commands that use the pack of a run, which can be pasted as they are.

    FILE stands for an image, if examples have some.
    """
    pack = shlex.quote(str(report["pack"]))
    lines = _pack_lines(report)
    if report.get("raw_prompt"):
        start = (prompt or "").lstrip().partition("\n")[0][:_MOST_PASTED]
        return [*lines, f"packs generate {pack} --raw --prompt {shlex.quote(start)}"]

    if prompt and len(prompt) <= _MOST_PASTED and prompt.isprintable():
        image = " --image FILE" if report.get("images") else ""
        lines.append(f"packs generate {pack}{image} --prompt {shlex.quote(prompt)}")
    if report.get("base_weights", math.inf) >= _LEAST_TO_CHAT:
        lines.append(f"packs chat {pack}")
    return lines


def make_tasks(
    phases: Sequence[RunPhase], train: TrainConfig, lora: LoRAConfig, calls: Calls
) -> dict[str, Task]:
    """Return the tasks of the phases of a run by name, in their order."""
    METHODS.plugin(train.method)  # raises if its name is taken

    tasks = {}
    for name in train.tasks:
        TASKS.plugin(name)
        last = [phase for phase in phases if phase.train.task == name][-1]
        tasks[name] = task_class(name, train)(last, lora, calls)

    return tasks


def task_class(name: str, train: TrainConfig) -> type[Task]:
    """Return the class of a task; a pipeline and another forward pass have one of their own."""
    if train.pipeline:
        return TASKS.resolve(name, TASKS[name].pipelined)

    task = TASKS.load(name, Task)
    on_objective = OBJECTIVES[train.objective]
    if on_objective is None:
        return task
    return pkgutil.resolve_name(on_objective)(task)
