"""Numbers that are read at the last tokens of texts, their losses, and the examples they are of."""

from functools import partial

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.adapters.full_tensors import fresh_score_head
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.dataset import Dataset
from mlx_packs.data.encoding import EncodingOptions, Example, Examples
from mlx_packs.data.formats import TEXT, Row
from mlx_packs.data.labelled import encode_labelled
from mlx_packs.data.labels import MULTI, ORDINAL, REGRESSION, SINGLE, Classes
from mlx_packs.data.preferences import encode_scored
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.shapes import MOST_SHAPES
from mlx_packs.data.texts import TextCollate, TextGroups, doubling_widths, joined_widths
from mlx_packs.data.token_store import JoinedExamples
from mlx_packs.evaluation.preferences import score_pairs
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.objectives.reader import (
    hidden_states,
    label_reader,
    scale_logits,
    score_reader,
)
from mlx_packs.objectives.text_loss import TextLoss, label_losses, reward_losses
from mlx_packs.runtime import mx
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.preferences import preference
from tests.helpers.rows import labelled

CLASSES = Classes(SINGLE, ("blue", "green", "red"))
WEIGHTS = np.array([0.5, 1.0, 2.0])


@pytest.fixture(scope="module")
def base():
    return small_base()


def labels_of(base, classes=CLASSES, count=5, limit=64) -> TextGroups:
    rows = [Row(f"f:{i + 1}", labelled(i)) for i in range(count)]
    options = EncodingOptions(max_seq_length=limit)
    return encode_labelled(rows, base.tokenizer, DataConfig(), options, classes)


def pairs_of(base, values=None, limit=96) -> TextGroups:
    values = values or [preference(i) for i in range(5)]
    rows = [Row(f"f:{i + 1}", value) for i, value in enumerate(values)]
    options = EncodingOptions(max_seq_length=limit)
    return encode_scored(rows, base.tokenizer, DataConfig(), options)


def classifier(base) -> TextLoss:
    head = fresh_score_head(base, 0, 3)
    losses = partial(label_losses, problem=SINGLE)
    return TextLoss(label_reader(base, head, SINGLE), losses, class_weights=WEIGHTS)


def rewarder(base) -> TextLoss:
    reader = score_reader(base, fresh_score_head(base, 0), "reward")
    return TextLoss(reader, partial(reward_losses, centering=0.1), score=score_pairs)


@pytest.mark.parametrize("make", [(labels_of, classifier), (pairs_of, rewarder)])
def test_pieces_and_missing_examples_have_the_loss_of_each_text_alone(base, make):
    """Batches of five in eight places, whole and in three pieces."""
    texts, objective = make[0](base), make[1](base)
    collate = TextCollate(8, 95, counts_tokens=True)
    whole = collate(texts, np.arange(5))
    pieces = collate.split(whole, 3)
    tokens = int(texts.text_lengths.sum())
    assert whole.targets == sum(piece.targets for piece in pieces) == tokens == whole.computed

    rows = [tokens for i in range(5) for tokens in texts.tokens(i)]
    numbers = mx.array(objective.reader.of_rows(rows, 1)).reshape(5, -1)
    losses = np.array(objective._losses(numbers, mx.array(texts.labels)))
    weights = WEIGHTS[texts.labels] if texts.labels.ndim == 1 else np.ones(5)

    for batches in ([whole], pieces):
        sums = np.array([[x.item() for x in objective.loss(arrays_of(b))] for b in batches])
        expected = [(weights * losses).sum(), weights.sum()]
        np.testing.assert_allclose(sums.sum(axis=0), expected, rtol=1e-4)

    read, of_each, labels = objective.outputs(whole)
    np.testing.assert_allclose(read, numbers, atol=1e-4)
    np.testing.assert_allclose(of_each, losses, atol=1e-4)
    assert np.array_equal(labels, texts.labels)


def test_compiled_batches_of_texts_have_few_widths(monkeypatch):
    monkeypatch.setattr(runtime, "COMPILES", True)
    lengths = np.random.default_rng(0).integers(4, 300, 400)
    items = [Example(np.ones(n, np.int32), np.arange(n) > 0, "x") for n in lengths]
    examples = Examples(items, "text", "all")
    rows = JoinedExamples([examples])
    texts = TextGroups.of_examples(TEXT, examples, rows, np.zeros((200, 2), np.float32))
    sampler = Sampler(texts.lengths, 8, 320)
    collate = TextCollate(8, 320, joined_widths(texts, sampler))
    data = Dataset(texts, collate, sampler)
    widths = {
        batch.inputs["tokens"].shape[-1]
        for _, batch in zip(range(75), data.batches(), strict=False)
    }
    assert widths <= set(collate.widths) and len(collate.widths) <= MOST_SHAPES
    assert {width for width, _ in data.shapes(75)} == widths
    assert doubling_widths(100) == (32, 64, 100)


