"""The settings of one phase of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from .choices import DECODER_TASKS
from .fields import Fault, Settings, option

_phase = partial(option, section="Optimization", flags=())


@dataclass(frozen=True, repr=False)
class Phase(Settings):
    """One of the ``phases`` of a run, which trains them in order, with the same adapters.

    Omitted settings are those that the run's `TrainConfig` specifies, else the task's defaults.
    """

    name: str | None = _phase(None, "Name of the phase.", shown_default="phase-1, phase-2, ...")
    data: str | list | None = _phase(None, "Training data of the phase: a source as for --data.")
    task: str | None = _phase(None, "Task of the phase.", choices=DECODER_TASKS)
    iters: int | None = _phase(None, "Batches of the phase.")
    learning_rate: float | None = _phase(None, "Peak learning rate of the phase.")
    lr_schedule: str | dict | None = _phase(
        None, "Learning-rate schedule of the phase; it starts with the phase."
    )
    warmup_steps: int | None = _phase(None, "Warm-up updates of the phase.")
    warmup_ratio: float | None = _phase(
        None, "Share of the phase's updates for the warm-up, instead of warmup_steps."
    )
    replay: float = _phase(
        0.0, "Share of the examples that are drawn from earlier phases.", at_least=0, at_most=1
    )
    optimizer_state: str = _phase(
        "carry",
        "Whether the optimizer keeps its state (carry) or starts anew (fresh).",
        choices=("carry", "fresh"),
    )

    def _conflicts(self) -> Iterator[Fault]:
        if self.name is not None and not self.name.strip():
            yield Fault("name", "must not be empty.")
        elif self.name is not None and not self.name.isprintable():
            yield Fault("name", f"must be one line of text, but is {self.name!r}.")

        if self.data is not None and (not self.data or isinstance(self.data, list)):
            text = f"must be one source, but is {self.data!r}. Train on several in a phase each."
            yield Fault("data", text)

    def to_json(self) -> dict:
        """Return the settings that are not omitted."""
        return {name: getattr(self, name) for name in self.changed(vars(self))}
