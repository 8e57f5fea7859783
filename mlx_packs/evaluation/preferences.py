"""Loss, accuracy and margin of a model, or of a reward model, on held-out preferences."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from ..config.choices import TASKS
from ..data.dataset import Batch
from ..data.encoding import EncodingOptions
from ..data.formats import Row
from ..data.preference_batches import preference_evaluation
from ..data.preferences import encode_scored
from ..data.shapes import sequence_inputs
from ..distributed.group import group
from ..errors import PackError
from ..memory.matmul_path import choose_matmul_path
from ..objectives.objective import arrays_of
from ..objectives.preference import PreferenceObjective
from ..objectives.reward_model import RewardModel, hidden_states
from ..objectives.score import Score
from ..packs.base import Base
from ..packs.pack import Pack
from ..packs.rewards import attached_reward_model
from ..runtime import mx
from .images import encoding_progress
from .metrics import NO_METRIC
from .perplexity import perplexity
from .rows import EvalSettings


@dataclass(frozen=True)
class PairScore(Score):
    """What every score of preferences has.

    Attributes:
        nll: mean loss of a row.
        accuracy: share of the rows whose chosen completion has the higher reward, or whose rated
            completion has a reward of the right sign; a tie counts as half.
        margin: mean reward of chosen completions minus the mean of rejected ones.
        rows: number of rows.
        commonest_share: share of the commoner rating, which a constant sign would reach; None of
            pairs, where that is chance.
    """

    nll: float
    accuracy: float
    margin: float
    rows: int
    commonest_share: float | None = None
    numbers: ClassVar = ("valid_loss", "valid_preference_accuracy", "valid_reward_margin")

    @property
    def value(self) -> float:
        return self.nll

    @property
    def entries(self) -> dict[str, float]:
        return dict(zip(self.numbers, (self.nll, self.accuracy, self.margin), strict=True))

    @property
    def text(self) -> str:
        commonest = ""
        if self.commonest_share is not None:
            commonest = f" (commonest label {self.commonest_share:.1%})"
        accuracy = f"accuracy {self.accuracy:.1%}{commonest}"
        return f"loss {self.nll:.3f}, {accuracy}, margin {self.margin:.3f}"


@dataclass(frozen=True)
class PreferenceScore(PairScore):
    """The score of a model on preferences; ``ppl`` is the perplexity of chosen completions."""

    ppl: float = float("nan")
    ppl_se: float | None = None  # not known


def score_preferences(
    objective: PreferenceObjective,
    batches: Sequence[Batch],
    advance: Callable[[], None] | None = None,
) -> PreferenceScore:
    """Score all rows of some batches, at least one, in evaluation mode."""
    if not batches:
        raise PackError("--data: there are no examples to evaluate.", "data")
    objective.model.eval()

    def scored(batch: Batch) -> list[np.ndarray]:
        prepared = objective.prepare(batch)
        total, *values = objective.outcome(arrays_of(prepared), prepared.layout)
        mx.eval(total, values)
        if advance is not None:
            advance()
        rows = batch.denominator
        return [np.array(total), *(np.array(value, np.float64)[:rows] for value in values)]

    losses, *parts = zip(*group().map(scored, batches), strict=True)
    loss = sum(float(each) for each in losses)
    rewards, log_probs, targets = map(np.concatenate, parts)

    labels = [batch.inputs["labels"][: batch.denominator] for batch in batches]
    desirable = np.concatenate(labels) > 0
    rated = TASKS[objective.train.task].rated
    if rated:
        gains = np.where(desirable, 1, -1) * rewards[:, 0]
    else:
        gains = rewards[:, 0] - rewards[:, 1]
    accuracy = float(((np.sign(gains) + 1) / 2).mean())

    margin = float(gains.mean())
    if rated and desirable.any() and not desirable.all():  # each kind counts as much as the other
        margin = float(rewards[desirable, 0].mean() - rewards[~desirable, 0].mean())

    nll = -log_probs[desirable, 0].sum()
    count = int(targets[desirable, 0].sum())
    ppl = perplexity(float(nll), count) if count else float("nan")

    commonest = max(desirable.mean(), 1 - desirable.mean()) if rated else None
    return PreferenceScore(loss / len(rewards), accuracy, margin, len(rewards), commonest, ppl)


@dataclass(frozen=True)
class RewardScore(PairScore):
    """The score of a reward model on pairs, with standard errors unless there is one pair.

    ``ppl`` is None, since a score is no probability.
    """

    accuracy_se: float | None = None
    margin_se: float | None = None
    ppl: None = None


def score_pairs(
    objective: RewardModel,
    batches: Sequence[Batch],
    advance: Callable[[], None] | None = None,
) -> RewardScore:
    """Score all pairs of some batches, at least one, in evaluation mode."""
    if not batches:
        raise PackError("--data: there are no examples to evaluate.", "data")
    objective.model.eval()

    def scored(batch: Batch) -> list[np.ndarray]:
        values = objective.outcome(arrays_of(batch), batch.layout)
        mx.eval(values)
        if advance is not None:
            advance()
        return [np.array(value, np.float64)[: batch.denominator] for value in values]

    losses, rewards = zip(*group().map(scored, batches), strict=True)
    pairs = np.concatenate(rewards)
    gains = pairs[:, 0] - pairs[:, 1]
    right = (np.sign(gains) + 1) / 2
    loss = float(np.concatenate(losses).mean())

    accuracy, margin = float(right.mean()), float(gains.mean())
    errors = {"accuracy_se": standard_error(right), "margin_se": standard_error(gains)}
    return RewardScore(loss, accuracy, margin, len(pairs), **errors)


def standard_error(values: np.ndarray) -> float | None:
    """Return the standard error of a mean, [N]; None of a single value."""
    if len(values) < 2:
        return None
    return float(values.std(ddof=1) / np.sqrt(len(values)))


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
        accuracy = with_error(self.preference_accuracy, self.preference_accuracy_se)
        margin = with_error(self.reward_margin, self.reward_margin_se)
        dropped = ""
        if self.dropped:
            dropped = f" · {self.dropped} dropped for their length"

        return [
            f"pack    preference accuracy {accuracy}, reward margin {margin}, loss {self.loss:.4f}",
            f"data    {self.rows} examples ({self.format}){dropped}",
        ]


def check_no_text_settings(settings: EvalSettings, what: str) -> None:
    """Raise a PackError if a setting is about text, which a pack of another kind has not."""
    misplaced = {
        "loss_on": settings.loss_on is not None,
        "metric": settings.metric not in (None, NO_METRIC),
        "share_prefix": settings.share_prefix == "on",
    }
    for flag, is_misplaced in misplaced.items():
        if is_misplaced:
            name = flag.replace("_", "-")
            text = f"--{name}: does not apply to {what}. Leave it out."
            raise PackError(text, "conflict", flag)


def with_error(value: float, error: float | None) -> str:
    """Return a number for people, with its standard error if it is known."""
    if error is None:
        return f"{value:.4f}"
    return f"{value:.4f} ± {error:.4f}"


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

    path = settings.matmul_path
    if path == "auto":
        tokens = batches[-1].inputs["tokens"].size
        path = choose_matmul_path(base.model, tokens, steps=len(batches)).matmul_path

    bars = settings.display.task("score", len(batches), "batches")
    with attached_reward_model(base, pack, path) as attached, bars as bar:
        states = hidden_states(base.model, base.name)
        model = RewardModel(base.model, states, attached.score)
        score = score_pairs(model, batches, bar.advance)

    return RewardReport(
        score.rows,
        examples.dropped,
        examples.format,
        score.accuracy,
        score.accuracy_se,
        score.margin,
        score.margin_se,
        score.nll,
    )
