"""The step and the batches that are laid out for a machine model are those of training."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.apple_gpu.our_step import batch_shapes, batch_steps, lazy_step
from mlx_packs import runtime
from tests.helpers.models import model_of


def test_lazy_step_returns_adapters_their_moments_and_a_finite_loss():
    sizes = {"batch": 2, "length": 8, "targets": 4, "rank": 4}
    sides = []
    for packed in (False, True):
        model, config = model_of("qwen3", hidden_size=128, intermediate_size=192)
        nn.quantize(model, group_size=64, bits=4)
        model.freeze()
        ways = {"path": "quantized", "recompute": "none", "packed": packed}
        sides.append(lazy_step(model, config, **sizes, **ways))

    outputs, leaves = sides[0]
    loss, norm = outputs[-2:]
    mx.eval(outputs)
    adapters = 2 * 7 * len(model.layers)
    assert len(outputs) == 3 * adapters + len(("step", "learning rate", "loss", "norm"))
    assert np.isfinite(loss.item()) and norm.item() > 0
    assert {(2, 8), (4,)} <= {tuple(leaf.shape) for leaf in leaves}
    read = [sum(leaf.shape == (2, 8) for leaf in side[1]) for side in sides]
    assert read[1] == read[0] + 1  # its segments


def test_packed_batches_on_a_gpu_are_counted_by_the_places_of_examples(monkeypatch):
    monkeypatch.setattr(runtime, "COMPILES", True)
    lengths = np.random.default_rng(0).integers(2, 64, 400).tolist()
    steps = batch_steps(lengths, 1.0, 2, True, 64)
    numbers = {number for *_, number in steps}
    assert 1 < len(numbers) < len(steps) and numbers == set(range(len(numbers)))
    assert batch_shapes(lengths, 1.0, 2, True, 64) == [step[:3] for step in steps]
