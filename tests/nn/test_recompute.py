"""Activation checkpointing changes neither the loss nor the gradients of any family."""

import pytest

from mlx_packs.runtime import mx
from tests.helpers.family_sweep import FAMILIES, recomputed_sweep
from tests.helpers.steps import loss_and_gradients
from tests.helpers.trees import BATCH, adapted_family


@pytest.mark.parametrize("family, policy", recomputed_sweep(FAMILIES))
def test_a_recomputed_step_is_the_same(family, policy):
    results = []
    for each in ("none", policy):
        attached, head = adapted_family(family, each)
        loss, gradients = loss_and_gradients(attached.model, head, [BATCH])
        gradients = {name.replace(".block.", "."): g for name, g in gradients.items()}
        results.append((loss, gradients))
    (expected_loss, expected), (loss, gradients) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert set(gradients) == set(expected)
    for name, tensor in expected.items():
        largest = mx.abs(tensor).max().item()
        assert mx.abs(gradients[name] - tensor).max().item() <= 2e-5 * largest, name
