"""Cached frozen activations: they are those that would be computed."""

import json
import shutil

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs import LoRAConfig
from mlx_packs.adapters.attach import attach
from mlx_packs.data.batches import training_set
from mlx_packs.data.sampler import Sampler
from mlx_packs.display import NORMAL, QUIET, VERBOSE, Display
from mlx_packs.errors import PackError
from mlx_packs.nn.wrapped import FrozenBlock, frozen_output
from mlx_packs.objectives import frozen_activations
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.objectives.frozen_activations import (
    open_frozen_activations,
)
from mlx_packs.runtime import mx
from tests.helpers.cached_model import (
    BLOCKS,
    LENGTHS,
    TRAIN,
    CachedModel,
    base_of_blocks,
    changed,
    examples,
)
from tests.helpers.errors import raises
from tests.helpers.families import family_base
from tests.helpers.family_sweep import FAMILIES, sweep
from tests.helpers.interpreter import run_python
from tests.helpers.models import base_of
from tests.helpers.steps import assert_same, loss_and_gradients, loss_sum
from tests.helpers.variants import slow_except

# Blocks that return more than states, or take more, and one whose random logits are not finite.
UNSUPPORTED = (
    "afm7 gear gemma3n gemma4 gemma4_text hunyuan iquestloopcoder kimi_k3 phi3small phixtral rwkv7 "
    "talkie"
).split()


RECOMPUTE = ("none", "selective", "block")


@pytest.mark.parametrize(
    ("family", "packing", "recompute"),
    [
        *slow_except(
            [("qwen3", packing, way) for packing in (False, True) for way in RECOMPUTE],
            ("qwen3", False, "none"),
            ("qwen3", True, "selective"),
        ),
        ("gpt2", False, "none"),  # the blocks of mlx-lm
        ("gpt2", False, "block"),
        ("qwen3_moe", True, "block"),
    ],
)
def test_cached_states_have_loss_and_gradients_of_computed_ones(family, packing, recompute):
    opened = CachedModel(
        base_of_blocks(family), changed(TRAIN, packing=packing, recompute=recompute)
    )
    assert opened.cache.to_json()["blocks"] == BLOCKS - 1
    batches = opened.batches(6)  # into the second epoch, whose batches hold other rows together
    expected, of_plain = loss_and_gradients(opened.model, opened.head, batches)
    cached = map(opened.cache.prepare, batches)
    actual, of_cached = loss_and_gradients(opened.model, opened.head, cached)
    assert actual == pytest.approx(expected, rel=1e-6)
    assert_same(of_cached, of_plain)
    assert opened.cache.rows_computed == len(LENGTHS)  # each row once


def test_states_keep_every_bit_of_bfloat16():
    base = base_of_blocks()
    base.model.set_dtype(mx.bfloat16)
    opened = CachedModel(base)
    batch = opened.batches(1)[0]
    states = opened.cache.prepare(batch).inputs["states"]
    tokens = mx.array(batch.inputs["tokens"])
    expected = frozen_output(opened.model, lambda: opened.head.hidden(tokens))
    assert states.dtype == mx.bfloat16
    for b, row in enumerate(batch.examples):
        n = LENGTHS[row] - 1
        assert mx.array_equal(states[b, :n], expected[b, :n]).item()


