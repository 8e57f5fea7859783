"""Passes over rows of several models, against each model alone."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mlx_packs.errors import PackError
from mlx_packs.serving.slots import PackSlots
from mlx_packs.serving.train import passes
from mlx_packs.serving.train.batches import Row, RowLimits, batch_of, checked_row, padded_width
from mlx_packs.serving.train.losses import LOSSES, settings_of
from mlx_packs.serving.train.passes import Part, Pass, share_a_pass
from mlx_packs.serving.train.trainer import AdamStep, Adapters, Trainer
from mlx_packs.serving.train.wire import RawDatum
from tests.helpers.bases import dense_tiny, first_blocks, small_base
from tests.helpers.families import family_base

STEP = AdamStep(1e-3, (0.9, 0.95), 1e-12, 0.0, 0.0)
CROSS = "cross_entropy"
TEXT = """A tuple is an ordered list that cannot be changed. A list of names is empty at first, and
a table has a row for each of them; the rows are in the order in which they came."""
GIVEN = {"gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}}


@dataclass
class Client:
    """A model with the rows and the loss of its next call."""

    model: object
    rows: list[Row]
    loss: str

    def part(self, width: int) -> Part:
        batch = batch_of(self.rows, range(len(self.rows)), width)
        return Part(self.model, batch, LOSSES[self.loss])


def rows_of(lengths: Sequence[int], loss: str, seed: int, sampled: Sequence = ()) -> list[Row]:
    """Parts of a text with what a loss reads; ``sampled`` has their log-probabilities."""
    generator = np.random.default_rng(seed)
    settings = settings_of(LOSSES[loss], GIVEN.get(loss, {}))
    text = dense_tiny().tokenizer.encode(TEXT)
    rows = []
    for i, length in enumerate(lengths):
        start = seed + 3 * i
        tokens = np.array(text[start : start + length + 1])
        inputs = {"target_tokens": tokens[1:]}
        if sampled:
            noise = generator.normal(size=length).astype(np.float32)
            inputs |= {"advantages": 1 + 0.5 * noise, "logprobs": sampled[i] + 0.1 * noise}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(length, np.float32)
        datum = RawDatum(tokens[:-1].astype(np.int32), inputs)
        rows.append(checked_row(i, datum, LOSSES[loss], settings, RowLimits(64, 4096)))
    return rows


def client(trainer: Trainer, adapters: Adapters, lengths: Sequence[int], loss: str) -> Client:
    """A model that was updated once, so that all factors have a gradient."""
    made = Client(trainer.create(adapters), rows_of(lengths, CROSS, adapters.seed), CROSS)
    (done,) = alone(trainer, [made])
    trainer.add(made.model, done.grads)
    trainer.update(made.model, STEP)
    if loss != CROSS:
        (done,) = alone(trainer, [made], backward=False)
        made.rows = rows_of(lengths, loss, adapters.seed, done.logprobs)
        made.loss = loss
    return made


def alone(trainer: Trainer, clients: list[Client], backward: bool = True) -> list[Pass]:
    return [trainer.run([each.part(padded_width(each.rows))], backward)[0] for each in clients]


def together(trainer: Trainer, clients: list[Client], backward: bool = True) -> list[Pass]:
    width = padded_width([row for each in clients for row in each.rows])
    return trainer.run([each.part(width) for each in clients], backward)


def assert_same(actual: Pass, expected: Pass) -> None:
    """Up to the rounding of float32, which padding a model alone changes as much."""
    assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
    for values, others in zip(actual.logprobs, expected.logprobs, strict=True):
        assert np.linalg.norm(values - others) <= 1e-6 * np.linalg.norm(others)

    assert actual.grads.keys() == expected.grads.keys()
    pairs = [(np.array(grad), np.array(expected.grads[n])) for n, grad in actual.grads.items()]
    assert all(np.abs(other).max() > 0 for _, other in pairs)
    difference = np.linalg.norm([np.linalg.norm(grad - other) for grad, other in pairs])
    assert difference <= 2e-6 * np.linalg.norm([np.linalg.norm(other) for _, other in pairs])


def slots_of(kind: str) -> PackSlots:
    if kind == "own head":
        return PackSlots(small_base(tie_word_embeddings=False))
    return PackSlots(first_blocks(2), "quantized" if kind == "quantized" else "dense")


@pytest.fixture(scope="module", params=["dense", "quantized", "own head"])
def trainer(request):
    slots = slots_of(request.param)
    yield Trainer(slots)
    slots.close()


def test_each_model_is_what_it_is_alone(trainer):
    """With other ranks, layers, losses, numbers of rows and lengths."""
    clients = [
        client(trainer, Adapters(4, 1), (9,), CROSS),
        client(trainer, Adapters(16, 2), (14, 5), "ppo"),
        client(trainer, Adapters(2, 3, train_mlp=False), (7, 7), "gspo"),
    ]
    names = [name for name, _ in trainer._base.model.named_modules()]
    for actual, expected in zip(together(trainer, clients), alone(trainer, clients), strict=True):
        assert_same(actual, expected)

    assert [name for name, _ in trainer._base.model.named_modules()] == names
    assert not trainer._base.model.training
    forward = together(trainer, clients[1:], backward=False)
    for actual, expected in zip(forward, alone(trainer, clients[1:]), strict=True):
        assert actual.loss == pytest.approx(expected.loss, rel=1e-6) and actual.grads is None


def test_several_targets_of_a_token_are_the_sum_of_one_by_one(trainer):
    """In a pass with a model whose tokens have one target each."""
    model = client(trainer, Adapters(4, 1), (9, 6), CROSS)
    other = client(trainer, Adapters(4, 2), (7,), CROSS)
    columns = [np.roll(np.arange(9), shift) for shift in (0, 2, 5)]
    text = model.rows[0].tokens
    many = [row_with(text, np.stack([text[order] for order in columns], axis=1)), model.rows[1]]
    single = [row_with(text, text[order]) for order in columns] + [model.rows[1]]

    done, beside = together(trainer, [replace(model, rows=many), other])
    (expected,) = alone(trainer, [replace(model, rows=single)])
    assert_same(beside, alone(trainer, [other])[0])
    assert done.logprobs[0].shape == (9, 3)
    np.testing.assert_allclose(done.logprobs[0], np.stack(expected.logprobs[:3], axis=1), rtol=1e-5)
    assert done.loss == pytest.approx(expected.loss, rel=1e-6)
    difference = sum(np.square(done.grads[n] - grad).sum() for n, grad in expected.grads.items())
    norm = sum(np.square(grad).sum() for grad in expected.grads.values())
    assert 0 < norm and difference <= 1e-10 * norm


def row_with(tokens: np.ndarray, targets: np.ndarray) -> Row:
    datum = RawDatum(tokens, {"target_tokens": targets})
    return checked_row(0, datum, LOSSES[CROSS], {}, RowLimits(64, 4096))


def test_updates_after_a_joint_pass_are_of_each_model_alone(trainer):
    """The factors are where the optimizer finds them, and a pass together changes none."""
    clients = [client(trainer, Adapters(4, seed), (9, 4), CROSS) for seed in (1, 2)]
    before = [dict(each.model.attached.tensors()) for each in clients]
    done = together(trainer, clients)
    for each, tensors, result in zip(clients, before, done, strict=True):
        for name, tensor in each.model.attached.tensors().items():
            np.testing.assert_array_equal(np.array(tensor), np.array(tensors[name]))
        trainer.add(each.model, result.grads)
        assert trainer.update(each.model, STEP) > 0
    assert all(
        later.loss < earlier.loss
        for later, earlier in zip(together(trainer, clients), done, strict=True)
    )


def test_what_is_not_finite_is_an_error_of_its_own_model(trainer):
    clients = [client(trainer, Adapters(4, seed), (9, 4), CROSS) for seed in (1, 2)]
    expected = alone(trainer, clients)
    weights = np.full(9, 3e38, np.float32)
    clients[0].rows[0] = replace(clients[0].rows[0], inputs={"weights": weights})
    fault, other = together(trainer, clients)
    assert isinstance(fault, PackError) and "not finite" in str(fault)
    assert_same(other, expected[1])


def test_models_that_cannot_share_a_pass():
    slots = slots_of("own head")
    try:
        trainer = Trainer(slots)
        head, plain = (trainer.create(Adapters(4, 0, train_unembed=own)) for own in (True, False))
        assert not share_a_pass(head, plain) and share_a_pass(plain, plain)
        assert trainer.can_share([], head) and not trainer.can_share([plain], head)
    finally:
        slots.close()


@pytest.mark.parametrize("family", ["gpt2", "phi3", "qwen3_moe", "mamba2"])
def test_other_families(family):
    """Fused projections, mixtures of experts and recurrent blocks."""
    slots = PackSlots(family_base(family))
    trainer = Trainer(slots)
    clients = []
    for seed, lengths in enumerate([(7,), (12, 5)]):
        tokens = np.random.default_rng(seed).integers(1, 60, 13)
        datums = [
            RawDatum(tokens[:n].astype(np.int32), {"target_tokens": tokens[1 : n + 1]})
            for n in lengths
        ]
        rows = [checked_row(0, each, LOSSES[CROSS], {}, RowLimits(64, 64)) for each in datums]
        made = Client(trainer.create(Adapters(2 + seed, seed)), rows, CROSS)
        trainer.add(made.model, alone(trainer, [made])[0].grads)
        trainer.update(made.model, STEP)
        clients.append(made)

    assert trainer.can_share([clients[0].model], clients[1].model)
    width = padded_width([row for each in clients for row in each.rows])
    padded = [trainer.run([each.part(width)], backward=True)[0] for each in clients]
    for actual, expected in zip(together(trainer, clients), padded, strict=True):
        assert_same(actual, expected)
    slots.close()


@pytest.mark.parametrize(("family", "matters"), [("gear", True), ("gpt2", False)])
def test_models_share_no_pass_where_padding_changes_a_row(family, matters):
    """As in a family whose attention has a wrong mask in mlx-lm."""
    slots = PackSlots(family_base(family))
    trainer = Trainer(slots)
    models = [trainer.create(Adapters(2, seed)) for seed in (0, 1)]
    assert share_a_pass(*models)
    assert trainer.can_share(models[:1], models[1]) is not matters
    slots.close()


def test_padding_matters_where_rope_depends_on_the_length(monkeypatch):
    reason = "its RoPE depends on the length of a row"
    monkeypatch.setattr(passes, "why_length_matters", lambda *_: reason)
    assert passes.padding_matters(first_blocks(1).model)


def test_models_leave_memory_after_a_joint_pass():
    slots = slots_of("own head")
    trainer = Trainer(slots)
    clients = [client(trainer, Adapters(4, seed), (9, 4), CROSS) for seed in (1, 2)]
    together(trainer, clients)
    trainer.add(clients[0].model, together(trainer, clients)[0].grads)
    trainer.update(clients[0].model, STEP)

    groups = [weakref.ref(group) for each in clients for group in each.model.groups.values()]
    clients.clear()
    gc.collect()
    assert groups and not any(group() for group in groups)
    slots.close()
