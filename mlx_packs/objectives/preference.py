"""Losses of preferences, with TRL's numbers, and the objective over batches of them.

A loss takes the log-probabilities of both completions of each row, and gives a loss for each row.

DPO: https://arxiv.org/abs/2305.18290, with label smoothing: https://arxiv.org/abs/2403.00409
(robust) and its section 3 (conservative). IPO: https://arxiv.org/abs/2310.12036. Hinge:
https://arxiv.org/abs/2305.10425. ORPO: https://arxiv.org/abs/2403.07691. SimPO:
https://arxiv.org/abs/2405.14734. CPO: https://arxiv.org/abs/2401.08417. KTO:
https://arxiv.org/abs/2402.01306
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.nn as nn

from ..adapters.trainable import compiled
from ..config.choices import PREFERENCE_TASKS, registered
from ..config.schema import TrainConfig
from ..data.dataset import Batch, Layout
from ..distributed.group import group
from ..runtime import mx
from .causal_lm import Head, target_loss
from .objective import Inputs, ScoredObjective
from .reference import Reference
from .score import Score

_LEAST = 1e-7  # least 1 - p of a completion, whose odds would be infinite


@dataclass(frozen=True)
class Completions:
    """The completions of P rows, two of each; a row that is padding has no targets.

    Attributes:
        log_probs: [P, 2] float32, the sum over the targets of each.
        targets: [P, 2] float32, how many these are.
        reference: [P, 2] float32, the same sums by the reference; zeros where there is none.
        labels: [P] float32, 1 where the first completion is desirable, else 0.
    """

    log_probs: mx.array
    targets: mx.array
    reference: mx.array
    labels: mx.array

    @property
    def ratios(self) -> mx.array:
        """Log-probabilities less the reference's, [P, 2]."""
        return self.log_probs - self.reference

    @property
    def means(self) -> mx.array:
        """Log-probability of a target, [P, 2]."""
        return self.log_probs / mx.maximum(self.targets, 1)

    @property
    def is_row(self) -> mx.array:
        """1 where a row is no padding, [P]."""
        return (self.targets[:, 0] > 0).astype(mx.float32)


def pair_loss(margins: mx.array, loss: str, smoothing: float) -> mx.array:
    """Return the loss of each margin by which the chosen completion is preferred, [P]."""
    if loss == "hinge":
        return mx.maximum(1 - margins, 0)

    right = -nn.log_sigmoid(margins)
    wrong = -nn.log_sigmoid(-margins)
    if loss == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def loss_of(train: TrainConfig) -> str:
    """Return the value of ``--loss`` that ``auto`` stands for."""
    if train.loss == "auto":
        return "sigmoid"
    return train.loss


def dpo_loss(completions: Completions, train: TrainConfig) -> mx.array:
    """Each chosen completion is to gain more over the reference than the rejected one.

    Semantics: -log sigmoid(beta * (ratio_chosen - ratio_rejected)), or another `pair_loss`.
    IPO: (mean ratio_chosen - mean ratio_rejected - 1 / (2 beta))^2, means over the targets.
    """
    ratios = completions.ratios
    if loss_of(train) == "ipo":
        return ipo_loss(ratios / mx.maximum(completions.targets, 1), train.beta)

    margins = train.beta * (ratios[:, 0] - ratios[:, 1])
    return pair_loss(margins, loss_of(train), train.label_smoothing)


def orpo_loss(completions: Completions, train: TrainConfig) -> mx.array:
    """The cross-entropy of what is chosen, and the odds of it against what is rejected.

    Semantics: NLL of the chosen targets - beta * log sigmoid(log odds ratio). The cross-entropy is
    the completion's, as in the paper; TRL adds the prompt's.
    """
    means = completions.means
    odds = means - mx.log(mx.maximum(-mx.expm1(means), _LEAST))
    return mean_nll(completions) - train.beta * nn.log_sigmoid(odds[:, 0] - odds[:, 1])


def simpo_loss(completions: Completions, train: TrainConfig) -> mx.array:
    """The mean log-probability of the chosen completion is to exceed the other's by a margin.

    Semantics: -log sigmoid(beta * (mean_chosen - mean_rejected) - gamma).
    """
    means = completions.means
    return -nn.log_sigmoid(train.beta * (means[:, 0] - means[:, 1]) - train.simpo_gamma)


def cpo_loss(completions: Completions, train: TrainConfig) -> mx.array:
    """DPO's loss without a reference, and the cross-entropy of what is chosen.

    Semantics: `pair_loss` of beta * (log p_chosen - log p_rejected) + alpha * NLL of what is
    chosen.
    """
    nll = train.cpo_alpha * mean_nll(completions)
    if loss_of(train) == "ipo":
        return ipo_loss(completions.means, train.beta) + nll

    margins = train.beta * (completions.log_probs[:, 0] - completions.log_probs[:, 1])
    return pair_loss(margins, loss_of(train), train.label_smoothing) + nll


