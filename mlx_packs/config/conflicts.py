"""Settings of a training run that exclude or require each other."""

import dataclasses
import re
from collections.abc import Iterator

from ..errors import PackError, any_of
from .choices import METHODS, PREFERENCE_TASKS, TASKS
from .fields import Fault, Settings, facts_of
from .phase import Phase
from .tasks import tasks_of

_NUMBER = r"(\d+(?:\.\d+)?)"
_TIME = re.compile(f"(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?")


def seconds_of(time: str | float) -> float | None:
    """Return the seconds of a time above 0 (``6h``, ``1h30m``, ``45``), or None if it is none."""
    text = str(time).replace(" ", "").lower()
    if re.fullmatch(_NUMBER, text):
        text += "s"
    if not (match := _TIME.fullmatch(text)):
        return None
    factors = zip((3600, 60, 1), match.groups(), strict=True)
    return sum(factor * float(number or 0) for factor, number in factors) or None


class TrainConflicts(Settings):
    """The checks of `TrainConfig` that are about more than one setting."""

    for_merge: str
    tasks: tuple[str, ...]
    loss: str
    label_smoothing: float
    objective: str
    phases: tuple[Phase, ...]
    fim_rate: float
    fim_tokens: tuple[str, ...]
    recompute: str
    cache_frozen: str
    train_fp16_fallback: bool
    double_quant: bool
    keep: tuple[str, ...]
    load_best: bool
    val_batches: int
    neftune_noise_alpha: float
    pipeline: bool
    min_tps_ratio: float | None

    @property
    def trains_base(self) -> bool:
        """Whether the method trains the base's own weights."""
        return self.method in METHODS and METHODS[self.method].trains_base

    @property
    def recomputes(self) -> str:
        """The policy of activation checkpointing, whichever of its two settings names it."""
        return "block" if self.grad_checkpoint else self.recompute

    @property
    def has_magnitudes(self) -> bool:
        """Whether the method trains a magnitude for every output of an adapted projection."""
        return self.method in METHODS and METHODS[self.method].magnitudes

    def unfit_for_dense(self) -> list[str]:
        """Return the settings that do not fit a base whose weights are dense in float32."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if (fit := facts_of(field).dense) and getattr(self, field.name) not in fit
        ]

    def _conflicts(self) -> Iterator[Fault]:
        if not all(isinstance(phase, Phase) for phase in self.phases):
            raise PackError("phases: must be a tuple of Phase(...).", flag="phases")
        yield from self._conflicts_of_memory()
        yield from self._conflicts_of_fim()
        yield from self._conflicts_of_objective()
        yield from self._conflicts_of_for_merge()
        yield from self._conflicts_of_pipeline()
        yield from self._conflicts_of_its_end()
        yield from self._conflicts_of_tasks()

        if self.trains_base:
            for name in (*self.unfit_for_dense(), *self.changed(["loraplus_lr_ratio"])):
                text = f"{getattr(self, name)} does not go with --method full."
                yield Fault(name, text, "conflict")

        if self.beta == 0 and (tasks := [task for task in self.tasks if task in PREFERENCE_TASKS]):
            yield Fault("beta", f"must be above 0 with --task {any_of(tasks)}, but is 0.")
        yield from self._conflicts_of_scores()
        yield from super()._conflicts()

    def _conflicts_of_tasks(self) -> Iterator[Fault]:
        if not set(self.tasks) <= set(TASKS):
            return  # each setting's own check names it
        for name in self.changed(vars(self)):
            having = tasks_of(name)
            if having and not set(having) & {self.task, *self.tasks}:
                yield Fault(name, f"needs --task {any_of(having)}.", "conflict")
        losses = [loss for task in self.tasks for loss in TASKS[task].losses]
        tasks = [name for name, facts in TASKS.items() if self.loss in facts.losses]
        if tasks and losses and self.loss not in losses:
            text = f"{self.loss} needs --task {any_of(tasks)}. Take {any_of(losses)}."
            yield Fault("loss", text, "conflict")
        if self.label_smoothing >= 0.5 and set(self.tasks) & {"dpo", "cpo"}:
            text = f"must be below 0.5 for preferences, but is {self.label_smoothing:g}."
            yield Fault("label_smoothing", text)
        if self.loss == "robust" and self.label_smoothing == 0:
            yield Fault("loss", "robust needs a --label-smoothing above 0.", "conflict")
        if self.label_smoothing and self.loss in ("hinge", "ipo"):
            text = f"does not go with --loss {self.loss}."
            yield Fault("label_smoothing", text, "conflict")
        if self.cache_frozen == "on" and "lm" not in self.tasks:
            yield Fault("cache_frozen", "on needs --task lm.", "conflict")

    def _conflicts_of_memory(self) -> Iterator[Fault]:
        if self.grad_checkpoint and self.recompute == "none":
            yield Fault("grad_checkpoint", "means --recompute block, but that is none.", "conflict")
        if not self.double_quant and self.quantize != "nf4":
            text = f"can be off only with --quantize nf4, but that is {self.quantize}."
            yield Fault("double_quant", text, "conflict")
        if self.keep and self.quantize == "none":
            yield Fault("keep", "needs --quantize.", "conflict")

    def _conflicts_of_its_end(self) -> Iterator[Fault]:
        if self.epochs is not None and (self.phases or self.changed(["iters"])):
            other = "phases" if self.phases else "--iters"
            yield Fault("epochs", f"does not go with {other}. Give one of them.", "conflict")
        if (named := self.changed(("load_best", "patience", "time"))) and self.phases:
            yield Fault(named[0], "does not go with phases.", "conflict")
        if (named := self.changed(("load_best", "patience"))) and not self.val_batches:
            yield Fault(named[0], "needs validation, but --val-batches is 0.", "conflict")
        if self.time is not None and not seconds_of(self.time):
            yield Fault("time", f"must be a time such as 6h, 90m or 30s, but is {self.time!r}.")

    def _conflicts_of_fim(self) -> Iterator[Fault]:
        if self.fim_rate <= 0:
            for name in self.changed(("fim_tokens", "fim_spm_rate")):
                yield Fault(name, "needs a --fim-rate above 0.", "conflict")
        elif self.max_seq_length < 32:
            text = f"needs a --max-seq-length of at least 32, but that is {self.max_seq_length}."
            yield Fault("fim_rate", text, "conflict")
        tokens = self.fim_tokens
        if len(tokens) not in (0, 3, 4) or len(set(tokens)) != len(tokens):
            yield Fault(
                "fim_tokens",
                "must be three different tokens (before prefix, suffix, middle), or a fourth that "
                f"ends the middle, but is {', '.join(tokens)}.",
            )

    def _conflicts_of_objective(self) -> Iterator[Fault]:
        if self.objective == "transformer":
            return
        unfit = {
            "grad_checkpoint" if self.grad_checkpoint else "recompute": (
                self.recomputes not in ("auto", "none")
            ),
            "phases": bool(self.phases),
            "method": self.trains_base or self.has_magnitudes,
            "cache_frozen": self.cache_frozen == "on",
            "neftune_noise_alpha": bool(self.neftune_noise_alpha),
        }
        for name in (name for name, bad in unfit.items() if bad):
            yield Fault(name, f"does not go with --objective {self.objective}.", "conflict")

    def _conflicts_of_pipeline(self) -> Iterator[Fault]:
        if not self.pipeline:
            return
        unfit = {
            "method": self.method != "lora",
            "task": set(self.tasks) != {"lm"},
            "objective": self.objective != "transformer",
            "for_merge": self.for_merge != "none",
            "packing": self.packing,
            "cache_frozen": self.cache_frozen == "on",
            "neftune_noise_alpha": bool(self.neftune_noise_alpha),
            "quantize": self.quantize != "none",
            "train_fp16_fallback": self.train_fp16_fallback,
            "metric": self.metric not in (None, "none"),
            "min_tps_ratio": self.min_tps_ratio is not None,
        }
        for name in (name for name, bad in unfit.items() if bad):
            value = "" if getattr(self, name) is True else f"{getattr(self, name)} "
            yield Fault(name, f"{value}does not go with --pipeline.", "conflict")

    def _conflicts_of_for_merge(self) -> Iterator[Fault]:
        if self.for_merge == "none":
            return
        unfit = {
            "method": self.method != "lora",
            "objective": self.objective != "transformer",
            "train_fp16_fallback": self.train_fp16_fallback,
            "phases": bool(self.phases and set(self.tasks) - {"lm"}),
        }
        for name in (name for name, bad in unfit.items() if bad):
            value = "of another task" if name == "phases" else getattr(self, name)
            text = f"{value} does not go with --for-merge {self.for_merge}."
            yield Fault(name, text, "conflict")

    def _conflicts_of_scores(self) -> Iterator[Fault]:
        order = [phase.task or self.task for phase in self.phases] or [self.task]
        scores = [task in TASKS and TASKS[task].scores for task in order]
        if not any(scores):
            return
        first = order[scores.index(True)]
        if self.trains_base:
            text = f"full does not go with --task {first}, whose head is trained beside adapters."
            yield Fault("method", text, "conflict")
        if not all(scores[scores.index(True) :]):
            text = f"have another task after {first}, whose head that would not train. Put {first} last."
            yield Fault("phases", text, "conflict")