def test_frozen_blocks_are_not_computed_where_states_are_given():
    opened = CachedModel()
    batch = opened.batches(1)[0]
    prepared = opened.cache.prepare(batch)
    for block in opened.model.layers[: BLOCKS - 1]:
        block.block = None  # a call raises
    assert loss_sum(opened.model, opened.head, prepared).item() > 0


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_backward_stops_at_the_first_adapted_block(recompute):
    opened = CachedModel(train=changed(TRAIN, cache_frozen="off", recompute=recompute))
    passed = []

    class Watched(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def __call__(self, x, *args):
            watched = mx.custom_function(lambda states: states + 0)
            watched.vjp(lambda primals, cotangents, _: passed.append(1) or cotangents)
            return watched(self.block(x, *args))

    for i in (BLOCKS - 2, BLOCKS - 1):
        opened.model.model.layers[i] = Watched(opened.model.layers[i])
        opened.model.train()
        _, gradients = nn.value_and_grad(
            opened.model, lambda batch: loss_sum(opened.model, opened.head, batch)
        )(opened.batches(1)[0])
        mx.eval(gradients)
        assert len(passed) == (i == BLOCKS - 1)  # so it would be seen in the adapted one


def test_rows_are_given_ahead_once_they_are_known():
    opened = CachedModel()
    epoch = opened.batches(4)
    assert not any("states" in opened.cache.ahead(batch).inputs for batch in epoch)
    expected = [opened.states(b) for b in epoch]
    for batch, states in zip(map(opened.cache.ahead, epoch), expected, strict=True):
        assert batch.inputs["states"].dtype == np.uint8
        assert np.array_equal(opened.states(batch), states)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++ on CPUs")
def test_a_compiled_step_takes_states_as_an_input():
    code = """
import json
import mlx.optimizers as optimizers
from mlx_packs.runtime import mx
from tests.helpers.cached_model import CachedModel
from tests.helpers.steps import lm_stepper
def losses():
    mx.random.seed(7)
    opened = CachedModel()
    optimizer = optimizers.SGD(0.0)
    optimizer.init(opened.model.trainable_parameters())
    stepper = lm_stepper(opened.model, optimizer, head=opened.head)
    (batch,) = opened.batches(1)
    first = opened.cache.prepare(batch)
    second = first.having(states=first.inputs["states"][::-1] * 2)
    steps = [stepper(each, True, True)[0] for each in (first, second)]
    return steps, stepper.traces
mx.disable_compile(); plain = losses()
mx.enable_compile(); compiled = losses()
print(json.dumps([*plain, *compiled]))
"""

    plain, untraced, compiled, traces = json.loads(run_python(code))
    assert (untraced, traces) == (0, 1)
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert compiled[0] != pytest.approx(compiled[1], rel=1e-3)


@pytest.mark.parametrize("family", sweep(FAMILIES))
def test_every_family_has_the_loss_of_computed_states_or_is_rejected(family):
    try:
        opened = CachedModel(base=family_base(family))
    except PackError as error:
        assert family in UNSUPPORTED, error
        assert (error.code, error.flag) == ("unsupported", "cache_frozen")
        assert "\n" not in error.message
        return
    assert family not in UNSUPPORTED
    expected, actual = [], []
    for batch in opened.batches(6):
        expected.append(loss_sum(opened.model, opened.head, batch).item())
        prepared = opened.cache.prepare(batch)
        actual.append(loss_sum(opened.model, opened.head, prepared).item())
    assert actual == pytest.approx(expected, rel=1e-5)


def test_adapters_on_the_head_alone_have_every_block_cached():
    base = base_of_blocks()
    attached = attach(base, LoRAConfig(rank=2, target_modules=("lm_head",)))
    head = split_head(base.model)
    cache = open_frozen_activations(attached, head, TRAIN, examples(), None, Display(QUIET))
    assert cache.to_json()["blocks"] == BLOCKS
    batch = next(training_set(examples(), Sampler(examples().lengths, 2, 47, 3)).batches())
    pair = batch, cache.prepare(batch)
    plain, cached = (loss_sum(base.model, head, each).item() for each in pair)
    assert cached == pytest.approx(plain, rel=1e-6)


def test_auto_leaves_a_family_whose_blocks_see_more_than_states():
    opened = CachedModel(family_base("gemma3n"), changed(TRAIN, cache_frozen="auto"))
    assert opened.cache is None
    assert [level for _, level in opened.lines] == [VERBOSE]
    assert not any(isinstance(m, FrozenBlock) for m in opened.model.modules())


def test_too_large_states_are_rejected_or_left(monkeypatch):
    monkeypatch.setattr(frozen_activations, "memory_budget", lambda plan: 100)
    with raises("memory", "cache_frozen"):
        CachedModel()
    opened = CachedModel(train=changed(TRAIN, cache_frozen="auto"))
    assert opened.cache is None
    assert not any(isinstance(m, FrozenBlock) for m in opened.model.modules())


@pytest.mark.parametrize(
    ("changes", "num_layers", "reason"),
    [
        ({"iters": 4}, 1, "take no example twice (an epoch has 4)"),
        ({"iters": 5}, 1, None),
        ({"neftune_noise_alpha": 5.0}, 1, "other activations enter them at every step"),
        ({}, 4, "the first block or the embedding is trained"),
        ({}, 3, None),
    ],
)
def test_auto_caches_where_it_pays_and_says_why_not(changes, num_layers, reason):
    train = changed(TRAIN, cache_frozen="auto", **changes)
    if reason is not None and "iters" not in changes:  # other states at every step
        with raises("conflict", "cache_frozen"):
            CachedModel(train=changed(train, cache_frozen="on"), num_layers=num_layers)
    opened = CachedModel(train=train, num_layers=num_layers)
    ((text, level),) = opened.lines
    assert (opened.cache is None) == (reason is not None)
    if reason is None:
        assert level == NORMAL and "are below the adapters: computed once for each example" in text
    else:
        assert level == VERBOSE and reason in text


def test_auto_does_not_cache_a_block_among_many():
    base = base_of("qwen3", num_hidden_layers=12)
    opened = CachedModel(base=base, train=changed(TRAIN, cache_frozen="auto"), num_layers=11)
    assert opened.cache is None and "only 1 of 12 blocks" in opened.lines[0][0]
