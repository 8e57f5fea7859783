"""What a run says about its learning rate before it starts."""

from collections.abc import Iterator
from dataclasses import replace

from ..config.choices import OPTIMIZERS
from ..config.schema import TrainConfig
from ..errors import flag_of
from ..optim import schedule, unused_learning_rate, updates_of, warmup_updates
from ..runtime import mx
from ..tasks.phases import RunPhase
from .checkpoint import batches_of
from .settings import Run


def note_rates(run: Run, earlier: dict | None) -> None:
    """Show what is unexpected; ``earlier`` is the identity of the run that this one resumes."""
    for note in _notes(run, earlier):
        run.display.line("note", note)


def _notes(run: Run, earlier: dict | None) -> Iterator[str]:
    train = run.train
    if unused := unused_learning_rate(train):
        yield unused
    if OPTIMIZERS[train.optimizer].corrects_bias and not train.bias_correction:
        yield (
            f"{train.optimizer} without bias correction, as mlx-lm trains: the first updates are "
            "up to 6 times as large as in PEFT and TRL at the same learning rate "
            "(--bias-correction)"
        )

    for phase in run.phases:
        if note := _long_warmup(phase):
            yield note
    if earlier is not None and (note := _changed_schedule(run, earlier)):
        yield note


def _long_warmup(phase: RunPhase) -> str | None:
    """Return a note if a phase ends before its warm-up does."""
    train = phase.train
    warmup = warmup_updates(train)
    updates = updates_of(train)
    if warmup < updates:
        return None

    start = ""
    name = "run"
    if phase.name:
        start = f"{phase.name}: "
        name = "phase"

    setting = "lr_schedule.warmup"
    if not isinstance(train.lr_schedule, dict):
        setting = flag_of(train.changed(("warmup_steps", "warmup_ratio"))[0])

    highest = _rate(train, updates - 1)
    peak = _rate(train, warmup)
    return (
        f"{start}the warm-up takes {warmup:,} updates, and the {name} has {updates:,}: the "
        f"learning rate ends at {highest:.3g}, {100 * highest / peak:.2g} % of its peak. Use "
        f"a lower {setting}, or train longer"
    )


def _changed_schedule(run: Run, earlier: dict) -> str | None:
    """Return a note if a resumed run has another learning rate, because it has another length."""
    train = run.train
    recipe = earlier["recipe"]
    if (
        len(run.phases) > 1
        or run.place.resume_point is None
        or type(recipe.get("iters")) is not int
    ):
        return None

    batches = batches_of(run.place.resume_point.folder)
    updates = -(-batches // train.grad_accumulation_steps)
    before = replace(train, iters=recipe["iters"])
    if updates < 1 or all(
        _rate(before, update) == _rate(train, update) for update in (updates - 1, updates)
    ):
        return None

    last = _rate(before, updates - 1)
    following = _rate(train, updates)
    return (
        f"with --iters {train.iters:,} instead of {before.iters:,} the schedule has another "
        f"length: the learning rate was {last:.3g} at batch {batches:,} and is {following:.3g} "
        "from here. For a schedule that starts anew, start a run with --resume-adapter-file"
    )


def _rate(train: TrainConfig, update: int) -> float:
    return schedule(train)(mx.array(update)).item()
