"""Log-probabilities of several targets per token, against a head that computes each on its own."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_packs.objectives.causal_lm import Head, frozen_head, split_head
from mlx_packs.ops import linear_cross_entropy
from mlx_packs.ops.linear_cross_entropy import cross_entropy
from mlx_packs.serving.train.logprobs import target_logprobs
from tests.helpers.bases import first_blocks, small_base

HEADS = ("quantized", "dense", "trainable", "none")


def head_of(kind: str) -> Head | None:
    if kind == "none":
        return None
    head = split_head(first_blocks(1).model if kind == "quantized" else small_base().model)
    if kind == "trainable":
        return Head(head.hidden, head.logits, None)
    return head


def targets_of(shapes: list[tuple[int, ...]], vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, vocab_size, shape).astype(np.int32) for shape in shapes]


def one_by_one(head: Head | None, states: mx.array, targets: list[np.ndarray]) -> mx.array:
    """The head reads the states of a token once for each of its targets."""
    wide = [each.reshape(len(each), -1) for each in targets]
    counts = np.concatenate([np.full(len(each), each.shape[1]) for each in wide])
    repeated = states[mx.array(np.repeat(np.arange(len(counts)), counts))]
    logits = repeated if head is None else head.logits(repeated)
    return -cross_entropy(logits, mx.array(np.concatenate([each.reshape(-1) for each in wide])))


@pytest.mark.parametrize("kind", HEADS)
def test_each_target_is_what_it_is_alone(kind):
    """Rows with one target per token, with three and with more than an eighth of the vocabulary."""
    head = head_of(kind)
    width = 64
    vocab_size = 64
    if head is not None:
        own = frozen_head_of(head)
        width, vocab_size = own.width, own.vocab_size
    many = vocab_size // 8 + 1
    targets = targets_of([(4,), (3, 3), (2, 3), (5,), (2, many)], vocab_size)

    states = mx.random.normal((16, width), key=mx.random.key(0))
    count = sum(each.size for each in targets)
    weights = mx.random.uniform(shape=(count,), key=mx.random.key(2)) / count

    def loss(compute):
        def of(states: mx.array) -> tuple[mx.array, mx.array]:
            logprobs = compute(states)
            return -(weights * logprobs).sum(), logprobs

        return mx.value_and_grad(of)(states)

    (total, actual), grad = loss(lambda x: target_logprobs(head, x, targets, backward=True))
    (expected_total, expected), expected_grad = loss(lambda x: one_by_one(head, x, targets))
    assert total.item() == pytest.approx(expected_total.item(), rel=1e-6)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    scale = mx.linalg.norm(expected_grad).item()
    assert mx.linalg.norm(grad - expected_grad).item() <= 1e-5 * scale

    forward = target_logprobs(head, states, targets, backward=False)
    np.testing.assert_allclose(forward, expected, rtol=1e-5, atol=1e-5)


def frozen_head_of(head: Head):
    """The frozen head, also of one that counts as trainable."""
    return head.frozen or frozen_head(small_base().model.model.embed_tokens)


@pytest.mark.parametrize("backward", [True, False])
def test_the_head_computes_as_many_logits_for_any_number_of_targets(backward):
    head = head_of("quantized")
    computed: list[int] = []

    def counted(start: int, stop: int):
        part = head.frozen.part(start, stop)

        def logits(h: mx.array) -> mx.array:
            computed.append(h.shape[0] * (stop - start))
            return part.logits(h)

        return part._replace(logits=logits)

    watched = Head(head.hidden, head.logits, head.frozen._replace(part=counted))
    states = mx.random.normal((6, head.frozen.width))
    counts = []
    for count in (1, 2, 1024):
        computed.clear()
        targets = targets_of([(6, count)], head.frozen.vocab_size)
        mx.eval(target_logprobs(watched, states, targets, backward))
        counts.append(sum(computed))
    assert counts == [6 * head.frozen.vocab_size] * 3


def test_the_rows_of_many_targets_of_a_token_are_gathered_in_parts(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "GATHERED_BYTES", 1 << 20)
    head = head_of("quantized")

    def peak(shapes: list[tuple[int, ...]]) -> int:
        targets = targets_of(shapes, head.frozen.vocab_size)
        states = mx.random.normal((sum(len(each) for each in targets), head.frozen.width))
        mx.eval(states)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(target_logprobs(head, states, targets, backward=False))
        return mx.get_peak_memory() - before

    alike = peak([(4, 210)] * 20)
    assert peak([(1, 20_000)]) < 1.5 * alike
