"""A prefix that the steps of an update share is computed once, with the gradients of ordinary rows."""

import math
import shutil
from dataclasses import replace

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import TrainConfig
from mlx_packs.adapters.score_head import fresh_score_head
from mlx_packs.data.batches import TokenCollate, split_rows
from mlx_packs.data.dataset import Batch, Tree
from mlx_packs.data.encoding import Example
from mlx_packs.data.preference_batches import PreferenceCollate
from mlx_packs.data.trees import Steps, TreeCollate, planted
from mlx_packs.nn.prefix import names_with_gradient
from mlx_packs.objectives.causal_lm import CausalLM
from mlx_packs.objectives.objective import Objective
from mlx_packs.objectives.preference import PreferenceObjective
from mlx_packs.objectives.reward_model import RewardModel
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper
from mlx_packs.training.update import KEY, add_scale
from tests.helpers.family_sweep import FAMILIES as EVERY_FAMILY
from tests.helpers.interpreter import run_python
from tests.helpers.memory import active_bytes
from tests.helpers.models import base_of
from tests.helpers.steps import adapted
from tests.helpers.trees import (
    PREFIX,
    adapted_family,
    examples_with_prefixes,
    ordinary_batch,
)
from tests.helpers.variants import slow_except

# full attention, a sliding window, recurrent layers between attention ones, and latent attention
FAMILIES = ["qwen3", "gemma3_text", "qwen3_next", "deepseek_v3"]
# The same in other forms, and caches of other kinds: states, convolutions, tokens, chunks of keys.
OTHERS = (
    "afm7 baichuan_m1 bailing_moe_linear deepseek_v32 falcon_h1 gpt2 jamba kimi_linear lfm2 llama4 "
    "longcat_flash_ngram mamba mamba2 minimax nemotron_h plamo2 qwen3_moe rwkv7 step3p5"
).split()
BATCH = ordinary_batch(examples_with_prefixes((5, 11, 7, 4, 9, 6), groups=1))


class Recorder(optimizers.SGD):
    """Keeps the gradients of an update, and changes no weight."""

    gradients: dict[str, mx.array]

    def update(self, model: nn.Module, gradients: dict) -> None:
        self.gradients = dict(tree_flatten(gradients))


def rows_of(batch: Batch, parts: int) -> list[Batch]:
    return split_rows(batch, parts)


def trees_of(batch: Batch, parts: int) -> list[Batch]:
    """The same pieces as trees, whose prefix recurs."""
    return [planted(piece, Tree(1, PREFIX, recurs=True)) for piece in rows_of(batch, parts)]


def updated(model: nn.Module, objective: Objective, steps: list[Batch]) -> tuple[float, dict]:
    """Mean loss and gradients of one update."""
    optimizer = Recorder(0.1)
    optimizer.init(model.trainable_parameters())
    keep = objective.keep_prefixes
    stepper = Stepper(model, objective.loss, optimizer, None, keep_prefixes=keep)
    started = stepper.start_pieces(steps, last=True)
    assert not stepper.waiting
    return started.read()[0], optimizer.gradients


def check_update(model: nn.Module, objective: Objective, rows: list[Batch], trees: list[Batch]):
    """Loss within 1e-6, gradients within 2e-5 of each one's largest entry."""
    expected_loss, expected = updated(model, objective, rows)
    loss, gradients = updated(model, objective, trees)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert set(gradients) == set(expected)
    for name, tensor in expected.items():
        largest = mx.abs(tensor).max().item()
        difference = mx.abs(gradients[name] - tensor).max().item()
        # no key of afm7's first block gets a gradient
        assert difference < 2e-5 * largest or difference == largest == 0, name


@pytest.mark.parametrize("policy", slow_except(["none", "selective", "block"], "block"))
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_has_the_gradients_of_ordinary_rows(family, policy):
    attached, head = adapted_family(family, policy)
    objective = CausalLM(attached.model, head)
    check_update(attached.model, objective, rows_of(BATCH, 3), trees_of(BATCH, 3))


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in EVERY_FAMILY if f in OTHERS])
def test_an_update_has_the_gradients_of_ordinary_trees(family):
    """Of families that keep tokens beside keys and states, too; those have no gradient."""
    attached, head = adapted_family(family)
    each = [planted(piece, Tree(1, PREFIX)) for piece in rows_of(BATCH, 2)]
    check_update(attached.model, CausalLM(attached.model, head), each, trees_of(BATCH, 2))


