"""Training attention against MLX's own, values and the gradients of q, k and v."""

import pytest

from mlx_packs.ops.attention import attention
from mlx_packs.runtime import mx

SHAPES = {  # batch, heads, KV heads, queries, keys, head_dim
    "grouped": (2, 8, 2, 33, 33, 64),
    "one_kv_head": (1, 4, 1, 17, 17, 32),
    "equal_heads": (2, 3, 3, 16, 16, 8),
    "one_query": (1, 4, 2, 1, 9, 16),
    "more_keys": (1, 4, 2, 5, 12, 16),
}


def masks(shape: tuple) -> dict:
    batch, _, _, queries, keys, _ = shape
    visible = mx.random.uniform(shape=(batch, 1, queries, keys)) > 0.4
    visible[..., 0] = True  # no row may be fully masked
    return {
        "none": None,
        "causal": "causal",
        "boolean": visible,
        "additive": mx.where(visible, 0.0, -1e9),
    }


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive"])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_and_its_gradients_are_those_of_mlx(name, mask):
    shape = SHAPES[name]
    batch, heads, kv_heads, queries, keys, width = shape
    q = mx.random.normal((batch, heads, queries, width))
    k, v = (mx.random.normal((batch, kv_heads, keys, width)) for _ in range(2))
    chosen = masks(shape)[mask]
    weight = mx.random.normal(q.shape)

    def reference(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=chosen)

    def both(f):
        return mx.value_and_grad(lambda *a: (f(*a) * weight).sum(), argnums=(0, 1, 2))(q, k, v)

    ours = attention(q, k, v, 0.2, chosen)
    assert mx.allclose(ours, reference(q, k, v), rtol=1e-5, atol=1e-5).item()
    _, grads = both(lambda q, k, v: attention(q, k, v, 0.2, chosen))
    _, wanted = both(reference)
    for gradient, expected in zip(grads, wanted, strict=True):
        assert mx.allclose(gradient, expected, rtol=1e-4, atol=1e-5).item()
