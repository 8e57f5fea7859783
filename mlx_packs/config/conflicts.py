"""Settings of a training run that exclude or require each other."""

import dataclasses
import re
from collections.abc import Iterator

from .choices import METHODS, MethodFacts
from .fields import Fault, Settings, facts_of

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

    method: str
    task: str
    objective: str
    phases: tuple
    max_seq_length: int
    fim_rate: float
    fim_tokens: tuple[str, ...]
    lr_schedule: str | dict
    warmup_steps: int
    grad_checkpoint: bool
    recompute: str
    cache_frozen: str
    quantize: str
    double_quant: bool
    keep: tuple[str, ...]
    load_best: bool
    patience: int | None
    val_batches: int
    neftune_noise_alpha: float
    time: str | None
    epochs: float | None

    @property
    def trains_base(self) -> bool:
        """Whether the method trains the base's own weights."""
        return METHODS.get(self.method, MethodFacts()).trains_base

    @property
    def recomputes(self) -> str:
        """The policy of activation checkpointing, whichever of its two settings names it."""
        return "block" if self.grad_checkpoint else self.recompute

    @property
    def has_magnitudes(self) -> bool:
        """Whether the method trains a magnitude for every output of an adapted projection."""
        return METHODS.get(self.method, MethodFacts()).magnitudes

    def unfit_for_dense(self) -> list[str]:
        """Return the settings that do not fit a base whose weights are dense in float32."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if (fit := facts_of(field).dense) and getattr(self, field.name) not in fit
        ]

    def _conflicts(self) -> Iterator[Fault]:
        yield from self._conflicts_of_memory()
        yield from self._conflicts_of_fim()
        yield from self._conflicts_of_objective()
        yield from self._conflicts_of_its_end()
        for field in dataclasses.fields(self):
            task = facts_of(field).task
            if task not in (None, self.task) and self.changed([field.name]):
                yield Fault(field.name, f"needs --task {task}.", "conflict")
        if self.trains_base:
            for name in (*self.unfit_for_dense(), *self.changed(["loraplus_lr_ratio"])):
                text = f"{getattr(self, name)} does not go with --method full."
                yield Fault(name, text, "conflict")
        if self.warmup_steps and not isinstance(self.lr_schedule, str):
            yield Fault(
                "warmup_steps",
                "does not apply to a schedule with arguments. Write lr_schedule.warmup: "
                f"{self.warmup_steps}.",
                "conflict",
            )

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
