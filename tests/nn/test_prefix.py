"""A common beginning that is computed once gives the loss and gradients of ordinary rows.

In every family that trains, but those of `FALLS_BACK`; a run finds them by the probe.
"""

import shutil
from dataclasses import replace

import pytest

from mlx_packs import LoRAConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.cpu.profile import CPU
from mlx_packs.evaluation.perplexity import Scorer
from mlx_packs.nn.prefix import PrefixKeys
from mlx_packs.objectives.causal_lm import forward, split_head
from mlx_packs.objectives.exactness import why_not_shared
from mlx_packs.ops.profile import forced_profile
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_dense
from tests.helpers.families import family_base
from tests.helpers.family_sweep import FAMILIES, REPRESENTATIVE, recomputed_sweep, sweep
from tests.helpers.interpreter import run_python
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.steps import adapted, fill_b
from tests.helpers.trees import (
    BATCH,
    FALLS_BACK,
    FALLS_BACK_RECOMPUTED,
    PREFIX,
    adapted_family,
    check_equal,
    examples_with_prefixes,
    ordinary_batch,
    tree_of,
)

ROOT = 6
ROOTED = ordinary_batch(examples_with_prefixes((5, 11, 7), root=ROOT))


@pytest.mark.parametrize(
    ("family", "policy"),
    [("qwen3", "none"), ("qwen3", "selective"), ("qwen3", "block"), ("gemma3_text", "block")],
)
def test_gradients_reach_the_prefix_through_recomputation(family, policy):
    """Keys and values are arguments and results of what is recomputed: none hides in a cache."""
    attached, head = adapted(base_of(family, **SMALL_FAMILIES[family]), recompute=policy)
    check_equal(attached.model, head, ordinary_batch(examples_with_prefixes((5, 11), last=0.5)))


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
@pytest.mark.parametrize("most", [82, 81])
def test_a_cpu_computes_many_inputs_in_a_pass_for_each_level(most, policy, monkeypatch):
    """Six inputs of a root, 2 x 8 of prefixes, and 6 x 10 of suffixes."""
    passes = []
    next_pass = PrefixKeys.next_pass
    monkeypatch.setattr(
        PrefixKeys, "next_pass", lambda *a, **k: passes.append(a) or next_pass(*a, **k)
    )
    attached, head = adapted(base_of("qwen3"), recompute=policy)
    with forced_profile(replace(CPU, tree_inputs=most)):
        check_equal(attached.model, head, ROOTED, root=ROOT)
    assert bool(passes) == (most == 81)


@pytest.mark.parametrize("family", sweep([f for f in FAMILIES if f not in FALLS_BACK]))
def test_a_tree_has_the_loss_and_gradients_of_its_rows(family):
    """On both levels, since prefixes begin alike; the probe finds that, too."""
    attached, head = adapted_family(family)
    half = 4e-6 if family.startswith("gemma4") else 2e-6  # of its rows alone 2.2e-6
    check_equal(attached.model, head, ROOTED, root=ROOT, half=half)
    assert why_not_shared(attached.model, head, 128) is None


@pytest.mark.parametrize(
    "family, policy",
    recomputed_sweep([f for f in FAMILIES if f not in FALLS_BACK | FALLS_BACK_RECOMPUTED]),
)
def test_a_recomputed_tree_has_the_loss_and_gradients_of_its_rows(family, policy):
    """The probe asks that, of families beyond the representative ones alone."""
    attached, head = adapted_family(family, policy)
    if family in REPRESENTATIVE:
        check_equal(attached.model, head)
    assert why_not_shared(attached.model, head, 128) is None


@pytest.mark.parametrize("groups, lengths", [(1, (9,)), (1, (6, 3, 1, 4)), (3, (5, 2)), (4, (7,))])
def test_any_number_of_groups_and_of_rows(groups, lengths):
    attached, head = adapted(base_of("qwen3"))
    batch = ordinary_batch(examples_with_prefixes(lengths, groups))
    check_equal(attached.model, head, batch, groups)


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
def test_blocks_below_the_adapters_leave_keys_without_a_gradient(policy):
    attached, head = adapted(base_of("qwen3", num_hidden_layers=3), 1, policy)
    check_equal(attached.model, head)


@pytest.mark.parametrize(
    ("family", "policy"),
    [("qwen3", "none"), ("qwen3", "selective"), ("qwen3", "block"), ("qwen3_next", "block")],
)
def test_all_parameters_may_train(family, policy):
    attached = attach(family_base(family), LoRAConfig(rank=2))
    attached.recompute(policy)
    attached.model.unfreeze()
    attached.model.train()
    check_equal(attached.model, None)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_a_suffix_of_one_input(family):
    """Models compute a single input in their own way, as while generating."""
    attached, head = adapted_family(family)
    part = attached.model if head is None else head.hidden
    tokens = mx.random.randint(1, 128, (4, PREFIX + 1), key=mx.random.key(0))
    tokens[1, :PREFIX], tokens[3, :PREFIX] = tokens[0, :PREFIX], tokens[2, :PREFIX]
    states = forward(
        attached.model, part, tokens[:, PREFIX:], prefixes={"prefix": tokens[::2, :PREFIX]}
    )
    expected = forward(attached.model, part, tokens)
    assert mx.allclose(states[2 * PREFIX :], expected[:, -1], atol=1e-5).item()
    assert mx.allclose(states[:PREFIX], expected[0, :PREFIX], atol=1e-5).item()


@pytest.mark.parametrize(
    ("quantize", "matmul_path"),
    [("affine4", "quantized"), ("affine4", "transient"), ("nf4", "transient")],
)
def test_every_matmul_path(quantize, matmul_path, tmp_path):
    base = load_base(write_dense(tmp_path / "dense", mx.float32), quantize)
    attached = attach(base, LoRAConfig(rank=2), None, matmul_path)
    fill_b(attached)
    head = split_head(attached.model)
    attached.model.train()
    check_equal(attached.model, head)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_evaluation_scores_the_rows(family):
    attached, head = adapted_family(family)
    attached.model.eval()
    scorer = Scorer(attached.model, head)
    tree, rows = scorer.score([tree_of(BATCH, 2)]), scorer.score([BATCH])
    assert tree.rows == rows.rows == 6 and tree.targets == rows.targets
    assert tree.nll == pytest.approx(rows.nll, rel=1e-6)
    assert tree.accuracy == rows.accuracy


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++ on CPUs")
def test_steps_are_the_same_compiled_and_uncompiled():
    code = """
from mlx_packs.config.schema import TrainConfig
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.models import base_of
from tests.helpers.steps import adapted, largest_difference, lm_stepper
from tests.helpers.trees import examples_with_prefixes, ordinary_batch, tree_of
batch = ordinary_batch(examples_with_prefixes((5, 11, 7)))
def steps(batch):
    mx.random.seed(7)
    attached, head = adapted(base_of("qwen3", num_hidden_layers=1), recompute="block")
    optimizer = make_optimizer(TrainConfig(optimizer="sgd", learning_rate=0.1, iters=1))
    optimizer.init(attached.model.trainable_parameters())
    stepper = lm_stepper(attached.model, optimizer, head=head)
    for _ in range(2):
        stepper(batch, True, True)
    return attached.tensors(), stepper.traces
mx.disable_compile(); plain, none = steps(batch)
mx.enable_compile(); compiled, one = steps(tree_of(batch, 2))
print(largest_difference(plain, compiled), none, one)
"""

    difference, *traces = run_python(code).split()
    assert float(difference) < 1e-6 and traces == ["0", "1"]