def kto_loss(completions: Completions, train: TrainConfig) -> mx.array:
    """Desirable completions are to gain over the reference, undesirable ones to lose.

    The second completion of a row belongs to another row: what it has gained is the distance from
    the reference that gains are measured from.

    Semantics: weight * (1 - sigmoid(+-beta * (ratio - max(0, mean mismatched ratio)))).
    """
    ratios = completions.ratios
    is_row = completions.is_row
    distance = (ratios[:, 1] * is_row).sum() / mx.maximum(is_row.sum(), 1)
    gains = train.beta * (ratios[:, 0] - mx.stop_gradient(mx.maximum(distance, 0)))

    desirable = completions.labels > 0
    weights = mx.where(desirable, train.desirable_weight, train.undesirable_weight)
    return weights * (1 - mx.sigmoid(mx.where(desirable, gains, -gains)))


def ipo_loss(means: mx.array, beta: float) -> mx.array:
    return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()


def mean_nll(completions: Completions) -> mx.array:
    """Return the cross-entropy of all targets of the chosen completions, a scalar."""
    targets = completions.targets[:, 0] * completions.is_row
    nll = -completions.log_probs[:, 0] * completions.is_row
    return nll.sum() / mx.maximum(targets.sum(), 1)


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of preferences.

    Attributes:
        losses: Returns the loss of each row, [P], with the settings of a run.
        prefers: The attribute of `Completions`, [P, 2], that times beta is how much the model
            prefers each completion.
        has_reference: Whether the log-probabilities are compared with a reference's.
        compares_examples: Whether the loss of a row depends on other rows of its batch.
    """

    losses: Callable[..., mx.array]
    prefers: str
    has_reference: bool = False
    compares_examples: bool = False

    def rewards(self, completions: Completions, train: TrainConfig) -> mx.array:
        return train.beta * getattr(completions, self.prefers)


LOSSES: dict[str, PreferenceLoss] = registered(
    PREFERENCE_TASKS,
    {
        "dpo": PreferenceLoss(dpo_loss, "ratios", has_reference=True),
        "orpo": PreferenceLoss(orpo_loss, "means", compares_examples=True),
        "simpo": PreferenceLoss(simpo_loss, "means"),
        "cpo": PreferenceLoss(cpo_loss, "log_probs", compares_examples=True),
        "kto": PreferenceLoss(kto_loss, "ratios", has_reference=True, compares_examples=True),
    },
)


def completion_sums(
    model: nn.Module, head: Head | None, inputs: Inputs, layout: Layout = ()
) -> tuple[mx.array, mx.array]:
    """Return log-probability and number of the targets of each completion, [P, 2] each.

    ``inputs`` are the arrays of a batch of preferences (data/preferences.py).
    """
    loss, _ = target_loss(model, head, inputs, layout)

    # sums in a fixed order, which a scatter on a GPU does not have
    owned = inputs["owners"][None] == mx.arange(2 * len(inputs["labels"]))[:, None]
    sums = mx.where(owned, -loss[None], 0).sum(axis=1)
    return sums.reshape(-1, 2), owned.sum(axis=1).astype(mx.float32).reshape(-1, 2)


class PreferenceObjective(ScoredObjective):
    """A loss of preferences on batches of completions; ``train.task`` names it.

    ``reference`` has the log-probabilities that the loss compares with, if it does; ``score``
    scores batches, which an objective that only trains does not need.
    """

    unit = "tokens"

    def __init__(
        self,
        model: nn.Module,
        head: Head | None,
        train: TrainConfig,
        reference: Reference | None = None,
        score: Callable[..., Score] | None = None,
    ) -> None:
        self.model = model
        self.head = head
        self.train = train
        self._score = score
        self.preference = LOSSES[train.task]
        self.compares_examples = self.preference.compares_examples
        self.reference = None
        if self.preference.has_reference:
            self.reference = reference

        def outcome(inputs: Inputs, layout: Layout) -> tuple[mx.array, ...]:
            """Sum of the losses, rewards, log-probabilities and numbers of targets."""
            completions = self._completions(inputs, layout)
            rewards = self.preference.rewards(completions, train)
            loss, _ = self._sum(completions)
            return loss, rewards, completions.log_probs, completions.targets

        self.outcome = compiled(model, outcome)

    def begin(self, fresh: bool) -> None:
        if self.reference is not None:
            self.reference.begin(fresh)

    def prepare(self, batch: Batch) -> Batch:
        if self.reference is None:
            return batch
        return batch.having(reference=self.reference.of(batch))

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        """Return the sum of the losses of the rows, and how many rows there are.

        A loss that compares rows compares the rows of all ranks.
        """
        completions = self._completions(inputs, layout)
        if not self.compares_examples:
            return self._sum(completions)

        ranks = group()
        of_all = {name: ranks.joined(values) for name, values in vars(completions).items()}
        total, count = self._sum(Completions(**of_all))
        return ranks.counted_once(total), ranks.counted_once(count)

    def _completions(self, inputs: Inputs, layout: Layout) -> Completions:
        log_probs, targets = completion_sums(self.model, self.head, inputs, layout)
        reference = inputs.get("reference")
        if reference is None:
            reference = mx.zeros_like(log_probs)
        return Completions(log_probs, targets, reference, inputs["labels"])

    def _sum(self, completions: Completions) -> tuple[mx.array, mx.array]:
        is_row = completions.is_row
        losses = self.preference.losses(completions, self.train)
        return mx.where(is_row > 0, losses, 0).sum(), is_row.sum()
