"""Cached frozen activations: they are those that would be computed; stored ones are verified."""

import json
import os
import shutil

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs import LoRAConfig, runtime
from mlx_packs.adapters.attach import attach
from mlx_packs.config.recipe import resolve
from mlx_packs.data.batches import training_set
from mlx_packs.data.sampler import Sampler
from mlx_packs.display import NORMAL, QUIET, VERBOSE, Display
from mlx_packs.errors import PackError
from mlx_packs.nn.wrapped import FrozenBlock, frozen_output
from mlx_packs.objectives import frozen_activations
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.objectives.frozen_activations import (
    frozen_blocks,
    memory_budget,
    open_frozen_activations,
)
from mlx_packs.objectives.state_store import StateStore
from mlx_packs.optim import make_optimizer
from mlx_packs.packs.base import Base
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
from tests.helpers.steps import assert_same, lm_stepper, loss_and_gradients, loss_sum
from tests.helpers.variants import slow_except

# Blocks that return more than states, or take more, and one whose random logits are not finite.
UNSUPPORTED = (
    "afm7 gear gemma3n gemma4 gemma4_text hunyuan iquestloopcoder kimi_k3 phi3small phixtral rwkv7 "
    "talkie"
).split()


@pytest.fixture
def states_folder(tmp_path, monkeypatch):
    """The folder of stored states, on disk in these tests alone."""
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prefix"


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
        ("gpt2", True, "block"),
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


@pytest.mark.parametrize("packing", [False, True], ids=["unpacked", "packed"])
def test_states_have_the_same_bits_whatever_was_asked_for_first(packing):
    train = changed(TRAIN, packing=packing)
    base = base_of_blocks()
    opened = CachedModel(train=train, base=base)
    batches = opened.batches(9)
    forwards = [opened.states(batch) for batch in batches]
    opened.attached.detach()
    again = CachedModel(train=train, base=base)
    backwards = [again.states(batch) for batch in batches[::-1]][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert np.array_equal(a, b)


def test_states_keep_every_bit_of_bfloat16():
    opened = CachedModel(base=in_bfloat16())
    batch = opened.batches(1)[0]
    states = opened.cache.prepare(batch).inputs["states"]
    tokens = mx.array(batch.inputs["tokens"])
    expected = frozen_output(opened.model, lambda: opened.head.hidden(tokens))
    assert states.dtype == mx.bfloat16
    for b, row in enumerate(batch.examples):
        n = LENGTHS[row] - 1
        assert mx.array_equal(states[b, :n], expected[b, :n]).item()


@pytest.mark.skipif(runtime.COMPILES, reason="steps are compiled here")
def test_half_precision_states_are_not_taken_for_traces():
    opened = CachedModel(base=in_bfloat16())
    optimizer = make_optimizer(opened.train)
    optimizer.init(opened.model.trainable_parameters())
    stepper = lm_stepper(opened.model, optimizer, head=opened.head)
    (batch,) = opened.batches(1)
    stepper(opened.cache.prepare(batch), True, True)
    assert stepper.traces == 0


def in_bfloat16() -> Base:
    base = base_of_blocks()
    base.model.set_dtype(mx.bfloat16)
    return base


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


@pytest.mark.slow
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
        return
    assert family not in UNSUPPORTED
    expected, actual = [], []
    for batch in opened.batches(6):
        expected.append(loss_sum(opened.model, opened.head, batch).item())
        prepared = opened.cache.prepare(batch)
        actual.append(loss_sum(opened.model, opened.head, prepared).item())
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("memory", [0, 20_000, 10**9], ids=["disk", "both", "memory"])
def test_states_beyond_the_memory_limit_come_from_disk(states_folder, monkeypatch, memory):
    monkeypatch.setattr(frozen_activations, "memory_budget", lambda plan: memory)
    opened = CachedModel()
    batches = opened.batches(9)
    actual = [opened.cache.prepare(batch) for batch in batches]
    assert opened.cache.store.is_on_disk
    assert opened.cache.store.memory_bytes <= memory
    assert (opened.cache.store.memory_bytes > 0) == (memory > 0)
    assert opened.cache.rows_computed == len(LENGTHS)
    for pair in zip(actual, batches, strict=True):
        losses = [loss_sum(opened.model, opened.head, batch).item() for batch in pair]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def filled(base, **changes) -> CachedModel:
    return CachedModel(base, changed(TRAIN, **changes)).fill()


def test_another_run_finds_what_one_has_kept(states_folder):
    base = base_of_blocks()
    assert filled(base).cache.rows_found == 0
    last = filled(base, learning_rate=1.0, iters=90)  # neither changes a state
    assert (last.cache.rows_found, last.cache.rows_computed) == (len(LENGTHS), 0)
    other = filled(base, seed=4)
    assert other.cache.rows_found == 0
    assert len(list(states_folder.glob("*.states"))) == 2


def test_whatever_changes_the_states_is_in_the_key_of_their_file():
    attached = CachedModel().attached
    same, other = examples(), examples()
    other.items[2].tokens[1] += 1

    def key(rows=same, path="quantized", blocks=3, **changes):
        states = mx.zeros((1, 1, 64))
        train = changed(TRAIN, **changes)
        return frozen_activations._key(attached, train, rows, path, blocks, states)

    keys = [key(), key(other), key(path="dense"), key(blocks=2)]
    keys += [key(seed=4), key(batch_size=3), key(packing=True), key(max_seq_length=64)]
    keys += [key(compute_dtype="float32")]
    attached.base.config["rms_norm_eps"] *= 2
    keys.append(key())
    attached.base.fingerprint = "sha256:" + "0" * 64
    keys.append(key())
    assert len(set(keys)) == len(keys) and key(learning_rate=1.0, iters=90) == keys[-1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-9] + bytes(b ^ 1 for b in whole[-9:]),  # the states
        lambda whole: bytes(b ^ 1 for b in whole[:20]) + whole[20:],  # the digests
        lambda whole: whole[:-1],
        lambda whole: whole + b"x",
        lambda whole: b"",
    ],
    ids=["states", "digests", "short", "long", "empty"],
)
def test_damaged_files_are_made_again(states_folder, damage):
    base = base_of_blocks()
    filled(base)
    (file,) = states_folder.glob("*.states")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert filled(base).cache.rows_computed > 0
    assert file.read_bytes() == whole


