"""Cross-entropy by chunks against the whole logits, values and the gradient of the states."""

import mlx.nn as nn
import pytest

from mlx_packs.ops import linear_cross_entropy as module
from mlx_packs.ops.linear_cross_entropy import cross_entropy, linear_cross_entropy
from mlx_packs.runtime import mx


def test_cross_entropy_is_that_of_mlx():
    logits, targets = mx.random.normal((9, 51)) * 20, mx.random.randint(0, 51, (9,))
    value, gradient = mx.value_and_grad(lambda x: cross_entropy(x, targets).sum())(logits)
    expected, wanted = mx.value_and_grad(lambda x: nn.losses.cross_entropy(x, targets).sum())(
        logits
    )
    assert abs(value.item() / expected.item() - 1) < 1e-6
    assert mx.allclose(gradient, wanted, atol=1e-6).item()


@pytest.mark.parametrize("rows", [1, 32, 33, 100])
def test_chunks_give_the_whole(rows, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 64 * 32)  # 32 rows of 64 logits
    head = nn.Linear(16, 64, bias=False)
    states, targets = mx.random.normal((rows, 16)), mx.random.randint(0, 64, (rows,))
    weight = mx.random.normal((rows,))

    def chunked(h):
        return (linear_cross_entropy(h, targets, head, 64)[0] * weight).sum()

    def whole(h):
        return (nn.losses.cross_entropy(head(h), targets) * weight).sum()

    (value, gradient), (expected, wanted) = (mx.value_and_grad(f)(states) for f in (chunked, whole))
    assert abs(value.item() - expected.item()) < 1e-4
    assert mx.allclose(gradient, wanted, atol=1e-5).item()
    hits = linear_cross_entropy(states, targets, head, 64)[1]
    assert mx.array_equal(hits, mx.argmax(head(states), axis=-1) == targets).item()
