"""Packed examples after a common prefix have the loss and gradients of each alone."""

import numpy as np
import pytest

from mlx_packs.adapters.lora import Attached
from mlx_packs.data.batches import PackedCollate
from mlx_packs.data.dataset import Batch
from mlx_packs.data.packed_trees import PackedTreeCollate
from mlx_packs.data.packing import Packed, aligned_batches, first_fit
from mlx_packs.nn.blocks import attends_in_groups
from mlx_packs.nn.prefix import PrefixKeys, Window
from mlx_packs.objectives.causal_lm import CausalLM, Head
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.objectives.shared_prefix import why_not_shared
from mlx_packs.ops.span_attention import tree_attention
from mlx_packs.runtime import mx
from tests.helpers.models import base_of
from tests.helpers.steps import adapted, assert_same, loss_and_gradients, make_batch
from tests.helpers.trees import PREFIX, adapted_family, examples_with_prefixes
from tests.helpers.variants import slow_except
from tests.training.test_update_prefix import check_update

ROWS = examples_with_prefixes((5, 11, 7, 4, 11, 6), groups=1)
LIMIT = 47
WINDOWED = {
    "sliding_window": 10,  # hides a part of the prefix, and of the longest suffixes
    "layer_types": ["full_attention", "sliding_attention"],
}
MODELS = {"qwen3": ("qwen3", {}), "windowed": ("llama", WINDOWED)}
COLLATE = PackedTreeCollate(PackedCollate(3, LIMIT), PREFIX, once=True)


def packed_tree(aligned: bool = False) -> Batch:
    inputs = np.array([len(e.tokens) - 1 for e in ROWS])
    order = Packed(first_fit(inputs, np.arange(len(ROWS)), LIMIT))
    if aligned:
        (order,) = aligned_batches(inputs, 3, LIMIT, np.random.default_rng(0))
    return COLLATE(ROWS, order)


def model_of(name: str, policy: str = "none") -> tuple[Attached, Head | None]:
    family, changes = MODELS[name]
    return adapted(base_of(family, **changes), recompute=policy)


@pytest.mark.parametrize(
    ("name", "policy", "aligned"),
    [
        ("qwen3", "none", False),
        ("windowed", "block", True),
        *slow_except(  # other policies of the same passes
            [("qwen3", "selective", True), ("qwen3", "block", False), ("windowed", "none", True)]
        ),
    ],
)
def test_packed_trees_have_the_loss_and_gradients_of_rows_alone(name, policy, aligned):
    attached, head = model_of(name, policy)
    alone = [make_batch(ROWS, [i], 1, LIMIT) for i in range(len(ROWS))]
    loss, gradients = loss_and_gradients(attached.model, head, [packed_tree(aligned)])
    expected, expected_gradients = loss_and_gradients(attached.model, head, alone)
    assert abs(loss / expected - 1) < 1e-6
    assert_same(gradients, expected_gradients)
    assert why_not_shared(attached.model, head, 128, packed=True) is None


@pytest.mark.parametrize("name", MODELS)
def test_pieces_of_a_packed_tree_compute_its_prefix_once(name):
    attached, head = model_of(name, "block")
    objective = CausalLM(attached.model, head)
    alone = [make_batch(ROWS, [i], 1, LIMIT) for i in range(len(ROWS))]
    check_update(attached.model, objective, alone, COLLATE.split(packed_tree(), 3))


def test_a_packed_tree_is_scored_as_its_rows():
    attached, head = model_of("qwen3")
    attached.model.eval()
    tree, rows = packed_tree(), make_batch(ROWS, range(len(ROWS)), len(ROWS), LIMIT)
    objective = CausalLM(attached.model, head)
    loss, expected = (objective.loss(arrays_of(b), b.layout)[0].item() for b in (tree, rows))
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gemma3_text", "span by span"), ("gpt2", "span by span"), ("qwen3_next", "no recurrent")],
)
def test_attention_that_is_not_ours_computes_no_packed_trees(family, reason):
    attached, head = adapted_family(family)
    assert not attends_in_groups(attached.model)
    assert reason in why_not_shared(attached.model, head, 128, packed=True)


def test_the_probe_finds_segments_that_see_each_other(monkeypatch):
    """As if all of them were one."""

    def joined(*args):
        *arrays, levels, followed = args
        return tree_attention(*arrays, (*levels[:-1], (sum(levels[-1]),)), followed)

    monkeypatch.setattr("mlx_packs.nn.blocks.tree_attention", joined)
    attached, head = model_of("qwen3")
    assert "its loss is off" in why_not_shared(attached.model, head, 128, packed=True)


def test_a_cache_of_packed_rows_has_the_window_as_its_mask():
    cache = PrefixKeys().after(6, 1, is_last=True).of_levels(((3, 2),))
    assert cache.make_mask(5) == Window(None) and cache.make_mask(5, window_size=4) == Window(4)
    with pytest.raises(ValueError, match="span by span"):
        cache.update_and_fetch(mx.zeros((1, 1, 5, 4)), mx.zeros((1, 1, 5, 4)))
