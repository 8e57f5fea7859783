"""Adapters of a projection group: with a shared input, as on a GPU, they learn the same."""

from dataclasses import replace

import pytest

from mlx_packs.cpu.profile import CPU
from mlx_packs.nn import lora
from mlx_packs.ops.profile import forced_profile
from tests.helpers.packing import LIMIT, ROWS, attached_model
from tests.helpers.steps import assert_same, loss_and_gradients, make_batch

SAVES_PASSES = replace(CPU, saves_passes=True)


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_shared_input_changes_no_gradient(family, policy, monkeypatch):
    attached, head = attached_model(family, policy == "block")
    if policy == "selective":
        attached.recompute(policy)
    batches = [make_batch(ROWS, range(len(ROWS)), len(ROWS), LIMIT)]
    loss, gradients = loss_and_gradients(attached.model, head, batches)
    calls = []
    shared = lora.shared_input
    monkeypatch.setattr(lora, "shared_input", lambda *a: calls.append(a) or shared(*a))
    with forced_profile(SAVES_PASSES):
        same_loss, same = loss_and_gradients(attached.model, head, batches)
    assert len(calls) >= 4 * len(attached.model.layers)
    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert_same(same, gradients)


def test_dropped_input_is_not_shared(monkeypatch):
    attached, head = attached_model("qwen3")
    for place in attached.places.values():
        place.lora.dropout.p = 0.5
    monkeypatch.setattr(lora, "shared_input", None)
    with forced_profile(SAVES_PASSES):
        loss, _ = loss_and_gradients(attached.model, head, [make_batch(ROWS, [0, 1], 2, LIMIT)])
    assert loss > 0
