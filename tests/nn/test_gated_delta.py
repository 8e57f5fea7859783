"""Gated delta layers in training: by chunks, as mlx-lm outside, and only while they are attached."""

import sys

import pytest

from mlx_packs.adapters.attach import attach
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.nn import surgery as layers
from mlx_packs.nn.surgery import recurrent_layer
from mlx_packs.ops import dispatch
from mlx_packs.runtime import mx
from tests.helpers.families import build, family_base
from tests.helpers.family_sweep import sweep

# families with one decay for each head, and with one for each column
FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"]
FEW = mx.array([[(5 * i + 3) % 127 for i in range(30)]])
TOKENS = mx.array([[(7 * i + 2) % 127 for i in range(90)]])


def count_calls(monkeypatch) -> list[tuple]:
    calls = []

    def counted(*args):
        calls.append(args[0].shape)
        return computed(*args)

    computed = layers.gated_delta
    monkeypatch.setattr(layers, "gated_delta", counted)
    return calls


@pytest.mark.parametrize("family", sweep(FAMILIES))
def test_training_computes_by_chunks_what_mlx_lm_does(family, monkeypatch):
    base = family_base(family)
    module = "qwen3_5" if "qwen3_5" in family else family
    home = sys.modules[f"mlx_lm.models.{module}"]
    theirs = home.gated_delta_update

    before = base.model(FEW)
    base.model.train()
    expected = base.model(TOKENS)
    base.model.eval()

    calls = count_calls(monkeypatch)
    attached = attach(base, LoRAConfig(rank=2))
    assert mx.array_equal(base.model(FEW), before).item() and not calls
    base.model.train()
    assert mx.allclose(base.model(TOKENS), expected, rtol=1e-4, atol=1e-4).item()
    assert len(calls) == 1 and calls[0][1] == TOKENS.shape[1]

    attached.detach()
    base.model.train()
    assert mx.array_equal(base.model(TOKENS), expected).item() and len(calls) == 1
    assert home.gated_delta_update is theirs


def test_long_rows_are_evaluated_by_chunks_but_on_metal(monkeypatch):
    base = family_base("qwen3_5")
    expected = base.model(TOKENS)
    calls = count_calls(monkeypatch)
    attached = attach(base, LoRAConfig(rank=2))
    assert mx.allclose(base.model(TOKENS), expected, rtol=1e-4, atol=1e-4).item() and calls
    monkeypatch.setattr(dispatch, "detect", lambda: "metal")
    calls.clear()
    assert mx.array_equal(base.model(TOKENS), expected).item() and not calls
    attached.detach()


def test_a_layer_that_fails_leaves_mlx_lm_as_it_was(monkeypatch):
    model, _ = build("qwen3_next")
    found = [m for m in model.modules() if recurrent_layer(m) is not None]
    home = sys.modules[type(found[0]).__module__]
    theirs = home.gated_delta_update
    layer = recurrent_layer(found[0])
    layer.train()
    with pytest.raises(ValueError):
        layer(mx.zeros((1, 4, 3)))
    assert home.gated_delta_update is theirs
