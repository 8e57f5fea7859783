"""Losses against their formulas, in NumPy, and log-probabilities by each kind of head."""

import numpy as np
import pytest

from mlx_packs.objectives.causal_lm import Head, split_head
from mlx_packs.ops.linear_cross_entropy import cross_entropy
from mlx_packs.runtime import mx
from mlx_packs.serving.train.losses import LOSSES, target_logprobs
from tests.helpers.bases import first_blocks, small_base

RNG = np.random.default_rng(0)
P, Q, A = (RNG.normal(size=7).astype(np.float32) for _ in range(3))


def expected() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    ratio = np.exp(P - Q)
    clipped = np.clip(ratio, 0.8, 1.2)
    passes = ratio * A <= clipped * A
    at_most = np.minimum(ratio, 4)
    return {
        "cross_entropy": (-P * A, -A),
        "importance_sampling": (-ratio * A, -ratio * A),
        "ppo": (-np.minimum(ratio * A, clipped * A), -ratio * A * passes),
        "cispo": (-at_most * A * P, -at_most * A),
    }


@pytest.mark.parametrize("name", LOSSES)
def test_terms_and_gradients(name):
    arrays = {"logprobs": Q, "advantages": A, "weights": A}
    inputs = {key: mx.array(values) for key, values in arrays.items()}

    def terms(logprobs: mx.array) -> mx.array:
        return LOSSES[name].terms(logprobs, inputs)

    values, derivatives = expected()[name]
    np.testing.assert_allclose(np.array(terms(mx.array(P))), values, rtol=1e-5, atol=1e-6)
    gradient = mx.grad(lambda logprobs: terms(logprobs).sum())(mx.array(P))
    np.testing.assert_allclose(np.array(gradient), derivatives, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["quantized", "dense", "trainable", "none"])
def test_logprobs_are_those_of_the_logits(kind):
    head = split_head(first_blocks(1).model if kind == "quantized" else small_base().model)
    width, vocab_size = head.frozen.width, head.frozen.vocab_size
    if kind == "trainable":
        head = Head(head.hidden, head.logits, None)
    elif kind == "none":
        head, width = None, vocab_size

    states = mx.random.normal((16, width), key=mx.random.key(0))
    targets = mx.array(RNG.integers(0, vocab_size, 16))
    weights = mx.random.uniform(shape=(16,), key=mx.random.key(2))

    def loss(compute):
        def weighted(states: mx.array) -> tuple[mx.array, mx.array]:
            logprobs = compute(states)
            return -(weights * logprobs).sum(), logprobs

        return mx.value_and_grad(weighted)(states)

    def plain(states: mx.array) -> mx.array:
        logits = states if head is None else head.logits(states)
        return -cross_entropy(logits, targets)

    (total, actual), grad = loss(lambda x: target_logprobs(head, x, targets, backward=True))
    (expected_total, expected), expected_grad = loss(plain)
    assert total.item() == pytest.approx(expected_total.item(), rel=1e-6)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    scale = mx.linalg.norm(expected_grad).item()
    assert mx.linalg.norm(grad - expected_grad).item() <= 1e-5 * scale

    forward = target_logprobs(head, states, targets, backward=False)
    np.testing.assert_allclose(forward, expected, rtol=1e-5, atol=1e-5)
