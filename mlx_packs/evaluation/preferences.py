"""Loss, accuracy and margin of a model, or of a reward model, on held-out preferences."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..config.choices import TASKS
from ..data.dataset import Batch
from ..data.encoding import EncodingOptions
from ..data.formats import Row
from ..data.preference_batches import preference_evaluation
from ..data.preferences import encode_scored
from ..data.shapes import sequence_inputs
from ..objectives.objective import arrays_of
from ..objectives.preference import PreferenceObjective
from ..objectives.reward_model import RewardModel, hidden_states
from ..packs.base import Base
from ..packs.pack import Pack
from ..packs.rewards import attached_reward_model
from ..runtime import mx
from .images import encoding_progress
from .perplexity import perplexity
from .rows import EvalSettings
from .scores import (
    MetricScore,
    check_no_text_settings,
    format_with_errors,
    over_batches,
    scoring_path,
    standard_error,
)

VALIDATED = ("valid_loss", "valid_preference_accuracy", "valid_reward_margin")


def score_preferences(
    objective: PreferenceObjective,
    batches: Sequence[Batch],
    advance: Callable[[], None] | None = None,
) -> MetricScore:
    """Score all rows of some batches, at least one, in evaluation mode.

    Accuracy is the share of rows whose chosen completion has the higher reward, or whose rated one
    has a reward of the right sign; a tie counts as half. The margin is the mean reward of chosen
    completions minus the mean of rejected ones.
    """

    def scored(batch: Batch) -> list:
        prepared = objective.prepare(batch)
        total, *values = objective.outcome(arrays_of(prepared), prepared.layout)
        mx.eval(total, values)
        rows = batch.denominator
        return [np.array(total)[None], *(np.array(value, np.float64)[:rows] for value in values)]

    parts = over_batches(objective.model, batches, scored, advance)
    losses, rewards, log_probs, targets = parts
    loss = sum(losses.tolist())

    labels = [batch.inputs["labels"][: batch.denominator] for batch in batches]
    desirable = np.concatenate(labels) > 0
    rated = TASKS[objective.train.task].rated
    gains = np.where(desirable, 1, -1) * rewards[:, 0] if rated else rewards[:, 0] - rewards[:, 1]
    accuracy = float(((np.sign(gains) + 1) / 2).mean())

    margin = float(gains.mean())
    if rated and desirable.any() and not desirable.all():  # each kind counts as much as the other
        margin = float(rewards[desirable, 0].mean() - rewards[~desirable, 0].mean())

    nll = -log_probs[desirable, 0].sum()
    count = int(targets[desirable, 0].sum())
    ppl = perplexity(float(nll), count) if count else float("nan")

    facts = {"chosen_ppl": ppl}
    if rated:
        facts["commonest_share"] = max(desirable.mean(), 1 - desirable.mean())
    metrics = {"preference_accuracy": accuracy, "reward_margin": margin}
    return MetricScore(loss / len(rewards), metrics, len(rewards), facts)


def score_pairs(
    objective: RewardModel,
    batches: Sequence[Batch],
    advance: Callable[[], None] | None = None,
) -> MetricScore:
    """Score all pairs of some batches, at least one, in evaluation mode."""

    def scored(batch: Batch) -> list[np.ndarray]:
        values = objective.outcome(arrays_of(batch), batch.layout)
        mx.eval(values)
        return [np.array(value, np.float64)[: batch.denominator] for value in values]

    losses, pairs = over_batches(objective.model, batches, scored, advance)
    gains = pairs[:, 0] - pairs[:, 1]
    right = (np.sign(gains) + 1) / 2
    loss = float(losses.mean())

    metrics = {
        "preference_accuracy": float(right.mean()),
        "preference_accuracy_se": standard_error(right),
        "reward_margin": float(gains.mean()),
        "reward_margin_se": standard_error(gains),
    }
    return MetricScore(loss, metrics, len(pairs))


@dataclass(frozen=True)
class RewardReport:
    """A reward model on held-out pairs; the base alone has no score to compare with."""

    rows: int
    dropped: int
    format: str
    preference_accuracy: float
    preference_accuracy_se: float | None
    reward_margin: float
    reward_margin_se: float | None
    loss: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        dropped = f" · {self.dropped} dropped for their length" if self.dropped else ""

        return [
            f"pack    {format_with_errors(asdict(self))}, loss {self.loss:.4f}",
            f"data    {self.rows} examples ({self.format}){dropped}",
        ]


def evaluate_reward_model(
    base: Base, pack: Pack, rows: Sequence[Row], settings: EvalSettings
) -> RewardReport:
    """Return accuracy, margin and loss of a reward model on rows of preferences.

    Raises a PackError if a setting has no meaning for it, or a row cannot be used.
    """
    check_no_text_settings(settings, "a reward model, which scores completions")
    length = min(settings.max_seq_length, base.text_limit)
    options = EncodingOptions(max_seq_length=length, vocab_size=base.vocab_size)
    with encoding_progress(2 * len(rows), base, settings.display) as advance:
        examples = encode_scored(rows, base.tokenizer, settings.columns, options, advance=advance)

    chosen = np.arange(examples.count)
    inputs = sequence_inputs(length)
    batches = preference_evaluation(examples, settings.batch_size, inputs, chosen).once()

    path = scoring_path(base, batches, settings.matmul_path)
    bars = settings.display.task("score", len(batches), "batches")
    with attached_reward_model(base, pack, path) as attached, bars as bar:
        states = hidden_states(base.model, base.name)
        model = RewardModel(base.model, states, attached.score)
        score = score_pairs(model, batches, bar.advance)

    return RewardReport(
        rows=score.rows,
        dropped=examples.dropped,
        format=examples.format,
        loss=score.loss,
        **score.metrics,
    )
