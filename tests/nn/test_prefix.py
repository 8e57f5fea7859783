"""A common beginning that is computed once gives the loss and gradients of ordinary rows."""

import numpy as np
import pytest

from mlx_packs.runtime import mx
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.steps import adapted, loss_and_gradients
from tests.helpers.trees import examples_with_prefixes, ordinary_batch, tree_of

LENGTHS = (5, 11, 7)  # of what follows the prefix


def check_equal(model, head, batch, groups, worst=2e-5, median=1e-6):
    """The loss within 1e-6; of gradients the worst and the median, of each tensor's largest entry."""
    loss, gradients = loss_and_gradients(model, head, [tree_of(batch, groups)])
    expected_loss, expected = loss_and_gradients(model, head, [batch])
    assert abs(loss / expected_loss - 1) < 1e-6
    assert set(gradients) == set(expected)

    differences = []
    for name, tensor in expected.items():
        largest = mx.abs(tensor).max().item()
        assert largest > 0, name
        differences.append(mx.abs(gradients[name] - tensor).max().item() / largest)
    print(max(differences), np.median(differences))
    assert max(differences) < worst and np.median(differences) < median


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradients_reach_the_prefix_through_recomputation(family, policy):
    """Keys and values are arguments and results of what is recomputed: none hides in a cache."""
    attached, head = adapted(base_of(family, **SMALL_FAMILIES[family]), recompute=policy)
    batch = ordinary_batch(examples_with_prefixes(LENGTHS, groups=2, whole=False))
    check_equal(attached.model, head, batch, 2)
