"""Steps and scores on two streams are those on one, to float error, and repeat to the bit."""

from dataclasses import replace

import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.adapters.attach import attach
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.cpu.profile import CPU
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.sampler import Packed
from mlx_packs.evaluation.perplexity import Scorer
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.ops.profile import forced_profile
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.models import base_of
from tests.helpers.steps import examples_of, lm_stepper, make_batch

pytestmark = pytest.mark.skipif(runtime.COMPILES, reason="steps are compiled here")


def batches() -> list:
    """Of several shapes: an odd number of rows, a row alone, missing last rows, packed rows."""
    some = examples_of((30, 41, 64, 12, 40, 17, 5, 33, 50))
    unpacked = [make_batch(some, range(3), 3, 128)]
    unpacked += [make_batch(some, [4], 1, 128), make_batch(some, [0, 1], 8, 128)]
    packed = Packed([np.array([0, 1]), np.array([2, 3]), np.array([4, 5])])
    return [*unpacked, TokenCollate(3, 127)(some, packed), *unpacked]


def model_with_adapters(family: str, path: str, recompute: str):
    base = base_of(family)
    attached = attach(base, LoRAConfig(rank=4), matmul_path=path)
    for place in attached.places.values():
        place.lora.lora_b[:] = [0.1 * mx.ones(b.shape) for b in place.lora.lora_b]
    attached.recompute(recompute)
    base.model.train()
    return attached


def streams(count: int):
    """Compute on so many streams, however small the work is."""
    return forced_profile(replace(CPU, stream_work=1, slice_rows=16, streams=count))


def take_steps(family: str, path: str, recompute: str, accumulate: int):
    attached = model_with_adapters(family, path, recompute)
    optimizer = make_optimizer(TrainConfig(optimizer="sgd", learning_rate=0.05))
    optimizer.init(attached.model.trainable_parameters())
    stepper = lm_stepper(attached.model, optimizer)
    losses = [
        stepper(batch, i % accumulate == 0, accumulate == 1) for i, batch in enumerate(batches(), 1)
    ]
    return losses, attached.tensors()


@pytest.mark.parametrize(
    "run",
    [
        ("qwen3", "transient", "selective", 2),
        pytest.param(("qwen2", "dense", "block", 1), marks=pytest.mark.slow),
    ],
)
def test_steps_on_two_streams_are_those_on_one(run):
    with streams(1):
        expected, adapters = take_steps(*run)
    with streams(2):
        losses, by_two = take_steps(*run)
        _, again = take_steps(*run)
    assert np.allclose(expected, losses, rtol=2e-5)
    for name, tensor in adapters.items():
        assert mx.abs(by_two[name] - tensor).max().item() < 2e-6, name
    assert all(mx.array_equal(by_two[name], again[name]).item() for name in again)


def test_rows_are_scored_on_two_streams_as_on_one():
    attached = model_with_adapters("qwen3", "dense", "none")
    scorer = Scorer(attached.model, split_head(attached.model))
    scores = []
    for count in (2, 1):
        with streams(count):
            scores.append(scorer.examples(batches()[:4]))
    assert np.allclose(scores[0].nll, scores[1].nll, rtol=1e-5)
    assert (scores[0].hits == scores[1].hits).all()