def test_states_of_another_base_of_the_name_are_computed_again(states_folder):
    base = base_of_blocks()
    filled(base)
    base.model.layers[0].mlp.up_proj.weight *= 1.5  # its fingerprint stays as it was
    again = CachedModel(base=base)
    assert again.cache.rows_found == 0
    batches = again.batches(4)
    expected, _ = loss_and_gradients(again.model, again.head, batches)
    actual, _ = loss_and_gradients(again.model, again.head, map(again.cache.prepare, batches))
    assert actual == pytest.approx(expected, rel=1e-6)


def test_one_foreign_row_among_those_computed_again_is_enough(states_folder):
    base = base_of_blocks()
    opened = CachedModel(base=base)
    for batch in opened.batches(4):
        opened.cache.prepare(batch)
    last = max(opened.cache.compute(int(opened.cache._batch_of[0])))
    opened.cache.store.put(last, np.zeros_like(opened.cache.store.get(last)))
    opened.cache.close()
    opened.attached.detach()
    assert last > 0 and CachedModel(base=base).cache.rows_found == 0


def test_a_file_in_use_is_left_to_the_other_run(states_folder):
    base = base_of_blocks()
    first = CachedModel(base=base)
    first.attached.detach()
    second = CachedModel(base=base)
    assert first.cache.store.is_on_disk and not second.cache.store.is_on_disk
    assert any("another run uses it" in text for text, _ in second.lines)
    assert second.states(second.batches(1)[0]).any()


def test_full_disk_keeps_and_reads_what_is_there(states_folder, monkeypatch):
    monkeypatch.setattr(frozen_activations, "memory_budget", lambda plan: 0)
    opened = CachedModel()
    batches = opened.batches(4)
    expected = [opened.states(b) for b in batches[:2]]
    opened.cache.store.forget()
    opened.cache.rows_computed = 0
    opened.states(batches[0])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert np.array_equal(opened.states(batches[1]), expected[1])
    computed = opened.cache.rows_computed
    assert np.array_equal(opened.states(batches[0]), expected[0])
    for batch in batches[1:]:
        assert opened.cache.prepare(batch) is batch
    assert opened.cache.rows_computed == computed == sum(len(b.examples) for b in batches[:2])
    assert [t for t, _ in opened.lines[1:]] == [
        "states are no longer kept on disk (No space left on device)"
    ]
    assert not opened.cache.store.is_on_disk
    opened.cache.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_cache_that_cannot_be_opened_lets_go_of_its_file(states_folder, monkeypatch, error):
    def fail(_):
        raise error

    base = base_of_blocks()
    with monkeypatch.context() as patch, pytest.raises(error) as raised:
        patch.setattr(frozen_activations.FrozenActivations, "drop_if_foreign", fail)
        CachedModel(base=base)
    assert not list(states_folder.glob(".*.lock")), raised.traceback  # which holds on to the cache


def test_existing_file_needs_no_room_on_the_disk(states_folder, monkeypatch):
    base = base_of_blocks()
    filled(base)
    monkeypatch.setattr(frozen_activations, "free_bytes", lambda _: 0)
    assert filled(base).cache.rows_found == len(LENGTHS)


def test_files_that_no_run_has_used_for_long_are_removed(states_folder):
    base = base_of_blocks()
    filled(base)
    (old,) = states_folder.glob("*.states")
    os.utime(old, (0, 0))
    filled(base, seed=9)
    assert not old.exists() and len(list(states_folder.glob("*.states"))) == 1


