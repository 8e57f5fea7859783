"""The settings of a training run: what is asked for, and what is final."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.choices import OPTIMIZERS, TASKS
from ..config.data import DataConfig
from ..config.lora import LoRAConfig
from ..config.recipe import Recipe, RunOptions, check_named, from_configs
from ..config.schema import TrainConfig
from ..data.in_memory import Data, columns_of
from ..display import QUIET, Display
from ..distributed.group import group
from ..errors import PackError, any_of, flag_of
from ..evaluation.metrics import Metric, own_metric_of
from ..objectives.causal_lm import TargetLoss
from ..optim import updates_of, warmup_updates
from ..packs.base import Base
from ..tasks.phases import PhaseData, RunPhase, check_data_used, resolve_phases
from ..tasks.task import Calls
from .observer import Observer
from .run_folder import ResumePoint, RunFolder
from .status import Status

if TYPE_CHECKING:
    from ..tasks.task import RewardFunction

MANY_EPOCHS = 10


@dataclass(frozen=True)
class Request:
    """What a caller asks for; a PackError if no examples are named, or a function is unfit."""

    recipe: Recipe  # whose ``run`` says where the run writes and whether it resumes
    base: Base | str | Path  # a loaded base, or what `load_base` takes
    display: Display
    force: bool = False  # whether to train although the memory plan exceeds the machine
    callbacks: tuple[Observer, ...] = ()  # that the caller gives
    loss: TargetLoss | None = None  # in place of the cross-entropy
    reward: "RewardFunction | None" = None  # of generated completions
    metric: Metric | None = None  # of answers, by a function of the caller's
    open_base: Callable[..., Base] | None = None  # in place of `load_base`

    def __post_init__(self) -> None:
        check_named(self.recipe)
        for callback in self.callbacks:
            if not isinstance(callback, Observer):
                raise PackError(
                    f"callbacks: must be objects of a class of mlx_packs.Observer, but one is of "
                    f"{type(callback).__name__}.",
                    flag="callbacks",
                )

        for argument in ("loss", "reward", "metric"):
            if getattr(self, argument) is not None:
                _check_task(argument, self.recipe.train.tasks)

        changed = self.recipe.train.changed(("z_loss", "label_smoothing"))
        if self.loss is not None and changed:
            text = "loss: replaces the cross-entropy that it belongs to. Leave one of them out."
            raise PackError(f"{flag_of(changed[0])} and {text}", "conflict", changed[0])

    def option(self, name: str) -> Any:
        """Return a setting of `RunOptions`, its default if it is not specified."""
        specified = self.recipe.run.get(name)
        if specified is None:
            return getattr(RunOptions, name)
        return specified

    @property
    def calls(self) -> Calls:
        return Calls(self.display, self.loss, self.reward, self.metric)

    def with_own_metric(self) -> "Request":
        """Return the request with the function that ``--metric`` names; its file is executed."""
        train = self.recipe.train
        if self.metric is None:
            return replace(self, metric=own_metric_of(train.metric))

        if train.metric is not None:
            text = "is given twice, as a function and as a setting. Leave one of them out."
            raise PackError(f"metric: {text}", "conflict", "metric")
        if train.pipeline:
            text = "a run with --pipeline generates no answers. Leave one of them out."
            raise PackError(f"metric: {text}", "conflict", "metric")
        return self

    def of_rank(self) -> "Request":
        """Return what this rank is asked for: only the first one prints and reports."""
        if group().is_first:
            return self
        options = {**self.recipe.run, "report_to": None}
        recipe = replace(self.recipe, run=options)
        return replace(self, recipe=recipe, display=Display(QUIET), callbacks=())


def recipe_of(
    base: Base | str | Path,
    data: Data | None,
    lora: LoRAConfig | None,
    train: TrainConfig | None,
    columns: DataConfig | None,
    **options: Any,
) -> Recipe:
    """Return the recipe of the arguments of `train_pack`; ``options`` are `RunOptions`."""
    name = base.name if isinstance(base, Base) else str(base)

    recipe = from_configs(lora, train, {"model": name, **options})
    if data is not None:
        check_data_used(recipe.train)
    if data is not None or columns is not None:
        recipe = replace(recipe, data=columns_of(data, columns), names_data=True)
    return recipe


def _check_task(argument: str, tasks: Sequence[str]) -> None:
    """Check that a function of the caller goes with the tasks of a run."""
    has_own = any(argument in TASKS[task].functions for task in tasks)
    # with several tasks it would be the loss of some phases only
    if not has_own or (argument == "loss" and len(tasks) > 1):
        owners = [name for name, facts in TASKS.items() if argument in facts.functions]
        raise PackError(
            f"{argument}: is for task {any_of(owners)}, but the task is {', '.join(tasks)}.",
            "conflict",
            argument,
        )


@dataclass(frozen=True)
class RunSettings:
    """What a run trains, and on what."""

    lora: LoRAConfig
    train: TrainConfig
    columns: DataConfig
    phases: tuple[RunPhase, ...]  # that ``train`` resolves to, at least one

    @classmethod
    def of(cls, request: Request) -> "RunSettings":
        """Return what a request is to train, each phase checked; nothing is loaded."""
        recipe = request.recipe
        phases = resolve_phases(recipe.train, recipe.data)
        return cls(recipe.lora, recipe.train, recipe.data, phases)

    @property
    def last_phase(self) -> RunPhase:
        """The last phase: the pack is evaluated on its held-out examples."""
        return self.phases[-1]

    def with_settings(self, train: Mapping[str, Any], columns: Mapping[str, Any]) -> "RunSettings":
        """Return other settings, in all phases; where those begin stays."""
        return replace(
            self,
            train=replace(self.train, **train),
            columns=replace(self.columns, **columns),
            phases=tuple(phase.with_settings(train, columns) for phase in self.phases),
        )

    def as_it_began(self, earlier: dict | None) -> "RunSettings":
        """Return these with the template and date of the run that is resumed, by its identity."""
        if earlier is None:
            return self
        recorded = {
            name: earlier["recipe"].get(name)
            for name in ("template_date", "chat_template")
            if getattr(self.columns, name) is None
        }
        return self.with_settings({}, recorded)


def with_batches(
    settings: RunSettings, data: Sequence[PhaseData], display: Display
) -> tuple[RunSettings, list[PhaseData]]:
    """Return settings and examples with ``iters`` in the place of ``--epochs``."""
    if (epochs := settings.train.epochs) is None:
        _note_patience(settings.train, display)
        for of_phase in data:
            _note_passes(of_phase, display)
        return settings, list(data)

    per_epoch = data[-1].train.batches_per_epoch()
    batches = max(1, round(epochs * per_epoch))
    changes = {"epochs": None, "iters": batches}
    if settings.train.picks_best:
        changes["steps_per_eval"] = _steps_per_eval(settings.train, batches, per_epoch)

    settings = settings.with_settings(changes, {})
    _note_patience(settings.train, display)
    updates = updates_of(settings.train)
    text = f"{epochs:g} of {per_epoch:,} batches: {batches:,} batches, {updates:,} updates"
    display.line("epochs", text)
    pairs = zip(data, settings.phases, strict=True)
    return settings, [replace(of_phase, phase=phase) for of_phase, phase in pairs]


def _steps_per_eval(train: TrainConfig, batches: int, per_epoch: int) -> int:
    """Return the batches between validations of a run of epochs, which may be few and short.

    Each epoch is validated, and by default so often that patience can end the run after a third
    of it.
    """
    steps = min(train.steps_per_eval, per_epoch)
    if train.patience and not train.changed(["steps_per_eval"]):
        steps = min(steps, max(1, batches // (3 * train.patience)))
    return steps


def _note_patience(train: TrainConfig, display: Display) -> None:
    """Say if patience cannot end a run, since it validates too rarely."""
    if train.patience and train.iters // train.steps_per_eval <= train.patience:
        display.line(
            "note",
            f"--patience {train.patience} cannot end this run early, since its {train.iters:,} "
            f"batches are validated every {train.steps_per_eval:,}. Pass a smaller "
            "--steps-per-eval.",
        )


def _note_passes(data: PhaseData, display: Display) -> None:
    """Say if batches that nobody counted in epochs read each example many times."""
    batches = data.phase.train.iters
    epochs = batches / data.train.batches_per_epoch()
    if epochs >= MANY_EPOCHS and data.phase.train.time is None:
        display.line(
            "note",
            f"{batches:,} batches read each training example {epochs:.0f} times. Is that what you "
            "want? --epochs 3 is usual.",
        )


@dataclass(frozen=True)
class Place:
    """Where a run writes, and where it goes on."""

    pack: Path  # its folder
    folder: Path  # the run folder
    resume: bool = False  # whether to continue from a checkpoint of ``folder``
    resume_point: ResumePoint | None = None  # which one
    overflow: str = ""  # why a run that began in float16 goes on in bfloat16
    status: Status | None = None  # of the first rank


@dataclass(frozen=True)
class Run(RunSettings):
    """A training run: what to train on what, and where; final."""

    request: Request
    place: Place
    begins_with_adapters: bool = False  # not with the base alone

    @property
    def display(self) -> Display:
        return self.request.display

    @property
    def pack(self) -> Path:
        return self.place.pack

    @property
    def folder(self) -> Path:
        return self.place.folder

    @property
    def files(self) -> RunFolder:
        return RunFolder(self.place.folder)


def notes_on_rates(settings: RunSettings) -> Iterator[str]:
    """Yield what is unexpected about the learning rate of a run."""
    train = settings.train
    if OPTIMIZERS[train.optimizer].corrects_bias and not train.bias_correction:
        yield (
            f"{train.optimizer} without bias correction, as mlx-lm trains: the first updates are "
            "up to 6x larger than in PEFT and TRL at the same learning rate "
            "(--bias-correction)"
        )

    for phase in settings.phases:
        if isinstance(phase.train.lr_schedule, dict) and phase.train.changed(("learning_rate",)):
            yield "learning_rate is not used, as in mlx-lm: lr_schedule has the rates"
        if note := _long_warmup(phase):
            yield note


def _long_warmup(phase: RunPhase) -> str | None:
    """Return a note if a phase ends before its warm-up does."""
    train = phase.train
    warmup = warmup_updates(train)
    updates = updates_of(train)
    if warmup < updates:
        return None

    setting = "lr_schedule.warmup"
    if not isinstance(train.lr_schedule, dict):
        setting = flag_of(train.changed(("warmup_steps", "warmup_ratio"))[0])
    where = f"{phase.name}: " if phase.name else ""
    return (
        f"{where}the warm-up takes {warmup:,} of {updates:,} updates, so that the learning rate "
        f"never reaches its peak. Use a lower {setting}, or train longer"
    )
