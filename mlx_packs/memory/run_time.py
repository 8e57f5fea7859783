"""Predict how long a run takes: its start, the steps that `step_time` predicts, its evaluations.

What --cache-frozen saves is not counted.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ..config.choices import TASKS
from ..config.common import HELD_OUT_SHARE, LEAST_HELD_OUT, MOST_HELD_OUT
from ..config.data import FOLLOWED
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..display import clock
from .headers import Headers, tensor_bytes
from .step_time import measured_steps, predict, work

MEASURED = "measured here"
PREDICTED = "predicted for this chip"
NOT_KNOWN = "not known"
# Of a step that a batch without gradients takes: a third if blocks are recomputed, else half by the
# products; the bundled model took 0.72 on a CPU.
_EVALUATED = (0.33, 0.75)
# Of a prediction for a base that was not timed here: graphs take 0.86 and more of what rates
# predict, published steps of 84 tokens 2.2 (benchmarks/README.md, "Published against predicted").
_BY_RATES = (0.86, 2.2)
# Of a step on one token that a generated token takes: several answers are generated together, or
# one by one and longer than expected.
_GENERATED = (0.1, 1.0)
# Loading, and measuring the matmul path; and by the size of the base, read from a disk.
_START_S = (2.0, 12.0)
_READ_BYTES_PER_S = (5e9, 0.3e9)
_ANSWER = 40.0  # tokens of an answer, without examples


class EpochSize(NamedTuple):
    """The batches of a run's examples.

    Attributes:
        batches: Of training examples.
        inputs: Mean inputs of a sequence, padding included.
        validation: Batches of the validation split.
        held_out: Batches of the split that the run is evaluated on.
        questions: Held-out examples that are answered for a metric, before the run and after it.
        answer: Mean tokens of an example that are trained on.
    """

    batches: int
    inputs: float
    validation: int
    held_out: int
    questions: int = 0
    answer: float = _ANSWER


EpochOf = Callable[[TrainConfig], EpochSize]


@dataclass(frozen=True)
class RunTime:
    """How long a run takes on this device.

    Attributes:
        low: The least seconds; None if they are not known.
        high: The most seconds, likewise.
        source: `MEASURED`, `PREDICTED` or `NOT_KNOWN`.
        why: Where the seconds are from, or why they are not known.
    """

    low: float | None
    high: float | None
    source: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Return the range: ``12:05 to 18:30``."""
        if self.low is None or self.high is None:
            return self.source
        return f"{clock(self.low)} to {clock(self.high)}"

    def line(self) -> str:
        """Return the range with its source, or why there is none."""
        if self.low is None:
            return f"{self.source}: {self.why}"
        return f"{self.text()}, start and evaluations included; {self.source}"


def predict_run(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, epoch: EpochSize | None = None
) -> RunTime:
    """Return how long a run takes; without ``epoch`` every sequence has max_seq_length tokens."""
    if reason := _unknown(headers, lora, train, epoch):
        return RunTime(None, None, NOT_KNOWN, reason)

    batches = train.iters
    if epoch is not None:
        train = replace(train, max_seq_length=max(2, round(epoch.inputs) + 1))
        if train.epochs is not None:
            batches = max(1, round(train.epochs * epoch.batches))

    step = predict(headers, lora, train)
    if step is None:
        text = "no step was timed on that device, as `packs bench` does there"
        return RunTime(None, None, NOT_KNOWN, text)

    source = PREDICTED
    shares = _BY_RATES
    if step.error is not None and headers.name in {each.model for each in measured_steps()}:
        source = MEASURED
        shares = (1 - step.error, 1 + step.error)

    limit = float("inf") if train.seconds is None else train.seconds
    validations = batches // train.steps_per_eval
    validated = validations * _first(train.val_batches, epoch and epoch.validation)
    held_out = 2 * _held_out(train, batches, epoch)
    token = predict(headers, lora, replace(train, batch_size=1, max_seq_length=2))
    token_s = token.seconds * _generated(train, batches, epoch)
    stored = sum(tensor_bytes(tensor, widen=False) for tensor in headers.tensors.values())

    bounds = []
    for i, share in enumerate(shares):
        step_s = share * step.seconds
        training_s = min(limit, step_s * (batches + _EVALUATED[i] * validated))
        evaluated_s = step_s * _EVALUATED[i] * held_out
        answers_s = share * token_s * _GENERATED[i]
        start_s = _START_S[i] + stored / _READ_BYTES_PER_S[i]
        bounds.append(start_s + training_s + evaluated_s + answers_s)
    return RunTime(*bounds, source, step.source)


def _generated(train: TrainConfig, batches: int, epoch: EpochSize | None) -> float:
    """Return the tokens of all answers: of a metric, of --sample-every, and one for the page."""
    questions, answer = (epoch.questions, epoch.answer) if epoch else (0, _ANSWER)
    followed = 0
    if train.sample_every is not None:
        followed = FOLLOWED * (1 + batches // train.sample_every)
    return answer * (2 * max(questions, 1) + followed)


def _unknown(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, epoch: EpochSize | None
) -> str:
    """Return why nothing is known of a run, whatever the device; empty if something is."""
    kind = ""
    if train.phases:
        kind = "phases"
    elif not TASKS[train.task].plans_rows:
        kind = f"--task {train.task}"
    elif train.trains_base:
        kind = "full fine-tuning"
    elif train.offloads:
        kind = "a base on disk"
    elif work(headers, lora, train) is None:
        kind = f"{headers.config.get('model_type')} models"
    if kind:
        return f"there is no formula for the time of {kind}"

    by_examples = train.epochs is not None or -1 in (train.val_batches, train.test_batches)
    if epoch is None and by_examples:
        return "the number of batches follows from the examples, which --data names"
    return ""


def _held_out(train: TrainConfig, batches: int, epoch: EpochSize | None) -> int:
    """Return the held-out batches that are scored before a run, and after it again."""
    chosen = train.test_batches
    if chosen is None:
        examples = max(LEAST_HELD_OUT, HELD_OUT_SHARE * batches * train.batch_size)
        chosen = math.ceil(min(MOST_HELD_OUT, examples) / train.batch_size)
    return _first(chosen, epoch and epoch.held_out)


def _first(chosen: int, present: int | None) -> int:
    """Return how many batches are the first ``chosen``; -1 is all that are present."""
    if present is None:
        return chosen
    return present if chosen < 0 else min(chosen, present)
