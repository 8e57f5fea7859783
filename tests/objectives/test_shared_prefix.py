"""The probe that finds where trees differ from their rows."""

import pytest

from mlx_packs import LoRAConfig
from mlx_packs.adapters.attach import attach
from mlx_packs.nn.prefix import PrefixKeys
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.objectives.exactness import why_not_shared
from mlx_packs.runtime import mx
from tests.helpers.models import base_of
from tests.helpers.steps import adapted, fill_b
from tests.helpers.trees import (
    FALLS_BACK,
    FALLS_BACK_RECOMPUTED,
    adapted_family,
)


@pytest.mark.parametrize(
    "family, policy, part",
    [
        *((family, "none", part) for family, part in FALLS_BACK.items()),
        *((family, "block", part) for family, part in FALLS_BACK_RECOMPUTED.items()),
    ],
)
def test_a_family_whose_tree_differs_is_found(family, policy, part):
    attached, head = adapted_family(family, policy)
    reason = why_not_shared(attached.model, head, 128)
    assert part in reason and "\n" not in reason and len(reason) < 200


def test_the_probe_draws_nothing_and_leaves_the_model_as_it_was():
    base = base_of("qwen3")
    attached = attach(base, LoRAConfig(rank=2, dropout=0.5))
    fill_b(attached)
    model, head = attached.model, split_head(attached.model)
    model.train()
    assert why_not_shared(model, head, 128) is None
    shares = [m.dropout.p for m in model.modules() if hasattr(m, "dropout")]
    assert model.training and set(shares) == {0.5}
    assert all(module.training for module in model.modules())
    model.eval()
    assert why_not_shared(model, head, 128) is None
    assert not any(module.training for module in model.modules())


def test_the_probe_finds_gradients_that_do_not_reach_the_prefix(monkeypatch):
    """The loss is right then, as it would be with caches that hide keys from the gradient."""

    next_pass = PrefixKeys.next_pass

    def cut(self, *args, **kwargs):
        cache = next_pass(self, *args, **kwargs)
        return cache.following([mx.stop_gradient(array) for array in cache.earlier])

    attached, head = adapted_family("gemma3_text")
    monkeypatch.setattr(PrefixKeys, "next_pass", cut)
    assert why_not_shared(attached.model, head, 128).startswith("its gradient is off")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("qwen3", mx.float16, marks=pytest.mark.slow),
        pytest.param("qwen3", mx.bfloat16, marks=pytest.mark.slow),
        ("gpt2", mx.bfloat16),
    ],
)
def test_the_probe_allows_the_rounding_of_a_deep_model(family, dtype):
    depth = {"gpt2": "n_layer"}.get(family, "num_hidden_layers")
    base = base_of(family, **{depth: 36})
    base.model.set_dtype(dtype)
    attached, head = adapted(base)
    assert why_not_shared(attached.model, head, 128) is None
