"""The legs of a run: what each phase learns, from which rows, and where in the run it stands.

A run without ``phases`` is a run of one leg; there is one walk for both.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .. import runtime
from ..bases.files import public_name
from ..config.schema import DataConfig, Phase, TrainConfig
from ..data import rows as rows_of
from ..data.batches import Batch, batch_shapes, evaluation_batches, few_shapes, training_batches
from ..data.encoding import Example, Examples
from ..data.sampler import Draw
from ..errors import PackError
from ..optim import make_optimizer

# What a phase may say for itself: of TrainConfig, and of DataConfig.
OWN = ("iters", "learning_rate", "lr_schedule", "warmup_steps")
OWN_DATA = ("data", "hf_dataset")


@dataclass(frozen=True)
class Leg:
    """A phase with everything said.

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
        """A key of the manifest: as it is, or in a run of several phases with the leg's name."""
        return f"{self.name}/{key}" if self.name else key

    def load_rows(self) -> rows_of.Splits:
        """Rows of all its sources, one behind the other."""
        parts = [rows_of.load_rows(source) for source in self.sources]
        if len(parts) == 1:
            return parts[0]
        rows = {split: [r for p in parts for r in p.rows[split]] for split in rows_of.SPLITS}
        notes = [f"{part.source}: {note}" for part in parts for note in part.notes]
        return rows_of.Splits(rows, " + ".join(part.source for part in parts), notes)

    def public_source(self, splits: rows_of.Splits) -> str:
        """What a manifest calls its data: folders without their paths."""
        one = len(self.sources) == 1
        names = [splits.source] if one else [source.data for source in self.sources]
        return " + ".join(map(public_name, names))


def legs_of(train: TrainConfig, columns: DataConfig) -> tuple[Leg, ...]:
    """The legs of a run, each held for itself; nothing is loaded.

    Raises: PackError naming the phase and what is wrong with it.
    """
    if not train.phases:
        make_optimizer(train)  # a wrong argument shows before anything is loaded
        return (Leg("", train, (columns,)),)
    legs: list[Leg] = []
    names = [phase.name or f"phase-{i + 1}" for i, phase in enumerate(train.phases)]
    for i, (name, phase) in enumerate(zip(names, train.phases, strict=True)):
        if names.count(name) > 1:
            raise PackError(f"phases: two are called '{name}'; every name must be another one.")
        try:
            legs.append(_leg(name, phase, train, columns, legs[-1] if legs else None))
        except PackError as error:
            raise PackError(f"phases[{i}] ({name}): {error}") from None
    return tuple(legs)