@pytest.mark.parametrize(
    ("changes", "num_layers"), [({}, -1), ({"neftune_noise_alpha": 5.0}, 1)], ids=str
)
def test_on_is_rejected_where_states_are_not_the_same_at_every_step(changes, num_layers):
    with raises("conflict", "cache_frozen"):
        CachedModel(train=changed(TRAIN, **changes), num_layers=num_layers)


def test_frozen_blocks_are_those_below_the_first_adapter():
    base = base_of_blocks()
    for targets, expected in (
        (("model.layers.2.mlp.up_proj", "model.layers.3.self_attn.q_proj"), 2),
        (("q_proj",), 0),
        (("lm_head",), BLOCKS),
    ):
        attached = attach(base, LoRAConfig(rank=2, target_modules=targets))
        assert frozen_blocks(attached) == expected
        attached.detach()


def test_adapters_on_the_head_alone_have_every_block_cached():
    base = base_of_blocks()
    attached = attach(base, LoRAConfig(rank=2, target_modules=("lm_head",)))
    head = split_head(base.model)
    cache = open_frozen_activations(
        attached, head, TRAIN, examples(), "quantized", None, Display(QUIET)
    )
    assert cache.to_json()["blocks"] == BLOCKS
    batch = next(training_set(examples(), Sampler(examples().lengths, 2, 47, 3)).batches())
    pair = batch, cache.prepare(batch)
    plain, cached = (loss_sum(base.model, head, each).item() for each in pair)
    assert cached == pytest.approx(plain, rel=1e-6)


class _Peeks(nn.Module):
    """A model whose last block sees the embedding, too."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "inner" else getattr(self["inner"], name)

    def __call__(self, tokens, *args, **kwargs):
        return self.inner(tokens, *args, **kwargs) + self.inner.embed_tokens(tokens)


def test_family_whose_blocks_see_more_than_states_is_rejected():
    def base():
        peeking = base_of_blocks()
        peeking.model.model = _Peeks(peeking.model.model)
        return peeking

    with raises("unsupported", "cache_frozen") as error:
        CachedModel(base())
    assert "\n" not in error.value.message
    opened = CachedModel(base=base(), train=changed(TRAIN, cache_frozen="auto"))
    assert opened.cache is None
    assert [level for _, level in opened.lines] == [VERBOSE]
    assert not any(isinstance(m, FrozenBlock) for m in opened.model.modules())


class _Projected(nn.Module):
    """An embedding with a linear behind it, which can carry an adapter."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.project = nn.Linear(64, 64, bias=False)

    def __call__(self, tokens):
        return self.project(self.table(tokens))


def test_an_adapter_below_the_blocks_is_seen():
    base = base_of_blocks()
    base.model.model.embed_tokens = _Projected(base.model.model.embed_tokens)
    base.model.freeze()
    targets = ("model.layers.3.self_attn.q_proj", "model.embed_tokens.project")
    attached = attach(base, LoRAConfig(rank=2, target_modules=targets))
    assert frozen_blocks(attached) == BLOCKS - 1
    with raises("unsupported", "cache_frozen"):
        open_frozen_activations(
            attached, None, TRAIN, examples(), "quantized", None, Display(QUIET)
        )


def test_too_large_states_are_rejected_or_left(monkeypatch):
    monkeypatch.setattr(frozen_activations, "memory_budget", lambda plan: 100)
    with raises("memory", "cache_frozen"):
        CachedModel()
    opened = CachedModel(train=changed(TRAIN, cache_frozen="auto"))
    assert opened.cache is None
    assert not any(isinstance(m, FrozenBlock) for m in opened.model.modules())


def test_off_never_caches():
    assert CachedModel(train=changed(TRAIN, cache_frozen="off")).cache is None


@pytest.mark.parametrize(
    ("changes", "num_layers", "reason"),
    [
        ({"iters": 4}, 1, "take no example twice (an epoch has 4)"),
        ({"iters": 5}, 1, None),
        ({"neftune_noise_alpha": 5.0}, 1, "other activations enter them at every step"),
        ({}, 4, "the first block, the embedding or the projector is trained"),
        ({}, 3, None),
    ],
)
def test_auto_caches_where_it_pays_and_says_why_not(changes, num_layers, reason):
    train = changed(TRAIN, cache_frozen="auto", **changes)
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


def test_states_in_memory_are_those_of_all_rows_within_the_budget():
    inputs = sum(n - 1 for n in LENGTHS)
    for state_bytes, expected in ((256, inputs * 256), (10**12, memory_budget(0))):
        store = StateStore((examples().lengths - 1) * state_bytes, memory_budget(0))
        assert store.most_memory_bytes == expected
    assert memory_budget(10**15) == 0
    assert 0 < memory_budget(None) < memory_budget(0)


@pytest.mark.parametrize(("value", "meaning"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_yaml_reads_on_and_off_as_truth_values(value, meaning):
    assert resolve({"cache_frozen": value}).train.cache_frozen == meaning
