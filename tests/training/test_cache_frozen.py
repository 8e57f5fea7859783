"""Runs with cached frozen activations: the same weights, resumed or not, and the base as it was."""

from dataclasses import replace

import pytest

from mlx_packs import LoRAConfig, train_pack
from mlx_packs.reading import sha256
from tests.helpers.observers import observe
from tests.helpers.rows import chat
from tests.helpers.runs import TRAIN
from tests.helpers.variants import slow_except

ANSWERS = ("Yes.", "No, not at all.", "I will see.", "Ask me again.", "Fine", "Go on, then.")
CHATS = [chat("Is it so?", answer) for answer in ANSWERS]
DATA = {"train": CHATS, "test": CHATS[:1]}
LORA = LoRAConfig(rank=4, num_layers=1, dropout=0.1)
RUN = {"iters": 8, "save_every": 50, "val_batches": 0, "test_batches": 1, "cache_frozen": "on"}


def adapters(run) -> str:
    return sha256(run.pack.path / "adapters.safetensors")


# in the first epoch, later
@pytest.mark.parametrize(("packing", "stop"), slow_except([(True, 2), (False, 5)], (False, 5)))
def test_resumed_run_with_a_cache_equals_an_unbroken_one_and_one_without(train, packing, stop):
    settings = {**RUN, "data": DATA, "lora": LORA, "packing": packing}
    uninterrupted = train("a", **settings)
    assert uninterrupted.report["cache_frozen"]["rows_computed"] == 6
    uncached = train("c", **{**settings, "cache_frozen": "off"})
    assert uncached.report["cache_frozen"] is None
    train("b", **{**settings, "iters": stop})
    resumed = train("b", resume=True, **settings)
    assert adapters(resumed) == adapters(uninterrupted)
    assert packing or adapters(uncached) == adapters(uninterrupted)


def test_a_run_leaves_the_base_as_it_was(shared_tiny, here, monkeypatch):
    """Here its quantized modules are replaced by dense ones, besides."""
    before = dict(shared_tiny.model.named_modules())

    def stop(line):
        raise KeyboardInterrupt

    once = replace(TRAIN, **{**RUN, "iters": 1})
    train_pack(shared_tiny, DATA, LORA, once, "a")
    observe(monkeypatch, on_step=stop)
    with pytest.raises(KeyboardInterrupt):
        train_pack(shared_tiny, DATA, LORA, once, "b")
    after = dict(shared_tiny.model.named_modules())
    assert list(after) == list(before)
    assert all(after[path] is module for path, module in before.items())
