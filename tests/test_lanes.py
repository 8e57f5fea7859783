"""Two halves of a batch at once: the same numbers, whatever else differs; and who may do it."""

import threading

import numpy as np
import pytest
from conftest import base_of

from mlx_packs import runtime
from mlx_packs.adapters import attach
from mlx_packs.batches import make_batch, make_packed_batch
from mlx_packs.config import LoRAConfig, TrainConfig
from mlx_packs.encoding import Example
from mlx_packs.evaluation import Scorer
from mlx_packs.lanes import evaluated, halves, has_lanes
from mlx_packs.loss import as_arrays, split_head
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from mlx_packs.step import Stepper

pytestmark = pytest.mark.skipif(runtime.COMPILES, reason="steps are compiled here")
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {"qwen3": {}, "qwen2": {}, "llama": {"rope_scaling": LLAMA3_ROPE}}


def rows(lengths) -> list[Example]:
    random = np.random.default_rng(5)
    return [
        Example(random.integers(0, 128, n).astype(np.int32), np.arange(n) > n // 2, "x")
        for n in lengths
    ]


def batches() -> list:
    """Of several shapes: an odd number of rows, a row alone, missing last rows, packed rows."""
    some = rows((30, 41, 64, 12, 90, 17, 5, 33, 70))
    found = [make_batch(some, range(start, start + 3), 3, 128) for start in (0, 3, 6)]
    found += [make_batch(some, [4], 1, 128), make_batch(some, [0, 1], 8, 128)]
    packed = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    return [*found, make_packed_batch(some, packed, 3, 127), *found]


def model_with_adapters(family: str, recompute: str):
    base = base_of(family, **MODELS[family])
    attached = attach(base, LoRAConfig(rank=4))
    for slot in attached.slots.values():
        slot.lora.lora_b[:] = [0.1 * mx.ones(b.shape) for b in slot.lora.lora_b]
    attached.recompute(recompute)
    base.model.train()
    return attached


def trained(family: str, recompute: str, lanes: bool, accumulate: int) -> tuple[list, dict]:
    attached = model_with_adapters(family, recompute)
    optimizer = make_optimizer(TrainConfig(optimizer="sgd", learning_rate=0.05))
    optimizer.init(attached.model.trainable_parameters())
    head = split_head(attached.model)
    stepper = Stepper(attached.model, head, optimizer, 1.0, lanes=lanes)
    found = [
        stepper(as_arrays(batch), batch.count, i % accumulate == 0, accumulate == 1)
        for i, batch in enumerate(batches(), 1)
    ]
    return found, attached.tensors()


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_by_halves_are_whole_steps(family, recompute, accumulate):
    whole, expected = trained(family, recompute, False, accumulate)
    by_halves, found = trained(family, recompute, True, accumulate)
    assert np.allclose(whole, by_halves, rtol=2e-5)
    for name, tensor in expected.items():
        assert mx.abs(found[name] - tensor).max().item() < 2e-6, name


def test_steps_by_halves_repeat_to_the_bit():
    one, two = (trained("qwen3", "selective", True, 1)[1] for _ in range(2))
    assert all(mx.array_equal(one[name], two[name]).item() for name in one)


def test_rows_are_scored_by_halves_as_together(monkeypatch):
    attached = model_with_adapters("qwen3", "none")
    scorer = Scorer(attached.model, split_head(attached.model))
    assert has_lanes(attached.model)
    by_halves = scorer.rows(batches()[:6])
    monkeypatch.setattr("mlx_packs.evaluation.has_lanes", lambda model: False)
    together = scorer.rows(batches()[:6])
    assert np.allclose(by_halves.nll, together.nll, rtol=1e-5)
    assert (by_halves.targets == together.targets).all()
    assert (by_halves.hits == together.hits).all()


def test_halves_hold_every_target_once_and_no_padding():
    batch = batches()[0]
    first, second = halves(as_arrays(batch))
    assert [first[0].shape, second[0].shape] == [(2, 64), (1, 64)]
    assert (np.concatenate([first[0], second[0]]) == batch.tokens).all()
    real = batch.weights > 0
    at = np.concatenate([first[1], np.array(second[1]) + 2 * 64])
    assert (at == batch.positions[real]).all()
    assert (np.concatenate([first[2], second[2]]) == batch.targets[real]).all()


def test_a_half_without_targets_is_left_out():
    (only,) = halves(as_arrays(make_batch(rows([20]), [0], 4, 64)))
    assert only[0].shape[0] == 2 and only[3].sum().item() == 9


def test_one_graph_is_made_and_evaluated_in_another_thread():
    def make():
        return mx.ones(3) * 2, threading.current_thread().name

    names = [name for _, name in evaluated([make, make], at_once=True)]
    assert names[0].startswith("lane") and names[1] == threading.current_thread().name
    assert [name for _, name in evaluated([make, make], at_once=False)] == names[1:] * 2


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_error_in_either_graph_is_raised_when_both_have_ended(wrong):
    ended = []

    def fails():
        raise RuntimeError("cannot be made")

    def works():
        ended.append(True)
        return mx.ones(3)

    makes = [works, works]
    makes[wrong] = fails
    with pytest.raises(RuntimeError, match="cannot be made"):
        evaluated(makes, at_once=True)
    assert ended == [True]


def test_only_known_blocks_without_dropout_by_plain_mlx_have_lanes(monkeypatch):
    attached = model_with_adapters("qwen3", "none")
    assert has_lanes(attached.model)
    attached.recompute("block")
    assert has_lanes(attached.model)
    attached.detach()
    assert has_lanes(attached.model)  # mlx-lm's own blocks of the same family
    assert not has_lanes(base_of("gpt2").model)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_packs.lanes.COMPILES", True)
        assert not has_lanes(attached.model)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_packs.ops._backend.detect", lambda: "metal")
        assert not has_lanes(attached.model)
    base = base_of("qwen3")
    attach(base, LoRAConfig(rank=4, dropout=0.1))
    assert not has_lanes(base.model)


def test_no_lane_asks_for_a_random_state(monkeypatch):
    """MLX makes one for each thread that asks, and a process that ends while it is freed dies."""
    real, askers = mx.random.state, []

    class Watched:
        def __getitem__(self, i):
            askers.append(threading.current_thread().name)
            return real[i]

    monkeypatch.setattr(mx.random, "state", Watched())
    trained("qwen3", "block", True, 1)
    assert not [name for name in askers if name.startswith("lane")]