def _leg(
    name: str, phase: Phase, train: TrainConfig, columns: DataConfig, before: Leg | None
) -> Leg:
    if before is None and phase.replay:
        raise PackError(f"replay {phase.replay:g}: no phase stands before the first.")
    own = {key: getattr(phase, key) for key in OWN if getattr(phase, key) is not None}
    schedule = own.get("lr_schedule", train.lr_schedule)
    if isinstance(schedule, Mapping):
        if unused := sorted({"learning_rate", "warmup_steps"} & set(own)):
            raise PackError(
                f"{unused[0]} is not used beside an lr_schedule that is a mapping: its arguments "
                "and its warmup count; give the phase an lr_schedule of its own."
            )
        own.setdefault("warmup_steps", 0)
    settings = dataclasses.replace(train, **own, phases=())
    make_optimizer(settings)
    sources = tuple(
        dataclasses.replace(columns, data=source, hf_dataset=None) for source in phase.sources
    )
    carries = before is not None and phase.optimizer_state == "carry"
    updates = 0 if before is None else -(-before.train.iters // train.grad_accumulation_steps)
    return Leg(
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
    for key in (*OWN, *OWN_DATA) if train.phases else ():
        given = ["data" if key in OWN_DATA else key] * len(train.phases)
        own = [getattr(phase, k) is not None for phase, k in zip(train.phases, given, strict=True)]
        if key in said and all(own):
            flag = "--" + key.replace("_", "-")
            raise PackError(
                f"{flag} (or {key} at the top of the file): every phase says its own {given[0]}, "
                "so this counts for nothing; change it in the phases, or take it out."
            )


def pack_name(legs: Sequence[Leg]) -> DataConfig:
    """The source that a pack without a name is called by: the last one learned."""
    return legs[-1].sources[0]


@dataclass
class Course:
    """Rows of all legs as tokens.

    splits: by leg.   train: the training rows of all legs, one leg behind the other.
    """

    legs: tuple[Leg, ...]
    splits: list[dict[str, Examples]]

    @cached_property
    def train(self) -> Examples:
        """The training rows of all legs; those of one are its own."""
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
        """What the last leg learns of its rows."""
        return self.splits[-1]["train"].loss_on

    @property
    def iters(self) -> int:
        """Batches of the run."""
        return self.legs[-1].stop

    def draw(self, leg: Leg) -> Draw:
        """Which of all training rows a leg draws its batches from."""
        edges = np.cumsum([0, *(len(splits["train"]) for splits in self.splits)]).tolist()
        i = self.legs.index(leg)
        return Draw(edges[i], edges[i + 1], leg.replay)

    def shapes(self, leg: Leg) -> frozenset[tuple[int, int]] | None:
        """The shapes (T, M) that a leg's batches may have where each costs a compilation."""
        t = leg.train
        if t.packing or not runtime.COMPILES:
            return None
        return few_shapes(self.train, t.batch_size, t.max_seq_length, t.seed, self.draw(leg))

    def batch_shapes(self) -> set[tuple[int, int]]:
        """(T, M) of all batches of the run."""
        return set().union(
            *(
                batch_shapes(
                    self.train,
                    leg.train.batch_size,
                    leg.train.max_seq_length,
                    leg.train.seed,
                    leg.train.iters,
                    leg.train.packing,
                    self.shapes(leg),
                    self.draw(leg),
                )
                for leg in self.legs
            )
        )

    def batches(self, leg: Leg, taken: int) -> Iterator[Batch]:
        """Batches of a leg without end, after so many of it."""
        t = leg.train
        return training_batches(
            self.train,
            t.batch_size,
            t.max_seq_length,
            t.seed,
            taken,
            t.packing,
            self.shapes(leg),
            self.draw(leg),
        )

    def held_out(self, leg: Leg) -> tuple[str, Examples]:
        """The rows that a leg is judged by, and of which split they are."""
        splits = self.splits[self.legs.index(leg)]
        split = "test" if "test" in splits else "valid"
        return split, splits[split]

    def judged(self, leg: Leg) -> list[Batch]:
        """All that a leg is judged by, in batches."""
        t = leg.train
        return evaluation_batches(
            self.held_out(leg)[1], t.batch_size, t.max_seq_length, t.test_batches, runtime.COMPILES
        )

    def valid(self, leg: Leg) -> list[Batch]:
        """What a leg is validated by while it learns; none if it has none, or wants none."""
        splits, t = self.splits[self.legs.index(leg)], leg.train
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
    course: Course, sources: Sequence[str], scores: Sequence[Mapping], curve: Sequence[dict]
) -> list[dict]:
    """What each phase of a run was and did; empty where a run has no phases.

    Args:
        sources: where the rows of each are, as they are called in public.
        scores: before the first phase and after each, the `Score` by leg; empty where not known.
        curve: of the run, whose lines tell the losses.
    """
    reports = []
    for i, (leg, source) in enumerate(zip(course.legs, sources, strict=True)):
        if not leg.name:
            continue
        losses = [x["loss"] for x in curve if "loss" in x and leg.first < x["batch"] <= leg.stop]
        split, held_out = course.held_out(leg)
        reports.append(
            {
                "name": leg.name,
                "data": source,
                "batches": [leg.first, leg.stop],
                "steps": -(-leg.train.iters // leg.train.grad_accumulation_steps),
                **{key: getattr(leg.train, key) for key in OWN},
                "replay": leg.replay,
                "optimizer_state": "carry" if leg.carries else "fresh",
                "rows": {s: len(e) for s, e in course.splits[i].items()},
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
