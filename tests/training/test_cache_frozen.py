"""Runs with cached frozen activations: the same weights, resumed or not, and the base as it was."""

import dataclasses
import itertools

import pytest

from mlx_packs import LoRAConfig, train_pack
from mlx_packs.reading import sha256
from tests.helpers.cached_model import changed
from tests.helpers.observers import observe
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import TRAIN
from tests.helpers.variants import slow_except

LORA = LoRAConfig(rank=4, num_layers=1, dropout=0.1)
RUN = changed(TRAIN, iters=8, save_every=50, val_batches=0, test_batches=1, cache_frozen="on")


ANSWERS = ("Yes.", "No, not at all.", "I will see.", "Ask me again.", "Fine", "Go on, then.")


@pytest.fixture
def varied_chats(tmp_path):
    chats = [chat("Is it so?", answer) for answer in ANSWERS]
    return write_rows(tmp_path / "rows", train=chats, test=chats[:1])


def adapters(run) -> str:
    return sha256(run.pack.path / "adapters.safetensors")


# in the first epoch, later
@pytest.mark.parametrize(("packing", "stop"), slow_except([(True, 2), (False, 5)], (False, 5)))
def test_resumed_run_with_a_cache_equals_an_unbroken_one_and_one_without(
    small, varied_chats, tmp_path, packing, stop
):
    train = changed(RUN, packing=packing)
    uninterrupted = train_pack(small, varied_chats, LORA, train, tmp_path / "a")
    assert uninterrupted.report["cache_frozen"]["rows_computed"] == 6
    without = changed(train, cache_frozen="off")
    uncached = train_pack(small, varied_chats, LORA, without, tmp_path / "c")
    assert uncached.report["cache_frozen"] is None
    train_pack(small, varied_chats, LORA, changed(train, iters=stop), tmp_path / "b")
    resumed = train_pack(small, varied_chats, LORA, train, tmp_path / "b", resume=True)
    assert adapters(resumed) == adapters(uninterrupted)
    assert packing or adapters(uncached) == adapters(uninterrupted)


def test_a_run_leaves_the_base_as_it_was(shared_tiny, varied_chats, tmp_path, monkeypatch):
    """Here its quantized modules are replaced by dense ones, besides."""
    before = dict(shared_tiny.model.named_modules())

    def stop(line):
        raise KeyboardInterrupt

    once = changed(RUN, iters=1)
    train_pack(shared_tiny, varied_chats, LORA, once, tmp_path / "a")
    observe(monkeypatch, on_step=stop)
    with pytest.raises(KeyboardInterrupt):
        train_pack(shared_tiny, varied_chats, LORA, once, tmp_path / "b")
    after = dict(shared_tiny.model.named_modules())
    assert list(after) == list(before)
    assert all(after[path] is module for path, module in before.items())


POLICIES = ({"recompute": "none"}, {"recompute": "selective"}, {"grad_checkpoint": True})
COMBINATIONS = [*itertools.product((False, True), ("off", "on"), POLICIES)]


@pytest.mark.parametrize(
    ("last_k", "combinations"),
    [
        pytest.param(2, [COMBINATIONS[i] for i in (0, 9)], id="last 2, some"),
        pytest.param(None, COMBINATIONS, id="all", marks=pytest.mark.slow),
    ],
)
def test_every_combination_learns_the_same(small, varied_chats, tmp_path, last_k, combinations):
    """An update of a whole epoch does not depend on how its rows are laid out or recomputed."""
    results = []
    for packing, cache, policy in combinations:
        batches = 2 if packing else 3  # of an epoch
        train = changed(
            RUN,
            batch_size=1 if packing else 2,
            packing=packing,
            cache_frozen=cache,
            ce_last_k=last_k,
            **policy,
            iters=2 * batches,
            grad_accumulation_steps=batches,
            steps_per_report=batches,
        )

        lora = dataclasses.replace(LORA, dropout=0.0)
        run = train_pack(small, varied_chats, lora, train, tmp_path / str(len(results)))
        assert (run.report["steps"], run.report["batches"]) == (2, 2 * batches)
        assert (run.report["cache_frozen"] is None) == (cache == "off")
        losses = [line["loss"] for line in run.curve if "loss" in line]
        results.append((run.report["trained_tokens"], losses))

    (targets, plain), *others = results
    assert plain[0] > plain[-1]
    for other, curve in others:
        assert other == targets
        assert curve == pytest.approx(plain, rel=2e-5)
