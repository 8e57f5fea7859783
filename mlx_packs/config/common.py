"""The settings of `TrainConfig` that come first, in this order."""

from dataclasses import dataclass

from .fields import Settings


@dataclass(frozen=True, repr=False)
class CommonSettings(Settings):
    """Names and order of the common settings; subclasses declare their facts.

    A dataclass has the fields of its bases first: without this one, those of single tasks.
    """

    task: str
    method: str
    iters: int
    epochs: float | None
    learning_rate: float
    batch_size: int
    max_seq_length: int
    lr_schedule: str | dict
    warmup_steps: int
    optimizer: str
    grad_accumulation_steps: int
    seed: int
    quantize: str
    loss_on: str | None
    packing: bool
    grad_checkpoint: bool
    metric: str | None
    patience: int | None
    steps_per_eval: int
    save_every: int
    time: str | None
