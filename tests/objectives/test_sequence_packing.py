"""Packed examples: each is trained as if it were alone, in every family; or packing is rejected."""

import re
import shutil
import threading

import pytest
from mlx_lm.models.phi import PhiAttention

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.evaluation.perplexity import Scorer
from mlx_packs.nn.segments import SegmentCache
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.objectives.exactness import check_packing
from mlx_packs.runtime import mx
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.interpreter import run_python
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.observers import observe
from tests.helpers.packing import LIMIT, ROWS, aligned_batch, attached_model, packed_batch
from tests.helpers.rows import chat, write_rows
from tests.helpers.steps import (
    assert_same,
    loss_and_gradients,
    make_batch,
)
from tests.helpers.tasks import EncodedTask
from tests.helpers.variants import slow_except


@pytest.mark.parametrize(
    ("batch", "family", "policy"),
    [
        # our attention, soft capping, sliding windows
        *(("packed", family, "none") for family in ("qwen3", "gemma2", "gemma3_text")),
        ("packed", "qwen3", "block"),
        *slow_except([("packed", "gemma3_text", "block")]),
        *(("aligned", "qwen3", policy) for policy in ("none", "selective", "block")),
        ("aligned", "llama", "block"),
        ("packed", "smollm3", "none"),
        ("aligned", "smollm3", "none"),
        ("aligned", "gemma3_text", "none"),
    ],
)
def test_packed_rows_have_the_loss_and_gradients_of_rows_alone(batch, family, policy):
    attached, head = attached_model(family, policy == "block")
    if policy == "selective":
        attached.recompute(policy)
    packed = packed_batch() if batch == "packed" else aligned_batch()
    if batch == "packed":
        assert packed.inputs["segments"].max() > 2
    else:
        assert sum(map(len, packed.layout)) >= len(ROWS)

    alone = [make_batch(ROWS, [i], 1, LIMIT) for i in range(len(ROWS))]
    loss, gradients = loss_and_gradients(attached.model, head, [packed])
    expected, expected_gradients = loss_and_gradients(attached.model, head, alone)
    assert abs(loss / expected - 1) < 1e-6
    assert_same(gradients, expected_gradients)


def test_packed_rows_are_scored_row_by_row_as_alone():
    attached, head = attached_model("qwen3")
    packed = Scorer(attached.model, head).score([packed_batch()])
    alone = Scorer(attached.model, head).score([make_batch(ROWS, range(len(ROWS)), 8, LIMIT)])
    assert packed.rows == alone.rows == len(ROWS) and packed.targets == alone.targets
    assert packed.nll == pytest.approx(alone.nll, rel=1e-6)
    assert packed.ppl_se == pytest.approx(alone.ppl_se, rel=1e-4)


def test_packing_a_recurrent_model_is_rejected():
    sizes = {"intermediate_size": 128, "state_size": 8, "conv_kernel": 4, "time_step_rank": 4}
    base = base_of("mamba", **sizes, use_bias=False, use_conv_bias=True)
    attached = attach(base, LoRAConfig(rank=2, target_modules=("in_proj",)))
    with raises("unsupported", "packing", "mamba", "ArraysCache"):
        check_packing(attached, None, 64, 128)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packing_is_rejected_where_positions_run_on_or_a_row_sees_another(monkeypatch, family):
    def causal(self, N, return_array=True, window_size=None):
        return (mx.arange(N)[:, None] >= mx.arange(N))[None, None]

    if family == "llama":
        monkeypatch.setattr(SegmentCache, "make_mask", causal)
    attached = attach(base_of(family), LoRAConfig(rank=2))
    with raises("unsupported", "packing", family, "at position 0"):
        check_packing(attached, split_head(attached.model), 64, 128)


def test_packing_is_rejected_where_far_positions_differ(monkeypatch):
    """As in families that scale their queries by position, far from the first one alone."""
    whole = PhiAttention.__call__

    def scaled(self, x, mask=None, cache=None):
        far = cache is not None and cache.offset > 30
        return whole(self, x * 1.01 if far else x, mask, cache)

    monkeypatch.setattr(PhiAttention, "__call__", scaled)
    attached = attach(base_of("phi", **SMALL_FAMILIES["phi"]), LoRAConfig(rank=2))
    model = attached.model
    check_packing(attached, split_head(model), 40, 128)
    with raises("unsupported", "packing", "at position 47"):
        check_packing(attached, split_head(model), 64, 128)


PACKED = TrainConfig(
    iters=4,
    batch_size=2,
    max_seq_length=96,
    packing=True,
    learning_rate=1e-3,
    lr_schedule="constant",
    matmul_path="dense",
    steps_per_eval=2,
    save_every=2,
    share_prefix="off",
)


@pytest.fixture
def ragged_chats(tmp_path):
    turns = [chat(f"Say {i}.", "yes " * (i % 7 + 1)) for i in range(40)]
    return write_rows(tmp_path / "rows", train=turns, valid=turns[:4])


def test_packed_run_says_how_full_it_is_and_plans_its_own_shapes(ragged_chats):
    task = EncodedTask(small_base(), ragged_chats, PACKED, LoRAConfig())
    assert re.search(r"40 examples packed into \d+ sequences of 96 \(\d.* % full\)", task.lines)
    assert " supervised tokens" in task.lines
    assert {width for width, _ in task.data[0].shapes()} == {95}


def test_no_thread_is_left_when_a_run_breaks_off(ragged_chats, tmp_path, monkeypatch):
    def fail(line):
        assert any(t.name.startswith("ahead") for t in threading.enumerate())
        raise KeyboardInterrupt

    observe(monkeypatch, on_step=fail)
    with pytest.raises(KeyboardInterrupt):
        train_pack(small_base(), ragged_chats, LoRAConfig(rank=2), PACKED, tmp_path / "p")
    assert not any(t.name.startswith("ahead") for t in threading.enumerate())


@pytest.mark.nightly(seconds=30)
@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++ on CPUs")
def test_packed_steps_are_the_same_compiled_and_uncompiled():
    code = """
from mlx_packs.config.schema import TrainConfig
from mlx_packs.ops.span_attention import span_attention
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.steps import largest_difference, lm_stepper
from tests.helpers.packing import attached_model, packed_batch
def steps():
    mx.random.seed(7)
    attached, head = attached_model("qwen3", recompute=True)
    optimizer = make_optimizer(TrainConfig(optimizer="sgd", learning_rate=0.1, iters=1))
    optimizer.init(attached.model.trainable_parameters())
    stepper = lm_stepper(attached.model, optimizer, head=head)
    for _ in range(2):
        stepper(packed_batch(), True, True)
    return attached.tensors(), stepper.traces
mx.disable_compile(); plain, none = steps()
mx.enable_compile(); compiled, one = steps()
print(largest_difference(plain, compiled), none, one)
"""

    difference, *traces = run_python(code).split()
    assert float(difference) < 1e-6 and traces == ["0", "1"]