@pytest.mark.parametrize("parts", [2, 6])
def test_the_prefix_is_passed_twice_whatever_the_number_of_pieces(parts):
    """First for keys and values, then with its gradient; pieces may be single rows."""
    attached, head = adapted(base_of("qwen3"))
    passed, objective = [], CausalLM(attached.model, head)
    keep = objective.keep_prefixes
    objective.keep_prefixes = lambda prefix: passed.append(prefix.shape) or keep(prefix)
    check_update(attached.model, objective, rows_of(BATCH, parts), trees_of(BATCH, parts))
    assert passed == [(1, PREFIX)] * 2


def test_what_is_below_the_adapters_gets_no_gradient():
    attached, head = adapted(base_of("qwen3", num_hidden_layers=3), num_layers=1)
    model, objective = attached.model, CausalLM(attached.model, head)
    kept = objective.keep_prefixes(mx.array(trees_of(BATCH, 2)[0].inputs["prefix"]))
    assert set(kept) == {"states", "0.0", "0.1", "1.0", "1.1", "2.0", "2.1"}
    assert names_with_gradient(model, kept) == ["states", "2.0", "2.1"]
    check_update(model, objective, rows_of(BATCH, 2), trees_of(BATCH, 2))

    model.model.unfreeze(keys=["weight"])  # of the embedding, too
    assert set(names_with_gradient(model, kept)) == set(kept)
    check_update(model, objective, rows_of(BATCH, 2), trees_of(BATCH, 2))


def test_batches_of_an_update_may_have_several_prefixes_and_rows():
    other = ordinary_batch(examples_with_prefixes((5, 9, 3), groups=1, seed=2))
    rows = [*rows_of(BATCH, 2), *rows_of(other, 2), *rows_of(BATCH, 3)]
    trees = [*trees_of(BATCH, 2), *trees_of(other, 2), *rows_of(BATCH, 3)]
    trees[-1] = trees_of(BATCH, 3)[-1]
    attached, head = adapted(base_of("qwen3"))
    check_update(attached.model, CausalLM(attached.model, head), rows, trees)


def test_groups_of_rows_may_share_several_prefixes():
    batches = [ordinary_batch(examples_with_prefixes((5, 9, n), groups=2)) for n in (3, 6)]
    trees = [planted(batch, Tree(2, PREFIX, recurs=True)) for batch in batches]
    attached, head = adapted(base_of("qwen3"))
    same = np.array_equal(trees[0].inputs["prefix"], trees[1].inputs["prefix"])
    assert not same  # the second is computed after the first one's gradient
    check_update(attached.model, CausalLM(attached.model, head), batches, trees)


@pytest.mark.parametrize("task", ["dpo", "simpo"])
def test_preferences_that_begin_alike(task):
    pairs = ordinary_batch(examples_with_prefixes((5, 9, 4, 7, 3, 8), groups=1, last=1))
    reference = np.random.default_rng(0).normal(-20, 1, (3, 2)).astype(np.float32)
    batch = pairs.having(labels=np.ones(3, np.float32), reference=reference)
    batch = replace(batch, denominator=3)
    collate = PreferenceCollate(TreeCollate(TokenCollate(6, 64), steps=Steps(1, 3)))
    trees = collate.split(planted(batch, Tree(1, PREFIX, recurs=True)), 3)
    assert [piece.layout.recurs for piece in trees] == [True] * 3

    attached, head = adapted(base_of("qwen3"))
    objective = PreferenceObjective(attached.model, head, TrainConfig(task=task))
    check_update(attached.model, objective, collate.split(batch, 3), trees)


def test_rewards_that_begin_alike():
    pairs = ordinary_batch(examples_with_prefixes((5, 9, 4, 7), groups=1, last=0))
    batch = replace(pairs.having(labels=np.ones(2, np.float32)), denominator=2)
    collate = PreferenceCollate(TreeCollate(TokenCollate(4, 64), steps=Steps(1, 2)))
    base = base_of("qwen3")
    attached, head = adapted(base)
    objective = RewardModel(attached.model, head.hidden, fresh_score_head(base, 0), 0.1)
    trees = collate.split(planted(batch, Tree(1, PREFIX, recurs=True)), 2)
    check_update(attached.model, objective, collate.split(batch, 2), trees)


