"""The phases of a run: what each trains on, and where in the run it begins.

A run without ``phases`` has one phase without a name.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .. import runtime
from ..bases.files import public_name
from ..config.fields import fields_where, flags_as_keys
from ..config.schema import DataConfig, Phase, TrainConfig
from ..data import rows as rows_of
from ..data.batches import Batch, batch_shapes, evaluation_batches, few_shapes, training_batches
from ..data.encoding import Example, Examples
from ..data.sampler import Draw, Sampler
from ..errors import PackError, flag_of
from ..optim import make_optimizer

OWN = fields_where(TrainConfig, phase=True)  # settings that a phase may have of its own


@dataclass(frozen=True)
class RunPhase:
    """A phase with every setting resolved.

    name: empty where the run has no phases.   train: the run's settings with its own among them.
    sources: where its rows are.   first: batches that the run took before it.   since: updates
    before it that the optimizer's state has seen; its schedule begins there.
    """

    name: str
    train: TrainConfig
    sources: tuple[DataConfig, ...]
    replay: float = 0.0
    carries: bool = False
    first: int = 0
    since: int = 0

    @property
    def stop(self) -> int:
        """Batches of the run when it ends."""
        return self.first + self.train.iters

    def optimizer(self):
        """Its optimizer, whose state counts updates from the last fresh one on."""
        return make_optimizer(self.train, self.since)

    def named(self, key: str) -> str:
        """A key of the manifest: as it is, or in a run of several phases with the phase's name."""
        return f"{self.name}/{key}" if self.name else key

    def load_rows(self) -> rows_of.Splits:
        """Rows of all its sources, one behind the other."""
        parts = [rows_of.load_rows(source) for source in self.sources]
        if len(parts) == 1:
            return parts[0]
        rows = {split: [r for p in parts for r in p.rows[split]] for split in rows_of.SPLITS}
        notes = [f"{part.source}: {note}" for part in parts for note in part.notes]
        source = " + ".join(part.source for part in parts)
        return rows_of.Splits(rows, source, parts[0].format, notes)

    def public_source(self, splits: rows_of.Splits) -> str:
        """What a manifest calls its data: folders without their paths."""
        one = len(self.sources) == 1
        names = [splits.source] if one else [source.data for source in self.sources]
        return " + ".join(map(public_name, names))


def resolve_phases(train: TrainConfig, columns: DataConfig) -> tuple[RunPhase, ...]:
    """The phases of a run, each checked by itself; nothing is loaded.

    Raises:
        PackError: Naming the phase and what is wrong with it.
    """
    if not train.phases:
        make_optimizer(train)  # a wrong argument shows before anything is loaded
        return (RunPhase("", train, (columns,)),)
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
            phases.append(_resolve(name, phase, train, columns, phases[-1] if phases else None))
        except PackError as error:
            text = f"phases[{i}] ({name}): {flags_as_keys(error.message)}"
            raise PackError(text, error.code, error.flag) from None
    return tuple(phases)


