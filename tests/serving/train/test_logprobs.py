"""Log-probabilities of targets, by each kind of head."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_packs.objectives.causal_lm import Head, split_head
from mlx_packs.ops.linear_cross_entropy import cross_entropy
from mlx_packs.serving.train.losses import target_logprobs
from tests.helpers.bases import first_blocks, small_base

HEADS = ("quantized", "dense", "trainable", "none")


def head_of(kind: str) -> Head | None:
    if kind == "none":
        return None
    head = split_head(first_blocks(1).model if kind == "quantized" else small_base().model)
    if kind == "trainable":
        return Head(head.hidden, head.logits, None)
    return head


@pytest.mark.parametrize("kind", HEADS)
def test_logprobs_are_those_of_the_logits(kind):
    head = head_of(kind)
    frozen = split_head(small_base().model).frozen if head is None else head.frozen
    frozen = frozen or split_head(small_base().model).frozen
    width, vocab_size = frozen.width, frozen.vocab_size
    if head is None:
        width = vocab_size

    states = mx.random.normal((16, width), key=mx.random.key(0))
    targets = mx.array(np.random.default_rng(1).integers(0, vocab_size, 16))
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
