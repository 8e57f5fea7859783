"""The divergence from a teacher: by slices and from all logits, and what merged tokens cost."""

from dataclasses import replace

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs.nn.quantized import apply_matmul_path
from mlx_packs.objectives.distillation import Distillation, target_losses
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.ops import linear_cross_entropy as op
from mlx_packs.runtime import mx
from mlx_packs.tasks.teacher import most_likely
from tests.helpers.models import base_of
from tests.helpers.steps import adapted, examples_of, make_batch

LOSSES = ("forward-kl", "reverse-kl", "jsd")
VOCABULARY = 128


def batch_with(teacher_logits: mx.array, top_k: int) -> dict:
    """The arrays of a batch of two examples, with a teacher's most likely tokens."""
    batch = make_batch(examples_of((9, 13)), (0, 1), 2, 16)
    slots = len(batch.inputs["targets"])
    top = most_likely(teacher_logits[:slots], top_k)
    return arrays_of(batch.having(**{f"teacher_{name}": value for name, value in top.items()}))


@pytest.fixture(scope="module")
def student():
    mx.random.seed(5)
    base = base_of("llama")
    apply_matmul_path(base.model, "dense")
    attached, head = adapted(base)
    return attached.model, head


@pytest.fixture(scope="module")
def teacher():
    return 3 * mx.random.normal((64, VOCABULARY), key=mx.random.key(1))


@pytest.mark.parametrize("loss", LOSSES)
def test_slices_give_what_all_logits_give(student, teacher, monkeypatch, loss):
    """Values and gradients of the adapters, rows of the head gathered for 3 targets at a time."""
    model, head = student
    monkeypatch.setattr(op, "GATHERED_BYTES", 3 * 4 * 17 * 64)
    inputs = batch_with(teacher, 16)
    distillation = Distillation(loss, 0.3, 0.25)
    is_target = inputs["owners"] >= 0

    def total(parameters, head):
        model.update(parameters)
        losses = target_losses(model, head, inputs, (), distillation)
        return (distillation.mixed(losses) * is_target).sum()

    trainable = model.trainable_parameters()
    whole = replace(head, frozen=None)
    value, gradients = mx.value_and_grad(total)(trainable, head)
    expected, wanted = mx.value_and_grad(total)(trainable, whole)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    pairs = zip(tree_flatten(gradients), tree_flatten(wanted), strict=True)
    assert all(mx.allclose(a, b, rtol=1e-3, atol=1e-6).item() for (_, a), (_, b) in pairs)


def test_divergences_are_those_of_two_distributions():
    p = np.array([0.7, 0.2, 0.1])
    q = np.array([0.2, 0.5, 0.3])
    m = 0.3 * p + 0.7 * q

    def kl(a, b):
        return float((a * np.log(a / b)).sum())

    expected = {
        "forward-kl": kl(p, q),
        "reverse-kl": kl(q, p),
        "jsd": 0.3 * kl(p, m) + 0.7 * kl(q, m),
    }
    logs = [mx.log(mx.array(each))[None] for each in (q, p)]
    for loss, value in expected.items():
        assert Distillation(loss, 0.3).divergence(*logs).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_merged_tokens_never_raise_a_divergence(student, teacher, loss):
    """It rises with the tokens that are known, up to that of the vocabulary."""
    model, head = student
    distillation = Distillation(loss)
    values = []
    for top_k in (1, 4, 16, 64, VOCABULARY):
        losses = target_losses(model, head, batch_with(teacher, top_k), (), distillation, False)
        values.append(losses.divergence.sum().item())
    assert values == sorted(values) and values[0] > 0


def test_a_teacher_without_other_tokens_gives_finite_losses(student, teacher):
    model, head = student
    inputs = batch_with(teacher, 8) | {"teacher_rest": mx.full(64, -mx.inf)}
    inputs["teacher_rest"] = inputs["teacher_rest"][: len(inputs["targets"])]
    for loss in LOSSES:
        losses = target_losses(model, head, inputs, (), Distillation(loss), False)
        assert mx.isfinite(losses.divergence).all().item()
