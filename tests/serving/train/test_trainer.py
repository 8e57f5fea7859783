"""The trainer on a base whose head is its own, without a server."""

from dataclasses import replace

import numpy as np
import pytest

from mlx_packs.errors import PackError
from mlx_packs.serving.slots import PackSlots
from mlx_packs.serving.train.batches import RowLimits, batch_of, checked_row
from mlx_packs.serving.train.losses import LOSSES
from mlx_packs.serving.train.passes import Part
from mlx_packs.serving.train.trainer import AdamStep, Adapters, Trainer
from mlx_packs.serving.train.wire import RawDatum
from tests.helpers.bases import small_base
from tests.helpers.packs import random_pack

STEP = AdamStep(1e-2, (0.9, 0.95), 1e-12, 0.0, 0.0)


@pytest.fixture
def slots():
    slots = PackSlots(small_base(tie_word_embeddings=False))
    yield slots
    slots.close()


def batch(inputs: dict | None = None):
    tokens = np.array([5, 6, 7, 8], np.int32)
    datum = RawDatum(tokens, {"target_tokens": tokens[::-1].astype(np.int64), **(inputs or {})})
    row = checked_row(0, datum, LOSSES["cross_entropy"], {}, RowLimits(16, 4096))
    return batch_of([row], [0], 8)


def run(trainer: Trainer, model, backward: bool = True):
    """Compute the batch alone."""
    (done,) = trainer.run([Part(model, batch(), LOSSES["cross_entropy"])], backward)
    return done


def test_the_head_is_adapted_and_its_pack_is_served(slots):
    trainer = Trainer(slots)
    model = trainer.create(Adapters(rank=4, seed=0))
    assert "lm_head" in model.attached.specs
    losses = []
    for _ in range(3):
        done = run(trainer, model)
        losses.append(done.loss)
        trainer.add(model, done.grads)
        assert trainer.update(model, STEP) > 0
    assert losses[2] < losses[1] < losses[0]
    assert slots.add(trainer.pack(model)) == 0


def test_served_packs_are_off_the_base_for_the_time_of_a_batch(slots):
    trainer = Trainer(slots)
    alone = trainer.create(Adapters(4, 0))
    before = run(trainer, alone, backward=False).loss

    slots.add(random_pack_of(slots))
    names = [name for name, _ in slots.base.model.named_modules()]
    other = trainer.create(Adapters(8, 1, train_unembed=False))
    for model in (alone, other):
        assert run(trainer, model, backward=False).loss == before
    assert [name for name, _ in slots.base.model.named_modules()] == names
    assert not slots.base.model.training


def random_pack_of(slots: PackSlots):
    with slots.lifted():
        return random_pack(slots.base, size=1.0)


def test_a_pack_with_more_than_lora_is_not_trained(slots):
    with slots.lifted():
        pack = random_pack(slots.base, targets=("embed_tokens", "q_proj"))
    with pytest.raises(PackError, match="is an embedding"):
        Trainer(slots).of_pack(pack, None)


def test_the_optimizer_of_other_adapters(slots):
    trainer = Trainer(slots)
    state = trainer.state_of(trainer.create(Adapters(4, 0)))
    pack = trainer.pack(trainer.create(Adapters(8, 0)))
    with pytest.raises(PackError, match="of other adapters"):
        trainer.of_pack(pack, state)


def test_a_failed_batch_leaves_the_base_as_it_was(slots, monkeypatch):
    trainer = Trainer(slots)
    model = trainer.create(Adapters(4, 0))
    names = [name for name, _ in slots.base.model.named_modules()]
    monkeypatch.setattr("mlx_packs.serving.train.passes.target_logprobs", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(trainer, model)
    assert [name for name, _ in slots.base.model.named_modules()] == names
    assert not slots.base.model.training and model.grads is None


def test_each_update_has_its_own_settings(slots):
    """What is kept of an update, compiled on a GPU, is of its settings and of no others."""
    trainer = Trainer(slots)
    models = [trainer.create(Adapters(4, 0)) for _ in range(2)]
    changes = [{}, {"max_grad_norm": 0.1}, {"betas": (0.5, 0.6)}, {"learning_rate": 1e-3}, {}]
    for change in changes:
        for model in models:
            trainer.add(model, run(trainer, model).grads)
            trainer.update(model, replace(STEP, **change))
        models[1].updates.clear()

    kept, anew = (model.attached.tensors() for model in models)
    assert all(np.array_equal(np.array(kept[name]), np.array(anew[name])) for name in anew)
    assert len(models[0].updates) == 1
