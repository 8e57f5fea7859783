"""Loss, accuracy and margin of a model, or of a reward model, on held-out preferences."""

from collections.abc import Callable, Sequence

import numpy as np

from ..config.choices import TASKS
from ..data.dataset import Batch
from ..data.encoding import EncodingOptions
from ..data.formats import Row
from ..data.preferences import encode_scored
from ..data.texts import TextGroups
from ..objectives.objective import arrays_of
from ..objectives.preference import PreferenceObjective
from ..objectives.reader import score_reader
from ..objectives.text_loss import TextLoss, reward_losses
from ..runtime import mx
from .images import encoding_progress
from .perplexity import perplexity
from .scores import MetricReport, MetricScore, TextEvaluator, over_batches, standard_error

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

    loss /= len(rewards)
    metrics = {"preference_accuracy": accuracy, "reward_margin": margin}
    facts = {**metrics, "loss": loss, "chosen_ppl": ppl}
    if rated:
        facts["commonest_share"] = max(desirable.mean(), 1 - desirable.mean())
    return MetricScore(loss, metrics, len(rewards), facts)


def score_pairs(
    objective: TextLoss,
    batches: Sequence[Batch],
    advance: Callable[[], None] | None = None,
) -> MetricScore:
    """Score all pairs of some batches, at least one, in evaluation mode."""
    rewards, losses, _ = over_batches(objective.model, batches, objective.outputs, advance)
    gains = rewards[:, 0] - rewards[:, 1]
    right = (np.sign(gains) + 1) / 2
    loss = float(losses.mean())

    metrics = {
        "preference_accuracy": float(right.mean()),
        "preference_accuracy_se": standard_error(right),
        "reward_margin": float(gains.mean()),
        "reward_margin_se": standard_error(gains),
    }
    return MetricScore(loss, metrics, len(rewards), {**metrics, "loss": loss})


class RewardEvaluator(TextEvaluator):
    """Accuracy, margin and loss of a reward model."""

    what = "a reward model, which scores completions"

    def encoded(self, rows: Sequence[Row]) -> TextGroups:
        base = self.base
        options = EncodingOptions(max_seq_length=self.limit, vocab_size=base.vocab_size)
        columns = self.settings.columns
        with encoding_progress(2 * len(rows), base, self.settings.display) as advance:
            return encode_scored(rows, base.tokenizer, columns, options, advance=advance)

    def scored(self, advance: Callable[[], None]) -> MetricScore:
        reader = score_reader(self.base, self.base.active.attached.score, "reward")
        return score_pairs(TextLoss(reader, reward_losses), self.batches, advance)

    def report(self, base: None, pack: MetricScore) -> MetricReport:
        return MetricReport(self.examples, base, pack.metrics, {"loss": pack.loss})
