"""Logits of labels by a head, and losses by their formulas."""

from dataclasses import replace

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs.config.data import DataConfig
from mlx_packs.data.batches import PackedCollate, TokenCollate
from mlx_packs.data.encoding import EncodingOptions
from mlx_packs.data.formats import Row
from mlx_packs.data.labelled import encode_labelled
from mlx_packs.data.labelled_batches import LabelledCollate
from mlx_packs.data.labels import MULTI, ORDINAL, REGRESSION, SINGLE, Classes
from mlx_packs.data.packing import Packed
from mlx_packs.objectives.classification import ScoreHead, label_losses, scale_logits
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.objectives.reader import head_reader
from mlx_packs.runtime import mx
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.labelled import labelled

NAMES = DataConfig()
LABELS = ("blue", "green", "red")


def examples_of(base, classes: Classes, count: int = 5, limit: int = 64):
    rows = [Row(f"f:{i + 1}", labelled(i)) for i in range(count)]
    options = EncodingOptions(max_seq_length=limit)
    return encode_labelled(rows, base.tokenizer, NAMES, options, classes)


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


def test_a_scale_has_the_probabilities_and_the_loss_of_corn():
    steps = np.array([[2.0, -1.0, 0.5], [-3.0, 4.0, 1.0]], np.float32)
    goes_on = 1 / (1 + np.exp(-steps))
    above = np.cumprod(goes_on, axis=1)
    expected = -np.diff(np.pad(above, [(0, 0), (1, 1)], constant_values=((0, 0), (1, 0))), axis=1)
    logits = scale_logits(mx.array(steps))
    np.testing.assert_allclose(np.exp(np.array(logits)), expected, rtol=1e-5)
    np.testing.assert_allclose(expected.sum(axis=1), 1, rtol=1e-6)

    # CORN: the binary cross-entropy of each step that the label reaches
    losses = label_losses(logits, mx.array([1, 3]), ORDINAL)
    reached = [
        -np.log(goes_on[0, 0]) - np.log(1 - goes_on[0, 1]),
        -np.log(goes_on[1]).sum(),
    ]
    np.testing.assert_allclose(losses, reached, rtol=1e-5)

    far = scale_logits(mx.array([[100.0, -100.0]]))
    assert np.isfinite(np.array(far)).all()


def test_packed_pieces_and_padding_have_the_loss_of_the_rows():
    """A packed batch, the pieces of one, and one with missing rows: the same sums."""
    base = small_base()
    classes = Classes(SINGLE, LABELS)
    examples = examples_of(base, classes)
    head = nn.Linear(64, 3, bias=False)
    weights = np.array([0.5, 1.0, 2.0])
    objective = ScoreHead(head_reader(base.model, head, "small", "classify"), SINGLE, weights)

    rows = LabelledCollate(TokenCollate(8, 63), is_scored=True, per_row=1)
    whole = rows(examples, np.arange(5))
    packed = replace(rows, tokens=PackedCollate(2, 63))
    packed = packed(examples, Packed([np.arange(3), np.arange(3, 5)]))
    sums = []
    for pieces in ([whole], rows.split(whole, 3), [packed]):
        losses = [objective.loss(arrays_of(piece), piece.layout) for piece in pieces]
        sums.append([sum(part.item() for part in parts) for parts in zip(*losses, strict=True)])

    logits = objective.outputs(whole)
    totals = np.logaddexp.reduce(logits, axis=1)
    of_each = weights[examples.labels]
    expected = (of_each * (totals - logits[np.arange(5), examples.labels])).sum()
    for total, count in sums:
        assert total == pytest.approx(expected, rel=1e-4) and count == pytest.approx(of_each.sum())


def test_texts_are_cut_and_chats_are_dropped():
    base = small_base()
    text = Classes(SINGLE, LABELS)
    cut = examples_of(base, text, limit=6)
    assert cut.cut == 5 and set(cut.lengths.tolist()) == {6}
    tokens = base.tokenizer.encode(labelled(0)["text"])
    assert cut[0].tokens[:-1].tolist() == tokens[:5]

    chat = Classes(SINGLE, LABELS, chat=True)
    lengths = examples_of(base, chat).lengths
    kept = examples_of(base, chat, limit=int(lengths.max()) - 1)
    assert 0 < kept.dropped == (lengths == lengths.max()).sum() < 5
    with raises("data", "max_seq_length", "f:1"):
        examples_of(base, chat, limit=4)
