"""Run configuration: settings of adapters, training and data, as frozen dataclasses.

Command line, checks and error messages are made from the facts at each field (`Facts`).
"""

import inspect
from collections.abc import Collection, Iterable, Iterator
from dataclasses import InitVar, dataclass
from typing import Any

from ..errors import any_of, flag_of
from ..gates import MEANING
from .choices import PREFERENCE_TASKS, TASKS, answer_metric_of, task_defaults
from .common import CommonConfig
from .data import COLUMN_SETTINGS as COLUMN_SETTINGS
from .data import DataConfig as DataConfig
from .fields import Fault, Settings
from .lora import LoRAConfig as LoRAConfig
from .optimizer import OptimizerConfig
from .tasks import PAIR_LOSSES, TaskSettings, read_task_config, tasks_of
from .tasks import Phase as Phase


@dataclass(frozen=True, repr=False, kw_only=True)
class _Specified(Settings):
    # The last base of `TrainConfig`, so that this is its first field. All are given by name.
    __slots__ = ("specified",)  # names of settings that the caller specified; not in `vars`
    _specified: InitVar[Any]

    def __new__(cls, *args: Any, **settings: Any) -> "Settings":
        specified = list(settings)
        if "_specified" in settings:
            # `replace` passes what it changes, then all other fields in order, this one first
            place = specified.index("_specified")
            specified = [*settings.pop("_specified"), *specified[:place]]

        config = super().__new__(cls, *args, **settings)
        object.__setattr__(config, "specified", frozenset(specified))
        return config

    def __getstate__(self) -> tuple[dict[str, Any], frozenset[str]]:
        return vars(self), self.specified

    def __setstate__(self, state: tuple[dict[str, Any], frozenset[str]]) -> None:
        vars(self).update(state[0])
        object.__setattr__(self, "specified", state[1])


