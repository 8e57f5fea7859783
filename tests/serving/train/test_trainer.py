"""The trainer on a base whose head is its own, without a server."""

import gc
import weakref

import numpy as np
import pytest

from mlx_packs.errors import PackError
from mlx_packs.serving.slots import PackSlots
from mlx_packs.serving.train.losses import LOSSES, Datum
from mlx_packs.serving.train.models import Trainer
from mlx_packs.serving.train.protocol import AdamBody, LoraConfigBody
from tests.helpers.bases import small_base
from tests.helpers.families import family_base
from tests.helpers.packs import random_pack

LOSS = LOSSES["cross_entropy"]
STEP = AdamBody(learning_rate=1e-2)


@pytest.fixture
def slots():
    slots = PackSlots(small_base(tie_word_embeddings=False))
    yield slots
    slots.close()


@pytest.fixture
def trainer(slots):
    return Trainer(slots)


def create(trainer: Trainer, rank: int = 4, **options: object):
    return trainer.create(LoraConfigBody(rank=rank, **{"seed": 0, **options}))


def row(tokens: list[int]) -> Datum:
    numbers = np.array(tokens, np.int32)
    return Datum(numbers, numbers[::-1], {"weights": np.ones(len(tokens), np.float32)})


def run(trainer: Trainer, model, backward: bool = True, rows: tuple = ()):
    return trainer.run(model, rows or [row([5, 6, 7, 8])], LOSS, backward)


def test_the_head_is_adapted_and_its_pack_is_served(slots, trainer):
    model = create(trainer)
    assert "lm_head" in model.attached.specs
    losses = []
    for _ in range(3):
        done = run(trainer, model)
        losses.append(done[0])
        model.add(done[2])
        assert trainer.update(model, STEP) > 0
    assert losses[2] < losses[1] < losses[0]
    assert slots.add(trainer.pack(model)) == 0


def test_served_packs_are_off_the_base_for_the_time_of_a_batch(slots, trainer):
    alone = create(trainer)
    before = run(trainer, alone, backward=False)[0]

    with slots.lifted():
        pack = random_pack(slots.base, size=1.0)
    slots.add(pack)
    names = [name for name, _ in slots.base.model.named_modules()]
    other = create(trainer, 8, seed=1, train_unembed=False)
    for model in (alone, other):
        assert run(trainer, model, backward=False)[0] == before
    assert [name for name, _ in slots.base.model.named_modules()] == names
    assert not slots.base.model.training


def test_a_pack_with_more_than_lora_is_not_trained(slots, trainer):
    with slots.lifted():
        pack = random_pack(slots.base, targets=("embed_tokens", "q_proj"))
    with pytest.raises(PackError, match="is an embedding"):
        trainer.of_pack(pack, None)


def test_the_optimizer_of_other_adapters(trainer):
    state = trainer.state_of(create(trainer))
    pack = trainer.pack(create(trainer, 8))
    with pytest.raises(PackError, match="of other adapters"):
        trainer.of_pack(pack, state)


def test_each_update_has_its_own_settings(trainer):
    """What is kept of an update, compiled on a GPU, is of its settings and of no others."""
    models = [create(trainer) for _ in range(2)]
    changes = [{}, {"grad_clip_norm": 0.1}, {"beta1": 0.5}, {"learning_rate": 1e-3}, {}]
    for change in changes:
        for model in models:
            model.add(run(trainer, model)[2])
            trainer.update(model, STEP.model_copy(update=change))
        models[1].updates.clear()

    kept, anew = (model.attached.tensors() for model in models)
    assert all(np.array_equal(np.array(kept[name]), np.array(anew[name])) for name in anew)
    assert len(models[0].updates) == 1


@pytest.mark.parametrize("family", ["gpt2", "phi3", "qwen3_moe", "mamba2"])
def test_other_families_learn(family):
    slots = PackSlots(family_base(family))
    trainer = Trainer(slots)
    model = create(trainer, 2)
    rows = tuple(row(tokens) for tokens in ([5, 6, 7, 8], [9, 4]))
    first = run(trainer, model, rows=rows)
    model.add(first[2])
    assert trainer.update(model, STEP) > 0
    assert run(trainer, model, rows=rows)[0] < first[0]
    slots.close()


def test_models_leave_memory(trainer):
    model = create(trainer)
    model.add(run(trainer, model)[2])
    trainer.update(model, STEP)
    groups = [weakref.ref(place.lora) for place in model.attached.places.values()]
    del model
    gc.collect()
    assert groups and not any(group() for group in groups)
