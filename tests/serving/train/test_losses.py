"""Losses against their formulas, in NumPy."""

import numpy as np
import pytest

from mlx_packs.errors import PackError
from mlx_packs.runtime import mx
from mlx_packs.serving.train.losses import LOSSES, find_loss

RNG = np.random.default_rng(0)
P, Q, A = (RNG.normal(size=7).astype(np.float32) for _ in range(3))


def expected() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The terms of each loss, and their derivatives by log p."""
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


def test_every_loss_has_its_formula_here():
    assert set(expected()) == set(LOSSES)


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


def test_the_clip_of_cispo_is_one_sided():
    """As published; a small ratio still scales its term."""
    inputs = {"logprobs": mx.array([-1.0, -3.0]), "advantages": mx.ones(2)}
    values = np.array(LOSSES["cispo"].terms(mx.array([-3.0, -1.0]), inputs))
    np.testing.assert_allclose(values, [3 * np.exp(-2), 4.0], rtol=1e-5)


@pytest.mark.parametrize("name", ["custom", "dro", "gspo", "cross-entropy"])
def test_unknown_losses(name):
    with pytest.raises(PackError, match=name) as caught:
        find_loss(name)
    assert caught.value.code == "unknown"
