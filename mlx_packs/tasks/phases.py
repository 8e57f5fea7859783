"""The phases of a run: what each trains on, where in the run it begins, its encoded examples.

A run without ``phases`` has one phase without a name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.optimizers as optimizers
import numpy as np

from ..config.common import HELD_OUT_SHARE, LEAST_HELD_OUT, MOST_HELD_OUT
from ..config.data import DataConfig
from ..config.fields import fields_where
from ..config.schema import TrainConfig
from ..config.tasks import Phase
from ..data import rows as rows_of
from ..data.dataset import Dataset, ExampleSet, Shape, first_examples
from ..data.formats import formats_of
from ..data.left_out import template_notes
from ..data.near_copies import row_notes
from ..data.row_format import BadRows
from ..data.rows import Splits
from ..display import Display
from ..errors import PackError, flag_of
from ..optim import make_optimizer

PHASE_SETTINGS = fields_where(TrainConfig, phase=True)  # that a phase may override


@dataclass(frozen=True)
class RunPhase:
    """A phase with every setting resolved."""

    name: str  # empty if the run has no phases
    train: TrainConfig  # the run's settings, overridden by the phase's
    columns: DataConfig  # where its examples are
    replay: float = 0.0  # share of its examples that earlier phases have trained on
    carries_optimizer: bool = False  # whether it continues with the optimizer's state
    first_batch: int = 0  # batches of the run before it
    updates_before: int = 0  # that the optimizer's state has seen; its schedule begins there

    @property
    def stop(self) -> int:
        """Batches of the run at its end."""
        return self.first_batch + self.train.iters

    def with_settings(self, train: Mapping[str, Any], columns: Mapping[str, Any]) -> "RunPhase":
        """Return the phase with other settings of its run; where it begins stays."""
        return replace(
            self,
            train=replace(self.train, **train),
            columns=replace(self.columns, **columns),
        )

    def optimizer(self) -> optimizers.Optimizer:
        """Return an optimizer whose state counts updates since a fresh one."""
        return make_optimizer(self.train, self.updates_before)

    def manifest_key(self, key: str) -> str:
        """Return the key itself, or ``<phase>/<key>`` in a run of several phases."""
        if not self.name:
            return key
        return f"{self.name}/{key}"

    def load_rows(self) -> rows_of.Splits:
        splits = rows_of.load_rows(self.columns, formats_of(self.train.task))
        splits.notes.extend(row_notes(splits.rows, splits.format, self.columns))
        return splits


def left_out_rows(
    phases: Sequence[RunPhase], splits: Sequence[rows_of.Splits]
) -> dict[str, BadRows]:
    """Return the rows of all phases that encoding has left out, by split as a manifest names it."""
    return {
        phase.manifest_key(split): bad
        for phase, read in zip(phases, splits, strict=True)
        for split, bad in read.bad.items()
    }


def check_data_used(train: TrainConfig) -> None:
    """Check that some phase trains on the data that is named for all of them."""
    if train.phases and all(phase.data for phase in train.phases):
        raise PackError(
            "data: every phase names its own data. Leave it out here.", "conflict", "data"
        )


def resolve_phases(train: TrainConfig, columns: DataConfig) -> tuple[RunPhase, ...]:
    """Return the phases of a run, each checked by itself; nothing is loaded."""
    if not train.phases:
        make_optimizer(train)  # a wrong argument shows before anything is loaded
        return (RunPhase("", train, columns),)

    phases: list[RunPhase] = []
    names = [phase.name or f"phase-{i + 1}" for i, phase in enumerate(train.phases)]
    for i, (name, phase) in enumerate(zip(names, train.phases, strict=True)):
        if names.count(name) > 1:
            raise PackError(
                f"phases: two are called '{name}'. Give each a name of its own.",
                "conflict",
                "phases",
            )
        try:
            phases.append(_resolve(name, phase, train, columns, phases))
        except PackError as error:
            text = f"phases[{i}] ({name}): {error}"
            raise PackError(text, error.code, error.flag) from None

    return tuple(phases)


def _resolve(
    name: str, phase: Phase, train: TrainConfig, columns: DataConfig, earlier: Sequence[RunPhase]
) -> RunPhase:
    task = phase.task or train.task
    _check_replay(phase, task, earlier)

    values = {key: getattr(phase, key) for key in PHASE_SETTINGS}
    overrides = {key: value for key, value in values.items() if value is not None}
    schedule = overrides.get("lr_schedule", train.lr_schedule)
    if isinstance(schedule, Mapping):
        if unused := sorted({"learning_rate", "warmup_steps", "warmup_ratio"} & set(overrides)):
            raise PackError(
                f"{unused[0]}: is not used with an lr_schedule that is a mapping, which has its "
                "own. Give the phase an lr_schedule of its own.",
                "conflict",
                unused[0],
            )
        overrides |= {"warmup_steps": 0, "warmup_ratio": 0.0}
    elif ("warmup_steps" in overrides) != ("warmup_ratio" in overrides):
        # it replaces the run's, in either form
        overrides = {"warmup_steps": 0, "warmup_ratio": 0.0} | overrides

    settings = replace(train, **train.of_other_tasks(task), **overrides, phases=())
    make_optimizer(settings)
    if phase.data:
        columns = replace(columns, data=phase.data, hf_dataset=None)

    start = updates_before = 0
    carries = False
    if earlier:
        before = earlier[-1]
        start = before.stop
        carries = phase.optimizer_state == "carry"
        if carries:
            updates = -(-before.train.iters // train.grad_accumulation_steps)
            updates_before = before.updates_before + updates

    return RunPhase(
        name,
        settings,
        columns,
        phase.replay,
        carries,
        start,
        updates_before,
    )


def _check_replay(phase: Phase, task: str, earlier: Sequence[RunPhase]) -> None:
    """Check that there are examples to replay, which the task of a phase can train on."""
    fault = ""
    if not earlier:
        fault = "the first phase has none before it"
    elif others := [each.name for each in earlier if each.train.task != task]:
        fault = f"{others[0]} has another task, whose examples --task {task} cannot train on"
    if phase.replay and fault:
        raise PackError(f"replay {phase.replay:g}: {fault}. Leave it out.", "conflict", "replay")


def check_overridden(train: TrainConfig, specified: frozenset[str]) -> None:
    """Check that no setting is ``specified`` for all phases while every phase has its own."""
    if not train.phases:
        return

    for key in fields_where(TrainConfig, DataConfig, phase=True):
        name = "data" if key == "hf_dataset" else key
        if key in specified and all(getattr(phase, name) is not None for phase in train.phases):
            raise PackError(
                f"{flag_of(key)} (or {key} at the top of the file): every phase has its own "
                f"{name}, so this has no effect. Change it in the phases, or leave it out.",
                "conflict",
            )


@dataclass(frozen=True)
class PhaseData:
    """The examples of a phase, encoded by its task."""

    task: Any  # the `task.Task` that has encoded them
    phase: RunPhase
    splits: Mapping[str, ExampleSet]
    train: Dataset  # its own examples, and replayed ones of phases before it

    @property
    def held_out_split(self) -> str:
        """The split that the phase is evaluated on."""
        return "test" if "test" in self.splits else "valid"

    @property
    def held_out_examples(self) -> Any:
        return self.splits[self.held_out_split]

    def counts(self) -> dict[str, int]:
        """Return the number of examples by split, as manifests name it."""
        return {self.phase.manifest_key(name): part.count for name, part in self.splits.items()}

    def shapes(self) -> set[Shape]:
        """Return the shapes of all training batches, as the memory plan counts them."""
        return self.train.shapes(self.phase.train.iters)

    @cached_property
    def validation(self) -> Dataset | None:
        """What `Objective.validate` scores; None if the phase is not validated."""
        batches = self.phase.train.val_batches
        if "valid" not in self.splits or not batches:
            return None
        return self._first(self.splits["valid"], batches)

    @cached_property
    def held_out(self) -> Dataset:
        """What `Objective.score` scores before and after the run."""
        batches = self.phase.train.test_batches
        if batches is not None:
            return self._first(self.held_out_examples, batches)
        return self.task.evaluation(self.phase, self.held_out_examples, self.task.sampled(self))

    def _first(self, examples: ExampleSet, batches: int) -> Dataset:
        chosen = first_examples(examples.count, self.phase.train.batch_size, batches)
        return self.task.evaluation(self.phase, examples, chosen)


def counts_of(data: Sequence[PhaseData]) -> dict[str, int]:
    """Return the number of examples by split; in a run with phases ``<phase>/<split>``."""
    return {key: count for each in data for key, count in each.counts().items()}


_LEAST_TOKENS = 4096  # of the least examples, which are fewer if they are long


def sample(lengths: np.ndarray, trained_tokens: float) -> np.ndarray:
    """Return the indices of the held-out examples that a run is evaluated on by default.

    ``lengths`` are the tokens of each example; the run trains on ``trained_tokens`` in all.

    The order only depends on the number of examples: a longer run, a resumed one and one with
    another seed are evaluated on the same examples, or on more after the same ones.
    """
    order = np.random.RandomState(0).permutation(len(lengths))
    totals = np.cumsum(np.asarray(lengths)[order])

    affordable = np.searchsorted(totals, HELD_OUT_SHARE * trained_tokens, side="right")
    least = min(LEAST_HELD_OUT, np.searchsorted(totals, _LEAST_TOKENS, side="right"))
    count = min(MOST_HELD_OUT, max(2, affordable, least))
    return order[:count]


def encode_each(
    read: Splits,
    encode: Callable[[str, Callable[[], None]], Any],
    display: Display,
    steps: Mapping[str, int] | None = None,
    unit: str = "splits",
) -> dict[str, Any]:
    """Return the examples of every split that has rows, and note its bad rows.

    ``encode`` takes a split and what counts a step. Each split has ``steps``, by default one.
    """
    encoded = {}
    steps = steps or dict.fromkeys(read.present(), 1)
    with display.task("data", sum(steps.values()), unit) as bar:
        for split, count in steps.items():
            done = bar.done
            encoded[split] = encode(split, bar.advance)
            read.note_encoded(split, encoded[split].fingerprint, encoded[split].bad)
            for _ in range(done + count - bar.done):  # what was cached, or is not counted
                bar.advance()

    return encoded


def show_phase(phase: RunPhase, display: Display) -> None:
    """Show what a phase trains, unless the run has no phases."""
    if not phase.name:
        return
    line = f"{phase.name}: {phase.train.iters:,} batches"
    if phase.replay:
        line += f", {phase.replay:.0%} of its examples from earlier phases"
    display.line("phase", line)


def counted(splits: Mapping[str, ExampleSet]) -> str:
    return " / ".join(f"{part.count:,} {split}" for split, part in splits.items())


def show_cut(splits: Mapping[str, Any], limit: int, what: str, display: Display) -> None:
    """Show how many texts, which are ``what``, had more than ``limit`` tokens; nothing if none."""
    cut = sum(part.cut for part in splits.values())
    dropped = sum(part.dropped for part in splits.values())
    counts = [(cut, f"{what} cut"), (dropped, "examples dropped")]
    if shown := ", ".join(f"{count} {text}" for count, text in counts if count):
        display.line("data", f"longer than {limit} tokens (--max-seq-length): {shown}")


def show_notes(read: Splits, columns: DataConfig, tokenizer: Any, display: Display) -> None:
    """Show what was decided about rows, what of them is not used, and which were left out."""
    lost = template_notes(read.rows["train"], read.format, columns, tokenizer)
    for note in (*read.notes, *lost, *read.bad_lines()):
        display.line("data", note)
