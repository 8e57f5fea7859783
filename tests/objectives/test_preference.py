"""Losses of preferences by their definitions, and the objective over batches of them."""

from pathlib import Path

import numpy as np
import pytest

from mlx_packs.adapters.trainable import find_method
from mlx_packs.config.choices import PREFERENCE_TASKS
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from mlx_packs.data.encoding import EncodingOptions
from mlx_packs.data.formats import PREFERENCE, Row
from mlx_packs.data.preferences import RATED, encode_preferences, preference_set
from mlx_packs.data.sampler import GroupedSampler
from mlx_packs.evaluation.preferences import score_preferences
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.objectives.preference import (
    LOSSES,
    Completions,
    PreferenceObjective,
    completion_sums,
)
from mlx_packs.objectives.reference import PhaseReference, Reference
from mlx_packs.runtime import mx
from tests.helpers.bases import small_base
from tests.helpers.preferences import preference, rated
from tests.helpers.steps import moved

LOG_PROBS = np.array([[-4.0, -6.0], [-9.0, -2.0], [-5.0, -5.5]])
TARGETS = np.array([[4.0, 3.0], [6.0, 2.0], [5.0, 5.0]])
REFERENCE = np.array([[-5.0, -5.0], [-8.0, -3.0], [-5.5, -5.0]])
LABELS = np.array([1.0, 0.0, 1.0])


def completions(**changes) -> Completions:
    values = {
        "log_probs": LOG_PROBS,
        "targets": TARGETS,
        "reference": REFERENCE,
        "labels": LABELS,
    } | changes
    return Completions(**{name: mx.array(value, mx.float32) for name, value in values.items()})


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected(task: str, loss: str, smoothing: float) -> np.ndarray:
    """The losses as the papers define them, with beta 0.5, gamma 0.7 and alpha 1."""
    ratios, means = LOG_PROBS - REFERENCE, LOG_PROBS / TARGETS
    nll = -LOG_PROBS[:, 0].sum() / TARGETS[:, 0].sum()

    if task == "orpo":
        odds = np.exp(means) / (1 - np.exp(means))
        return nll - 0.5 * np.log(sigmoid(np.log(odds[:, 0] / odds[:, 1])))
    if task == "simpo":
        return -np.log(sigmoid(0.5 * (means[:, 0] - means[:, 1]) - 0.7))
    if task == "kto":
        gain = 0.5 * (ratios[:, 0] - max(0, ratios[:, 1].mean()))
        return np.where(LABELS > 0, 1.5 * (1 - sigmoid(gain)), 0.5 * (1 - sigmoid(-gain)))

    values = ratios if task == "dpo" else LOG_PROBS
    extra = 0 if task == "dpo" else nll
    if loss == "ipo":
        values = values / TARGETS
        return (values[:, 0] - values[:, 1] - 1 / (2 * 0.5)) ** 2 + extra

    margin = 0.5 * (values[:, 0] - values[:, 1])
    if loss == "hinge":
        return np.maximum(0, 1 - margin) + extra

    right, wrong = -np.log(sigmoid(margin)), -np.log(sigmoid(-margin))
    if loss == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing) + extra
    return (1 - smoothing) * right + smoothing * wrong + extra


@pytest.mark.parametrize(
    ("task", "loss", "smoothing"),
    [
        *((task, "auto", 0.0) for task in PREFERENCE_TASKS),
        *((task, loss, 0.0) for task in ("dpo", "cpo") for loss in ("hinge", "ipo")),
        *((task, "sigmoid", 0.2) for task in ("dpo", "cpo")),
        ("dpo", "robust", 0.2),
    ],
)
def test_a_loss_is_that_of_its_paper(task, loss, smoothing):
    own = {"simpo_gamma": 0.7} if task == "simpo" else {}
    if task == "kto":
        own = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    train = TrainConfig(task=task, loss=loss, beta=0.5, label_smoothing=smoothing, **own)
    losses = LOSSES[task].losses(completions(), train)
    np.testing.assert_allclose(np.array(losses), expected(task, loss, smoothing), rtol=1e-5)


