"""Losses against their formulas, in NumPy."""

import numpy as np
import pytest

from mlx_packs.errors import PackError
from mlx_packs.runtime import mx
from mlx_packs.serving.train.losses import LOSSES, Targets, find_loss, settings_of

RNG = np.random.default_rng(0)
P, Q, A = (RNG.normal(size=7).astype(np.float32) for _ in range(3))
OWNERS = np.array([0, 0, 0, 1, 1, 1, 1])
MASK = np.array([0, 1, 1, 1, 1, 0, 1], np.float32)
LOW, HIGH, BETA = 0.7, 1.1, 0.3


def clip(ratio: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(ratio, LOW), HIGH)


def sequence_ratio() -> np.ndarray:
    means = [(P - Q)[(OWNERS == i) & (MASK != 0)].mean() for i in (0, 1)]
    return np.exp(np.array(means)[OWNERS])


def expected() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The terms of each loss, and their derivatives by log p."""
    ratio = np.exp(P - Q)
    passes = ratio * A <= clip(ratio) * A
    whole = sequence_ratio()
    keeps = whole * A <= clip(whole) * A
    return {
        "cross_entropy": (-P * A, -A),
        "importance_sampling": (-ratio * A, -ratio * A),
        "ppo": (-np.minimum(ratio * A, clip(ratio) * A), -ratio * A * passes),
        "cispo": (-clip(ratio) * A * P, -clip(ratio) * A),
        "dro": (-(P * A - BETA / 2 * (P - Q) ** 2), -(A - BETA * (P - Q))),
        "gspo": (-np.minimum(whole * A, clip(whole) * A), -whole * A * keeps),
    }


INPUTS = {"logprobs": Q, "advantages": A, "weights": A, "sequence_ratio_mask": MASK}
SETTINGS = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "beta": BETA}


def test_every_loss_has_its_formula_here():
    assert set(expected()) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("by_target", [False, True])
def test_terms_and_gradients(name, by_target):
    inputs = {key: mx.array(values) for key, values in INPUTS.items()}
    inputs |= {key: mx.full(7, each) if by_target else each for key, each in SETTINGS.items()}

    def terms(logprobs: mx.array) -> mx.array:
        return LOSSES[name].terms(Targets(logprobs, inputs, mx.array(OWNERS), 2))

    values, derivatives = expected()[name]
    np.testing.assert_allclose(np.array(terms(mx.array(P))), values, rtol=1e-5, atol=1e-6)
    gradient = mx.grad(lambda logprobs: terms(logprobs).sum())(mx.array(P))
    np.testing.assert_allclose(np.array(gradient), derivatives, rtol=1e-5, atol=1e-6)


def test_settings():
    assert settings_of(LOSSES["ppo"], {"clip_low_threshold": 0.5}) == {
        "clip_low_threshold": 0.5,
        "clip_high_threshold": 1.2,
    }
    for faulty in ({"beta": 1.0}, {"clip_low_threshold": "a"}, {"clip_low_threshold": np.nan}):
        with pytest.raises(PackError, match="loss_fn_config"):
            settings_of(LOSSES["ppo"], faulty)


def test_the_default_clip_of_cispo_is_one_sided():
    """As published; a small ratio still scales its term."""
    given = settings_of(LOSSES["cispo"], {})
    assert given == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    inputs = {"logprobs": mx.array([-1.0, -3.0]), "advantages": mx.ones(2), **given}
    targets = Targets(mx.array([-3.0, -1.0]), inputs, mx.array([0, 0]), 1)
    values = np.array(LOSSES["cispo"].terms(targets))
    np.testing.assert_allclose(values, [3 * np.exp(-2), 4.0], rtol=1e-5)


@pytest.mark.parametrize("name", ["custom", "stable_reinforce", "cross-entropy"])
def test_unknown_losses(name):
    with pytest.raises(PackError, match=name) as caught:
        find_loss(name)
    assert caught.value.code == "unknown"
