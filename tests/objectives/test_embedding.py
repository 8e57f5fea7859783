"""objectives/embedding.py: each loss against its definition, padding, mini-batches."""

import math

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.full import unfreeze
from mlx_packs.data.formats import Row
from mlx_packs.data.pairs import PairCollate, encode_pairs
from mlx_packs.objectives.embedding import (
    EmbeddingObjective,
    cosent_loss,
    cosine_loss,
    ranking_loss,
    triplet_loss,
)
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.runtime import mx
from tests.helpers.encoders import all_pairs, all_scored, all_triplets
from tests.helpers.steps import moved

B, D = 5, 7


def columns(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(count)
    return [random.standard_normal((B, D)).astype(np.float32) for _ in range(count)]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


SCORES = [0.1, 0.9, 0.5, 0.5, -1.0]


def check_loss(loss, texts: list[np.ndarray], wanted: float) -> None:
    """As they are, and with two rows of padding, all of them alike."""
    for more in (0, 2):
        padding = np.ones((more, D), np.float32)
        arrays = [mx.array(np.concatenate([c, padding])) for c in texts]
        scores = mx.array([*SCORES, 7.0, 0.0][: B + more])
        result = loss(arrays, mx.array([1.0] * B + [0.0] * more), scores)
        assert result.item() == pytest.approx(wanted, rel=1e-5)


def test_cosine_loss_is_the_squared_error_of_the_cosine():
    a, b = columns(2)
    wanted = sum((cosine(a[i], b[i]) - SCORES[i]) ** 2 for i in range(B))
    check_loss(cosine_loss, [a, b], wanted)


def test_cosent_loss_compares_pairs_in_the_order_of_their_scores():
    a, b = columns(2)
    total = 1.0
    for i in range(B):
        for j in range(B):
            if SCORES[i] < SCORES[j]:
                total += math.exp(3 * (cosine(a[i], b[i]) - cosine(a[j], b[j])))
    check_loss(lambda *values: cosent_loss(*values, 3.0), [a, b], B * math.log(total))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_ranking_loss_is_the_cross_entropy_over_the_batch(count):
    result = columns(count)
    candidates = np.concatenate(result[1:])
    wanted = 0.0
    for i in range(B):
        logits = [20 * cosine(result[0][i], candidate) for candidate in candidates]
        wanted += math.log(sum(map(math.exp, logits))) - logits[i]
    check_loss(lambda texts, weights, _: ranking_loss(texts, weights, 20.0), result, wanted)


FAR = {
    "euclidean": lambda a, b: np.linalg.norm(a - b),
    "cosine": lambda a, b: 1 - cosine(a, b),
    "manhattan": lambda a, b: np.abs(a - b).sum(),
}


@pytest.mark.parametrize("distance", FAR)
@pytest.mark.parametrize("negatives", [1, 3])
def test_triplet_loss_is_a_hinge_of_distances(distance, negatives):
    """Of several negatives it is the mean."""
    a, p, *others = columns(2 + negatives)
    far = FAR[distance]
    hinges = [max(0.0, far(a[i], p[i]) - far(a[i], n[i]) + 0.5) for i in range(B) for n in others]

    def loss(texts, weights, _):
        return triplet_loss(texts, weights, 0.5, distance)

    check_loss(loss, [a, p, *others], sum(hinges) / negatives)


@pytest.mark.parametrize("distance", FAR)
def test_texts_that_are_alike_have_finite_gradients(distance):
    same = mx.ones((3, D))
    gradient = mx.grad(lambda x: triplet_loss([x, x, same], mx.ones((3,)), 1.0, distance))(same)
    assert mx.isfinite(gradient).all().item()


LOSSES = {
    "cosine": all_scored,
    "cosent": all_scored,
    "mnrl": all_pairs,
    "cached-mnrl": all_triplets,
    "triplet": all_triplets,
}


def gradients(base, name: str, rows: list[dict], size: int, **settings) -> tuple[float, dict]:
    """Loss and gradients of the adapters for a batch of ``size`` rows, some of them padding."""
    pairs = encode_pairs([Row("test", row) for row in rows], base.tokenizer, 48)
    batch = PairCollate(size, 48)(pairs, range(len(rows)))
    train = TrainConfig(task="embedding", **settings)
    objective = EmbeddingObjective(base.model, name, train)
    base.model.train()
    (value, _), result = nn.value_and_grad(base.model, objective.loss)(arrays_of(batch))
    return value.item(), {name: np.array(g) for name, g in tree_flatten(result)}


@pytest.fixture
def adapted_encoder(encoder):
    """A base with adapters that do something."""
    return moved(attach(load_base(encoder), LoRAConfig(rank=4), None, "dense", 0)).base


def check_same(actual: dict, expected: dict) -> None:
    """Gradients agree to 1e-5."""
    assert set(actual) == set(expected)
    for key, wanted in expected.items():
        assert np.abs(actual[key] - wanted).max() < 1e-5 * (1 + np.abs(wanted).max()), key


@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_padding_change_neither_loss_nor_gradient(adapted_encoder, name):
    rows = LOSSES[name]()[:6]
    loss, plain = gradients(adapted_encoder, name, rows, 6)
    padded_loss, with_padding = gradients(adapted_encoder, name, rows, 9)
    assert padded_loss == pytest.approx(loss, rel=1e-5)
    check_same(with_padding, plain)


@pytest.mark.parametrize(("rows", "size"), [(all_pairs, 1), (all_pairs, 50), (all_triplets, 3)])
def test_cached_ranking_has_the_gradients_of_the_whole_batch(adapted_encoder, rows, size):
    loss, whole = gradients(adapted_encoder, "mnrl", rows()[:8], 8)
    cached_loss, cached = gradients(
        adapted_encoder, "cached-mnrl", rows()[:8], 8, mini_batch_size=size
    )
    assert cached_loss == pytest.approx(loss, rel=1e-6)
    check_same(cached, whole)


@pytest.mark.parametrize("policy", ["none", "block"])
def test_all_weights_get_the_gradients_of_plain_autograd(encoder, policy):
    base = load_base(encoder)
    rows = all_pairs()[:8]
    base.model.unfreeze()
    _, plain = gradients(base, "mnrl", rows, 8)
    base.model.freeze()
    learning = unfreeze(base)
    learning.recompute(policy)
    for name, settings in (("mnrl", {}), ("cached-mnrl", {"mini_batch_size": 3})):
        _, result = gradients(base, name, rows, 8, **settings)
        check_same({key.replace(".block.", "."): g for key, g in result.items()}, plain)
    assert set(learning.tensors()) == set(plain)


def test_cached_ranking_drops_the_same_inputs_on_the_way_back(encoder):
    """The gradient is the slope of the loss with the inputs that the forward dropped."""
    base = load_base(encoder)
    attached = attach(base, LoRAConfig(rank=4, dropout=0.5), None, "dense", 0)

    def at(step: float, direction: dict) -> tuple[float, dict]:
        tensors = {n: t + step * direction.get(n, 0) for n, t in start.items()}
        attached.load(tensors, "test")
        mx.random.seed(1)  # the same masks in every forward
        return gradients(base, "cached-mnrl", all_pairs()[:6], 6, mini_batch_size=2)

    start = attached.tensors()
    _, result = at(0.0, {})
    base.model.update(tree_unflatten([(n, mx.array(g)) for n, g in result.items()]))
    slopes = {n: t for n, t in attached.tensors().items() if n.endswith("lora_b")}
    length = mx.sqrt(sum(t.square().sum() for t in slopes.values())).item()
    direction = {n: t / length for n, t in slopes.items()}
    rise = at(1e-2, direction)[0] - at(-1e-2, direction)[0]
    assert rise / 2e-2 == pytest.approx(length, rel=0.02)