@pytest.mark.parametrize("task", PREFERENCE_TASKS)
def test_padding_changes_no_loss(task):
    objective = PreferenceObjective(small_base().model, None, TrainConfig(task=task))
    rows = {"log_probs": LOG_PROBS, "targets": TARGETS, "reference": REFERENCE}
    padded = {name: np.pad(values, ((0, 2), (0, 0))) for name, values in rows.items()}
    total, count = objective._sum(completions(**padded, labels=np.pad(LABELS, (0, 2))))
    assert count.item() == 3
    assert total.item() == pytest.approx(objective._sum(completions())[0].item(), rel=1e-6)

    def of(log_probs):
        return objective._sum(completions(log_probs=log_probs))[0]

    assert mx.isfinite(mx.grad(of)(mx.array(LOG_PROBS, mx.float32))).all().item()


def test_odds_of_a_certain_completion_are_finite():
    train = TrainConfig(task="orpo")
    certain = completions(log_probs=np.array([[0.0, -3.0], [-1e-9, -3.0], [-3.0, 0.0]]))
    assert mx.isfinite(LOSSES["orpo"].losses(certain, train)).all().item()


class Small:
    """A base with adapters that have moved, and an objective over eight rows."""

    def __init__(self, task: str) -> None:
        self.base = small_base()
        train = TrainConfig(task=task, batch_size=4, max_seq_length=96)
        lora = LoRAConfig(rank=2, target_modules=("q_proj", "down_proj"))
        self.trainable = find_method("lora").attach(self.base, lora, train, "dense")
        head = split_head(self.base.model)

        rows = [Row(f"f:{i + 1}", (rated if task == "kto" else preference)(i)) for i in range(8)]
        row_format, options = RATED if task == "kto" else PREFERENCE, EncodingOptions()
        tokenizer = self.base.tokenizer
        examples = encode_preferences(rows, tokenizer, DataConfig(), options, row_format)
        sampler = GroupedSampler(examples.lengths, 8, 95, 1)
        self.data = preference_set(examples, sampler)

        self.passes = 0

        def sums(inputs, layout):
            self.passes += 1
            return completion_sums(self.base.model, head, inputs, layout)[0]

        start = PhaseReference(self.trainable, Path("unused"), bare=True)
        reference = Reference(self.base.model, start, sums, self.data)
        reference.begin(fresh=True)
        self.objective = PreferenceObjective(
            self.base.model, head, train, reference, score_preferences
        )
        moved(self.trainable, 0.2)

    def batch(self, number: int):
        return next(self.data.batches(number))

    def reference_of(self, batch) -> np.ndarray:
        return np.array(self.objective.prepare(batch).inputs["reference"])

    def loss(self, batch) -> tuple[float, float]:
        prepared = self.objective.prepare(batch)
        total, rows = self.objective.loss(arrays_of(prepared), prepared.layout)
        return total.item(), rows.item()


def test_pieces_add_up_to_their_batch():
    small = Small("dpo")
    batch = small.objective.prepare(small.batch(0))
    pieces = small.data.collate.split(batch, 2)
    losses = [small.loss(piece) for piece in pieces]
    assert [count for _, count in losses] == [2, 2]
    assert sum(value for value, _ in losses) == pytest.approx(small.loss(batch)[0], rel=1e-5)
    assert not small.objective.compares_examples and Small("kto").objective.compares_examples


def test_the_reference_is_the_base_and_is_computed_once():
    small = Small("dpo")
    trained = {name: np.array(t) for name, t in small.trainable.tensors().items()}
    batches = [small.batch(number) for number in range(2)]
    small.base.model.train()
    values = [small.reference_of(batch) for batch in batches]
    passes = small.passes
    assert small.base.model.training
    for name, tensor in small.trainable.tensors().items():
        assert np.array_equal(np.array(tensor), trained[name])

    order = np.array([2, 3, 14, 15, 0, 1, 8, 9])
    mixed = small.data.collate(small.data.examples, order)  # as a later epoch has them
    again = small.reference_of(mixed)
    assert small.passes == passes
    rows = [row for batch in batches for row in batch.examples[::2]]
    by_row = dict(zip(rows, np.concatenate(values), strict=True))
    assert all(np.array_equal(again[i], by_row[row]) for i, row in enumerate(mixed.examples[::2]))
    with small.trainable.disabled():
        sums = small.objective.outcome(arrays_of(batches[0]), ())[2]
    np.testing.assert_allclose(np.array(sums), values[0], rtol=1e-5)