@dataclass(frozen=True, repr=False, kw_only=True)
class TrainConfig(TaskSettings, OptimizerConfig, CommonConfig, _Specified):
    """Settings of the training; ``iters`` counts batches, as in mlx-lm.

    Settings that are not specified have the defaults of the task, also in a copy by
    `dataclasses.replace`.
    """

    # `dataclasses.replace` passes it on, as the default of an InitVar is an attribute
    _specified: InitVar[Any] = property(lambda self: self.specified)

    def __post_init__(self, _: Any) -> None:
        for name, default in self.defaults().items():
            if name not in self.specified:
                object.__setattr__(self, name, default)
        super().__post_init__()

    def defaults(self) -> dict[str, Any]:
        """Return the default of each setting in the task of this configuration."""
        defaults = super().defaults()
        of_task = task_defaults(self.task)
        if unknown := sorted(of_task.keys() - defaults.keys()):
            fault = f"has a default for {unknown[0]}, which is no setting of TrainConfig"
            raise TASKS.plugin(self.task).fault(fault)
        return {**defaults, **of_task}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of the run; with phases, the task of each in order."""
        phases = dict.fromkeys(phase.task or self.task for phase in self.phases)
        return tuple(phases) or (self.task,)

    @property
    def last_task(self) -> str:
        """The task of the last phase, which the pack and its results are of."""
        tasks = [self.task, *(phase.task or self.task for phase in self.phases)]
        return tasks[-1]

    @property
    def task_settings(self) -> Any:
        """The settings of a task that an installed package adds, of its own class; None without."""
        return read_task_config(self.task, self.task_config)

    def head_of(self, task: str) -> str:
        """The head of a task of the run, ``score`` or ``lm``."""
        return TASKS[task].head_for(self.head)

    def of_other_tasks(self, task: str) -> dict[str, object]:
        """Return the defaults, in a task, of the changed settings that it does not have."""
        defaults = {**super().defaults(), **task_defaults(task)}
        others = {
            name: default
            for name, default in defaults.items()
            if getattr(self, name) != default and not _has_setting(task, name)
        }
        if task != self.task:
            others["task_config"] = {}
        return others

    @property
    def sequences(self) -> int:
        """The sequences of a batch."""
        facts = (TASKS[task] for task in self.tasks)
        return self.batch_size * max(
            self.num_generations if each.generates else each.sequences for each in facts
        )

    @property
    def gates(self) -> dict[str, float | None]:
        """The limits that the pack must meet at the end of the run; None where there is none."""
        return {name: getattr(self, name) for name in MEANING}

    def _conflicts(self) -> Iterator[Fault]:
        for faults, owners in _CONFLICTS_OF_TASKS.items():
            if any(_shares_settings(task, owners) for task in self.tasks):
                yield from faults(self)
        for faults in _CONFLICTS:
            yield from faults(self)


# `_specified` is no argument for callers.
_PARAMETERS = inspect.signature(TrainConfig).parameters
TrainConfig.__signature__ = inspect.Signature([_PARAMETERS[name] for name in list(_PARAMETERS)[1:]])


def _has_setting(task: str, name: str) -> bool:
    """Return whether a task has a setting, of its own or as all tasks have it."""
    owners = tasks_of(name)
    return not owners or _shares_settings(task, owners)


def _shares_settings(task: str, owners: Collection[str]) -> bool:
    """Return whether a task is one of these, or a plug-in that has the settings of one."""
    return task in owners or (task in TASKS and TASKS[task].settings_of in owners)


# By setting: the others that it cannot be combined with.
_EXCLUDED = {
    "objective": "phases cache_frozen neftune_noise_alpha sample_every",
    "pipeline": "objective packing cache_frozen neftune_noise_alpha quantize train_fp16_fallback "
    "metric min_tps_ratio sample_every",
    "offload_base": "objective pipeline cache_frozen train_fp16_fallback",
    "share_prefix": "objective pipeline packing cache_frozen",
}
_OF_ONE_PHASE = ("load_best", "patience", "time", "sample_every")
_UNUSED = (None, False, 0, (), "auto", "none", "off", "transformer")  # values without an effect


def _excluded_faults(train: TrainConfig) -> Iterator[Fault]:
    tasks = [TASKS[task] for task in train.tasks if task in TASKS]
    checkpointing = "grad_checkpoint" if train.grad_checkpoint else "recompute"
    by_value = {  # what depends on the value of the other
        "objective": {
            "method": train.trains_base or train.has_magnitudes,
            checkpointing: train.recomputes not in ("auto", "none"),
        },
        "pipeline": {
            "method": train.method != "lora",
            "task": not all(facts.pipelined for facts in tasks),
        },
        "offload_base": {
            "method": train.method not in ("lora", "dora"),
            "recompute": train.recomputes != "block",
        },
        "share_prefix": {"task": any(facts.heads == ("score",) for facts in tasks)},
    }

    for name, others in _EXCLUDED.items():
        value = getattr(train, name)
        if value in _UNUSED:
            continue
        unfit = [other for other in others.split() if getattr(train, other) not in _UNUSED]
        unfit += [other for other, is_unfit in by_value[name].items() if is_unfit]
        mode = flag_of(name)
        if isinstance(value, str):
            mode += f" {value}"
        yield from _incompatible(train, mode, unfit)

    if train.offloads and train.quantize != "none":
        text = (
            f"{train.quantize} cannot be combined with --offload-base on, which reads weights as "
            "they are stored. Quantize the base first: packs quantize."
        )
        yield Fault("quantize", text, "conflict")
    if train.trains_base:
        unfit = [*train.unfit_for_dense(), *train.changed(["loraplus_lr_ratio"])]
        yield from _incompatible(train, "--method full", unfit)


def _incompatible(train: TrainConfig, mode: str, unfit: Iterable[str]) -> Iterator[Fault]:
    """Yield a fault of each unfit setting; ``mode`` is a flag that it cannot be combined with."""
    for name in unfit:
        value = getattr(train, name)
        shown = f"{value} " if isinstance(value, str) else ""
        text = f"{shown}cannot be combined with {mode}. Leave one of them out."
        yield Fault(name, text, "conflict")


def _length_faults(train: TrainConfig) -> Iterator[Fault]:
    if train.fim_rate > 0 and train.max_seq_length < 32:
        text = f"needs a --max-seq-length of at least 32, but that is {train.max_seq_length}."
        yield Fault("fim_rate", text, "conflict")

    if train.epochs is not None and (train.phases or train.changed(["iters"])):
        other = "phases" if train.phases else "--iters"
        yield Fault("epochs", f"cannot be combined with {other}. Give one of them.", "conflict")
    if (named := train.changed(_OF_ONE_PHASE)) and train.phases:
        yield Fault(named[0], "cannot be combined with phases.", "conflict")


def _task_faults(train: TrainConfig) -> Iterator[Fault]:
    if not all(task in TASKS for task in train.tasks):
        return  # the check of the setting itself reports it

    read_task_config(train.task, train.task_config)
    for name in train.changed(vars(train)):
        owners = tasks_of(name)
        if not any(_has_setting(task, name) for task in train.tasks):
            yield Fault(name, f"needs --task {any_of(owners)}.", "conflict")

    if answer_metric_of(train.best) and (train.pipeline or train.objective != "transformer"):
        other = "--pipeline" if train.pipeline else "--objective"
        text = f"{train.best} needs answers, which a run with {other} does not generate."
        yield Fault("best", text, "conflict")

    losses = [loss for task in train.tasks for loss in TASKS[task].losses]
    owners = [name for name, facts in TASKS.items() if train.loss in facts.losses]
    if owners and losses and train.loss not in losses:
        text = f"{train.loss} needs --task {any_of(owners)}. Use {any_of(losses)}."
        yield Fault("loss", text, "conflict")

    headed = [task for task in train.tasks if _has_setting(task, tasks_of("head"))]
    heads = [head for task in headed for head in TASKS[task].heads]
    if heads and train.head not in ("auto", *heads):
        owners = [name for name in tasks_of("head") if train.head in TASKS[name].heads]
        text = f"{train.head} needs --task {any_of(owners)}. Use {any_of(heads)}."
        yield Fault("head", text, "conflict")

    if train.cache_frozen == "on" and not any(TASKS[task].caches for task in train.tasks):
        owners = [name for name, facts in TASKS.items() if facts.caches]
        yield Fault("cache_frozen", f"on needs --task {any_of(owners)}.", "conflict")
    tasks = [task for task in train.tasks if task in PREFERENCE_TASKS]
    if tasks and train.beta == 0 and train.changed(["beta"]):
        yield Fault("beta", f"must be above 0 with --task {any_of(tasks)}, but is 0.")


def _score_head_faults(train: TrainConfig) -> Iterator[Fault]:
    order = [phase.task or train.task for phase in train.phases] or [train.task]
    scores = [task in TASKS and train.head_of(task) == "score" for task in order]
    if not any(scores):
        return

    first = order[scores.index(True)]
    if train.trains_base:
        text = f"full cannot be combined with --task {first}, whose head is trained with adapters."
        yield Fault("method", text, "conflict")
    if not all(scores[scores.index(True) :]):
        text = (
            f"have another task after {first}, whose head that would not train. Put {first} last."
        )
        yield Fault("phases", text, "conflict")


def _pair_loss_faults(train: TrainConfig) -> Iterator[Fault]:
    if train.label_smoothing >= 0.5:
        text = f"must be below 0.5 for preferences, but is {train.label_smoothing:g}."
        yield Fault("label_smoothing", text)
    if train.loss == "robust" and train.label_smoothing == 0:
        yield Fault("loss", "robust needs a --label-smoothing above 0.", "conflict")
    if train.label_smoothing and train.loss in ("hinge", "ipo"):
        text = f"cannot be combined with --loss {train.loss}."
        yield Fault("label_smoothing", text, "conflict")


def _fim_faults(train: TrainConfig) -> Iterator[Fault]:
    if train.fim_rate <= 0:
        for name in train.changed(("fim_tokens", "fim_spm_rate")):
            yield Fault(name, "needs a --fim-rate above 0.", "conflict")

    tokens = train.fim_tokens
    if len(tokens) not in (0, 3, 4) or len(set(tokens)) != len(tokens):
        yield Fault(
            "fim_tokens",
            "must be three different tokens (before prefix, suffix, middle), or a fourth that "
            f"ends the middle, but is {', '.join(tokens)}.",
        )


def _distill_faults(train: TrainConfig) -> Iterator[Fault]:
    if train.share_prefix == "on":
        yield Fault("share_prefix", "on cannot be combined with --task distill.", "conflict")
    if train.loss != "jsd" and train.changed(["jsd_beta"]):
        yield Fault("jsd_beta", "needs --loss jsd.", "conflict")
    if train.teacher is None:
        for name in train.changed(("teacher_top_k", "on_policy")):
            yield Fault(name, "needs a --teacher.", "conflict")
    elif train.teacher_cache is not None and train.on_policy:
        yield Fault("on_policy", "cannot be combined with --teacher-cache.", "conflict")
    elif train.teacher_cache is None and train.packing:
        yield Fault("packing", "needs a --teacher-cache with --teacher.", "conflict")

    if not train.on_policy:
        for name in train.changed(("max_completion_length", "temperature")):
            yield Fault(name, "needs an --on-policy share above 0.", "conflict")
        return
    unfit = train.changed(("ce_weight", "ce_last_k", "long_rows"))
    if train.loss_on == "all":
        unfit.append("loss_on")
    yield from _incompatible(train, "--on-policy", unfit)


# The faults of settings of some tasks, in a run with one of them.
_CONFLICTS_OF_TASKS = {
    _pair_loss_faults: PAIR_LOSSES,
    _fim_faults: tasks_of("fim_rate"),
    _distill_faults: tasks_of("teacher"),
}
# The faults of settings of different classes.
_CONFLICTS = (
    _excluded_faults,
    _length_faults,
    _task_faults,
    _score_head_faults,
)
