"""The phases of a run: what each trains on, and where in the run it begins.

A run without ``phases`` has one phase without a name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..bases.files import public_name
from ..config.fields import fields_where, flags_as_keys
from ..config.schema import DataConfig, Phase, TrainConfig
from ..data import rows as rows_of
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