def _resolve(
    name: str, phase: Phase, train: TrainConfig, columns: DataConfig, before: RunPhase | None
) -> RunPhase:
    if before is None and phase.replay:
        raise PackError(
            f"replay {phase.replay:g}: the first phase has none before it. Leave it out.",
            "conflict",
            "replay",
        )
    own = {key: getattr(phase, key) for key in OWN if getattr(phase, key) is not None}
    schedule = own.get("lr_schedule", train.lr_schedule)
    if isinstance(schedule, Mapping):
        if unused := sorted({"learning_rate", "warmup_steps"} & set(own)):
            raise PackError(
                f"{unused[0]}: is not used with an lr_schedule that is a mapping, which has its "
                "own. Give the phase an lr_schedule of its own.",
                "conflict",
                unused[0],
            )
        own.setdefault("warmup_steps", 0)
    settings = dataclasses.replace(train, **own, phases=())
    make_optimizer(settings)
    sources = tuple(
        dataclasses.replace(columns, data=source, hf_dataset=None) for source in phase.sources
    )
    carries = before is not None and phase.optimizer_state == "carry"
    updates = 0 if before is None else -(-before.train.iters // train.grad_accumulation_steps)
    return RunPhase(
        name,
        settings,
        sources or (columns,),
        phase.replay,
        carries,
        before.stop if before else 0,
        before.since + updates if carries else 0,
    )


def check_said(train: TrainConfig, said: frozenset[str]) -> None:
    """Refuse what is said for all phases while each says its own: it would count for nothing.

    Args:
        said: names of the settings that flags or files say something about.
    """
    for key in fields_where(TrainConfig, DataConfig, phase=True) if train.phases else ():
        own = "data" if key == "hf_dataset" else key
        if key in said and all(getattr(phase, own) is not None for phase in train.phases):
            raise PackError(
                f"{flag_of(key)} (or {key} at the top of the file): every phase has its own {own}, "
                "so this has no effect. Change it in the phases, or leave it out.",
                "conflict",
            )


def pack_name(phases: Sequence[RunPhase]) -> DataConfig:
    """The source that a pack without a name is called by: the last one learned."""
    return phases[-1].sources[0]


@dataclass
class PhasedDataset:
    """Rows of all phases as tokens.

    splits: by phase.   train: the training rows of all phases, one phase behind the other.
    """

    phases: tuple[RunPhase, ...]
    splits: list[dict[str, Examples]]

    @cached_property
    def train(self) -> Examples:
        """The training rows of all phases; those of one are its own."""
        parts = [splits["train"] for splits in self.splits]
        if len(parts) == 1:
            return parts[0]
        formats, losses = (
            " + ".join(dict.fromkeys(getattr(part, key) for part in parts))
            for key in ("format", "loss_on")
        )
        return Examples(_Joined([part.items for part in parts]), formats, losses)

    @property
    def loss_on(self) -> str:
        """What the last phase learns of its rows."""
        return self.splits[-1]["train"].loss_on

    @property
    def iters(self) -> int:
        """Batches of the run."""
        return self.phases[-1].stop

    def draw(self, phase: RunPhase) -> Draw:
        """Which of all training rows a phase draws its batches from."""
        edges = np.cumsum([0, *(len(splits["train"]) for splits in self.splits)]).tolist()
        i = self.phases.index(phase)
        return Draw(edges[i], edges[i + 1], phase.replay)

    def sampler(self, phase: RunPhase) -> Sampler:
        """Which of all training rows each batch of a phase holds."""
        t = phase.train
        return Sampler(
            self.train.lengths,
            t.batch_size,
            t.max_seq_length - 1,
            t.seed,
            t.packing,
            self.draw(phase),
        )

    def shapes(self, phase: RunPhase) -> frozenset[tuple[int, int]] | None:
        """The shapes (T, M) that a phase's batches may have where each costs a compilation."""
        t = phase.train
        if t.packing or not runtime.COMPILES:
            return None
        return few_shapes(self.train, self.sampler(phase))

    def batch_shapes(self) -> set[tuple[int, int]]:
        """(T, M) of all batches of the run."""
        return set().union(
            *(
                batch_shapes(self.train, self.sampler(phase), phase.train.iters, self.shapes(phase))
                for phase in self.phases
            )
        )

    def batches(self, phase: RunPhase, taken: int) -> Iterator[Batch]:
        """Batches of a phase without end, after so many of it."""
        return training_batches(self.train, self.sampler(phase), taken, self.shapes(phase))

    def held_out(self, phase: RunPhase) -> tuple[str, Examples]:
        """The rows that a phase is judged by, and of which split they are."""
        splits = self.splits[self.phases.index(phase)]
        split = "test" if "test" in splits else "valid"
        return split, splits[split]

    def judged(self, phase: RunPhase) -> list[Batch]:
        """All that a phase is judged by, in batches."""
        t = phase.train
        return evaluation_batches(
            self.held_out(phase)[1],
            t.batch_size,
            t.max_seq_length,
            t.test_batches,
            runtime.COMPILES,
        )

    def valid(self, phase: RunPhase) -> list[Batch]:
        """What a phase is validated by while it learns; none if it has none, or wants none."""
        splits, t = self.splits[self.phases.index(phase)], phase.train
        if "valid" not in splits or not t.val_batches:
            return []
        return evaluation_batches(
            splits["valid"], t.batch_size, t.max_seq_length, t.val_batches, runtime.COMPILES
        )


class _Joined(Sequence):
    """Several sequences of examples as one; nothing is copied."""

    def __init__(self, parts: list[Sequence[Example]]):
        self.parts = parts
        self.edges = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, i: int) -> Example:
        i = range(len(self))[i]
        part = int(np.searchsorted(self.edges, i, "right")) - 1
        return self.parts[part][i - int(self.edges[part])]


def phase_reports(
    dataset: PhasedDataset, sources: Sequence[str], scores: Sequence[Mapping], curve: Sequence[dict]
) -> list[dict]:
    """What each phase of a run was and did; empty where a run has no phases.

    Args:
        sources: where the rows of each are, as they are called in public.
        scores: before the first phase and after each, the `Score` by phase; empty where not known.
        curve: of the run, whose lines tell the losses.
    """
    reports = []
    for i, (phase, source) in enumerate(zip(dataset.phases, sources, strict=True)):
        if not phase.name:
            continue
        losses = [
            x["loss"] for x in curve if "loss" in x and phase.first < x["batch"] <= phase.stop
        ]
        split, held_out = dataset.held_out(phase)
        reports.append(
            {
                "name": phase.name,
                "data": source,
                "batches": [phase.first, phase.stop],
                "steps": -(-phase.train.iters // phase.train.grad_accumulation_steps),
                **{key: getattr(phase.train, key) for key in OWN},
                "replay": phase.replay,
                "optimizer_state": "carry" if phase.carries else "fresh",
                "rows": {s: len(e) for s, e in dataset.splits[i].items()},
                "loss_first": losses[0] if losses else None,
                "loss_last": losses[-1] if losses else None,
                "held_out": {"split": split, "rows": len(held_out)},
                "before": _shown(scores[i]),
                "after": _shown(scores[i + 1]),
            }
        )
    return reports


def _shown(scores: Mapping) -> dict:
    """PPL on the held-out rows of every phase, by its name."""
    return {
        name: {"ppl": s.ppl, "ppl_se": s.ppl_se, "accuracy": s.accuracy}
        for name, s in scores.items()
    }