def test_losses_are_those_of_their_formulas():
    logits = mx.array([[1.0, -2.0], [0.5, 3.0]])
    likely = np.exp(np.array(logits)) / np.exp(np.array(logits)).sum(axis=1, keepdims=True)
    one = label_losses(logits, mx.array([0, 1]), SINGLE)
    np.testing.assert_allclose(one, -np.log(likely[[0, 1], [0, 1]]), rtol=1e-5)

    each = 1 / (1 + np.exp(-np.array(logits)))
    several = label_losses(logits, mx.array([[True, False], [False, False]]), MULTI)
    expected = -np.log([[each[0, 0], 1 - each[0, 1]], [1 - each[1, 0], 1 - each[1, 1]]]).mean(
        axis=1
    )
    np.testing.assert_allclose(several, expected, rtol=1e-5)

    score = label_losses(logits[:, :1], mx.array([3.0, 0.0]), REGRESSION)
    np.testing.assert_allclose(score, [4.0, 0.25])

    rewards = mx.array([[1.0, -1.0], [0.5, 0.5], [-2.0, 1.0]])
    margins, sums = np.array([2.0, 0.0, -3.0]), np.array([0.0, 1.0, -1.0])
    plain = np.log1p(np.exp(-margins))
    np.testing.assert_allclose(reward_losses(rewards, None), plain, rtol=1e-5)
    np.testing.assert_allclose(reward_losses(rewards, None, 0.5), plain + 0.5 * sums**2, rtol=1e-5)


def test_a_scale_has_the_probabilities_and_the_loss_of_corn():
    steps = np.array([[2.0, -1.0, 0.5], [-3.0, 4.0, 1.0]], np.float32)
    goes_on = 1 / (1 + np.exp(-steps))
    above = np.cumprod(goes_on, axis=1)
    expected = -np.diff(np.pad(above, [(0, 0), (1, 1)], constant_values=((0, 0), (1, 0))), axis=1)
    logits = scale_logits(mx.array(steps))
    np.testing.assert_allclose(np.exp(np.array(logits)), expected, rtol=1e-5)

    # CORN: the binary cross-entropy of each step that the label reaches
    losses = label_losses(logits, mx.array([1, 3]), ORDINAL)
    reached = [
        -np.log(goes_on[0, 0]) - np.log(1 - goes_on[0, 1]),
        -np.log(goes_on[1]).sum(),
    ]
    np.testing.assert_allclose(losses, reached, rtol=1e-5)
    assert np.isfinite(np.array(scale_logits(mx.array([[100.0, -100.0]])))).all()


def test_texts_are_cut_and_chats_are_dropped(base):
    cut = labels_of(base, limit=6)
    assert cut.cut == 5 and set(cut.lengths.tolist()) == {5}
    assert cut.tokens(0)[0].tolist() == base.tokenizer.encode(labelled(0)["text"])[:5]

    chat = Classes(SINGLE, CLASSES.labels, chat=True)
    lengths = labels_of(base, chat).lengths
    kept = labels_of(base, chat, limit=int(lengths.max()))
    assert 0 < kept.dropped == (lengths == lengths.max()).sum() < 5
    with raises("data", "max_seq_length", "f:1"):
        labels_of(base, chat, limit=4)


def test_pairs_that_do_not_fit_are_dropped_and_not_cut(base):
    values = [preference(0), preference(1)]
    values[1]["rejected"] += " and on" * 40
    pairs = pairs_of(base, values, limit=48)
    assert (len(pairs), pairs.dropped, pairs.cut) == (1, 1, 0)
    with raises("data", "max_seq_length", "f:1"):
        pairs_of(base, values[1:], limit=48)


def test_the_head_is_that_of_the_seed_and_of_the_deviation_of_the_config():
    base = small_base(hidden_size=256, initializer_range=0.05)
    weight = fresh_score_head(base, 0).weight
    assert weight.shape == (1, 256) and weight.std().item() == pytest.approx(0.05, rel=0.2)
    assert mx.array_equal(weight, fresh_score_head(base, 0).weight)
    assert not mx.array_equal(weight, fresh_score_head(base, 1).weight)


def test_a_model_that_changes_its_logits_is_rejected(monkeypatch):
    base = small_base()
    monkeypatch.setattr(type(base.model), "__call__", lambda self, x, **_: 2 * self.model(x))
    with raises("unsupported", "task", "small"):
        hidden_states(base.model, "small", "reward")
