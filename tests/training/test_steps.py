"""Steps: every way of stepping agrees, every optimizer learns, memory stays as it was."""

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, runtime
from mlx_packs.adapters.attach import attach
from mlx_packs.data.encoding import Example
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.models import base_of
from tests.helpers.steps import (
    examples_of,
    largest_difference,
    lm_stepper,
    loss_sum,
    make_batch,
    update,
)


def small_examples() -> list[Example]:
    return examples_of((9, 17, 5, 30))


def weights_after(batches, accumulate: int) -> dict[str, mx.array]:
    return update(batches, accumulate)[0]


def test_accumulated_batches_equal_one_large_batch():
    rows = small_examples()
    large = weights_after([make_batch(rows, range(4), 4, 64)], 1)
    parts = [make_batch(rows, [i], 1, 64) for i in range(4)]
    assert largest_difference(large, weights_after(parts, 4)) < 1e-6


def test_recomputed_blocks_drop_the_same_inputs_twice():
    """The gradient of a recomputed block with dropout is that of its own loss."""
    base = base_of("qwen3", num_hidden_layers=1)
    attached = attach(base, LoRAConfig(rank=2, dropout=0.4))
    for place in attached.places.values():
        place.lora.lora_b[:] = [0.3 * mx.random.normal(b.shape) for b in place.lora.lora_b]
    attached.recompute("block")
    base.model.train()
    head = split_head(base.model)
    batch = make_batch(small_examples(), range(4), 4, 64)

    def loss(batch):
        mx.random.seed(5)
        return loss_sum(base.model, head, batch)

    _, grads = nn.value_and_grad(base.model, loss)(batch)
    flat, start = tree_flatten(grads), dict(tree_flatten(base.model.trainable_parameters()))
    direction = {name: g / mx.sqrt(sum(v.square().sum() for _, v in flat)) for name, g in flat}
    values = []
    for size in (1e-2, -1e-2):
        moved = [(name, start[name] + size * d) for name, d in direction.items()]
        base.model.load_weights(moved, strict=False)
        values.append(loss(batch).item())
    slope = mx.sqrt(sum(g.square().sum() for _, g in flat)).item()
    assert abs((values[0] - values[1]) / 2e-2 / slope - 1) < 1e-2


def test_padding_rows_do_not_change_the_step():
    rows = small_examples()
    alone = weights_after([make_batch(rows, range(2), 2, 64)], 1)
    padded = weights_after([make_batch(rows, range(2), 8, 64)], 1)
    assert largest_difference(alone, padded) < 1e-6


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "adafactor", "sgd", "muon", "lion"])
def test_every_optimizer_lowers_the_loss(optimizer):
    rate = {"sgd": 0.3, "lion": 1e-3}.get(optimizer, 1e-2)
    config = TrainConfig(optimizer=optimizer, learning_rate=rate, iters=4)
    base = base_of("qwen3")
    attach(base, LoRAConfig(rank=4))
    result = make_optimizer(config)
    result.init(base.model.trainable_parameters())
    stepper = lm_stepper(base.model, result)
    batch = make_batch(small_examples(), range(4), 4, 64)
    losses = [stepper(batch, True, True)[0] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_compiled_update_of_one_factor_is_that_of_mean_and_clipping(monkeypatch):
    batches = [make_batch(small_examples(), range(4), 4, 64)]
    apart = weights_after(batches, 1)
    monkeypatch.setattr(runtime, "COMPILES", True)
    assert largest_difference(apart, weights_after(batches, 1)) < 1e-6