def changes_of_half_precision(trees: bool, scale: float) -> tuple[float, dict]:
    """Gradient norm of an update in float16 with a scale, and what it changes."""
    base = base_of("qwen3")
    base.model.set_dtype(mx.float16)
    attached, head = adapted(base)
    model, objective = attached.model, CausalLM(attached.model, head)
    optimizer = optimizers.SGD(1.0)
    optimizer.init(model.trainable_parameters())
    add_scale(optimizer)
    optimizer.state[KEY]["scale"] = mx.array(scale)
    keep = objective.keep_prefixes
    stepper = Stepper(model, objective.loss, optimizer, None, keep_prefixes=keep)

    before = dict(tree_flatten(model.trainable_parameters()))
    pieces = trees_of(BATCH, 3) if trees else rows_of(BATCH, 3)
    _, norm = stepper.start_pieces(pieces, last=True).read()
    after = dict(tree_flatten(model.trainable_parameters()))
    return norm, {name: before[name] - after[name] for name in before}


def test_a_scaled_loss_scales_what_goes_through_the_prefix():
    mx.random.seed(3)
    norm, changes = changes_of_half_precision(trees=True, scale=2.0**9)
    mx.random.seed(3)
    expected_norm, expected = changes_of_half_precision(trees=False, scale=2.0**9)
    assert norm == pytest.approx(expected_norm, rel=1e-2)
    for name, tensor in expected.items():
        off = mx.linalg.norm(changes[name] - tensor)
        assert off.item() < 2e-2 * mx.linalg.norm(tensor).item(), name


def test_an_overflow_in_the_prefix_leaves_the_update_out():
    norm, changes = changes_of_half_precision(trees=True, scale=2.0**30)
    assert norm == math.inf
    assert not any(mx.any(change).item() for change in changes.values())


def peak_of(steps: list[Batch]) -> int:
    """The peak of memory in an update, without what was there before."""
    attached, head = adapted(base_of("qwen3", num_hidden_layers=4))
    model, objective = attached.model, CausalLM(attached.model, head)
    mx.eval(model.parameters())
    before = active_bytes()
    mx.reset_peak_memory()
    updated(model, objective, steps)
    return mx.get_peak_memory() - before


def test_the_activations_of_prefix_and_rows_are_never_in_memory_together():
    """The peak is below that of trees which compute the prefix each."""
    rng = np.random.default_rng(0)
    common = rng.integers(1, 128, 256)
    examples = []
    for _ in range(8):
        tokens = np.concatenate([common, rng.integers(1, 128, 64)]).astype(np.int32)
        examples.append(Example(tokens, np.arange(320) >= 300, "x"))
    batch = TokenCollate(8, 512)(examples, range(8))
    each = [planted(piece, Tree(1, 256)) for piece in rows_of(batch, 4)]
    once = [planted(piece, Tree(1, 256, recurs=True)) for piece in rows_of(batch, 4)]
    assert peak_of(once) < 0.9 * peak_of(each)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++ on CPUs")
def test_updates_are_the_same_compiled_and_uncompiled():
    code = """
from mlx_packs.config.schema import TrainConfig
from mlx_packs.objectives.causal_lm import CausalLM
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper
from tests.helpers.models import base_of
from tests.helpers.steps import adapted, largest_difference
from tests.training.test_update_prefix import BATCH, rows_of, trees_of
def updates(pieces):
    mx.random.seed(7)
    attached, head = adapted(base_of("qwen3", num_hidden_layers=1), recompute="block")
    optimizer = make_optimizer(TrainConfig(optimizer="sgd", learning_rate=0.1, iters=1))
    optimizer.init(attached.model.trainable_parameters())
    objective = CausalLM(attached.model, head)
    keep = objective.keep_prefixes
    stepper = Stepper(attached.model, objective.loss, optimizer, 1.0, keep_prefixes=keep)
    for _ in range(2):
        stepper.start_pieces(pieces, True)
    return attached.tensors(), stepper.traces
mx.disable_compile(); plain, none = updates(rows_of(BATCH, 2))
mx.enable_compile(); compiled, several = updates(trees_of(BATCH, 2))
print(largest_difference(plain, compiled), none, several)
"""

    difference, *traces = run_python(code).split()
    # the pass over the prefix, the first rows, more rows, and the way back
    assert float(difference) < 1e-6 and traces == ["0", "4"]
