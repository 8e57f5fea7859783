"""The grouped low-rank deltas against one projection at a time, in float32 truth."""

import pytest

from mlx_packs.ops.grouped_lora import grouped_lora
from mlx_packs.runtime import mx

GROUPS = {  # widths and ranks of the slices
    "qwen3_like_qkv": ((96, 32, 32), (4, 4, 4)),
    "mixed_ranks": ((64, 16, 48), (1, 33, 8)),
    "one": ((24,), (2,)),
}


def inputs(name: str, rows: tuple[int, ...], dtype):
    widths, ranks = GROUPS[name]
    x = mx.random.normal((*rows, 40)).astype(dtype)
    outputs = [mx.random.normal((*rows, w)).astype(dtype) for w in widths]
    a = [mx.random.normal((40, r)) * 0.2 for r in ranks]
    b = [mx.random.normal((r, w)) * 0.2 for r, w in zip(ranks, widths, strict=True)]
    scales = [2.0, 0.5, 1.0][: len(widths)]
    return x, outputs, a, b, scales


def plain(x, outputs, a, b, scales):
    """One projection at a time, all in the dtype of the arguments."""
    return [y + s * ((x @ p) @ q) for y, p, q, s in zip(outputs, a, b, scales, strict=True)]


@pytest.mark.parametrize("rows", [(3, 7), (1,), (65,)])
@pytest.mark.parametrize("name", GROUPS)
def test_grouped_lora_equals_projections_one_by_one_with_all_gradients(name, rows):
    x, outputs, a, b, scales = inputs(name, rows, mx.float32)
    weights = [mx.random.normal(y.shape) for y in outputs]

    def total(f):
        def loss(x, outputs, a, b):
            return sum(
                (y * w).sum() for y, w in zip(f(x, outputs, a, b, scales), weights, strict=True)
            )

        return mx.value_and_grad(loss, argnums=(0, 1, 2, 3))(x, outputs, a, b)

    (value, grads), (expected, wanted) = total(grouped_lora), total(plain)
    assert abs(value.item() - expected.item()) < 1e-3
    flat = [grads[0], *grads[1], *grads[2], *grads[3]]
    reference = [wanted[0], *wanted[1], *wanted[2], *wanted[3]]
    for gradient, exact in zip(flat, reference, strict=True):
        assert mx.allclose(gradient, exact, rtol=1e-4, atol=1e-4).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_grouped_lora_in_low_precision_is_no_worse_than_the_plain_op(dtype):
    x, outputs, a, b, scales = inputs("mixed_ranks", (65,), dtype)
    up = mx.float32
    truth = plain(x.astype(up), [y.astype(up) for y in outputs], a, b, scales)
    low = plain(x, outputs, [p.astype(dtype) for p in a], [p.astype(dtype) for p in b], scales)
    epsilon = mx.finfo(dtype).eps
    for ours, theirs, exact in zip(grouped_lora(x, outputs, a, b, scales), low, truth, strict=True):
        assert ours.dtype == dtype
        error, allowed = (mx.abs(v.astype(up) - exact).max().item() for v in (ours, theirs))
        assert error <= allowed + epsilon * mx.abs(exact).max().item()
