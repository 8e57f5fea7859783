"""Training attention against MLX's own, values and the gradients of q, k and v."""

from dataclasses import replace
from functools import partial

import pytest

from mlx_packs.cpu.profile import CPU
from mlx_packs.ops import attention as attention_module
from mlx_packs.ops.attention import attention, has_fused_gradient
from mlx_packs.ops.profile import GPU, forced_profile
from mlx_packs.runtime import mx
from tests.helpers.comparison import all_close
from tests.helpers.memory import peak_bytes
from tests.ops.cases import output_and_gradients

SHAPES = {  # batch, heads, KV heads, queries, keys, head_dim
    "grouped": (2, 8, 2, 33, 33, 64),
    "one_kv_head": (1, 4, 1, 17, 17, 32),
    "equal_heads": (2, 3, 3, 16, 16, 8),
    "one_query": (1, 4, 2, 1, 9, 16),
    "more_keys": (1, 4, 2, 5, 12, 16),
}


SMALL_BLOCKS = replace(CPU, score_bytes=0, least_queries=4, block_keys=8, block_bytes=0)
SMALL_BLOCKS_OF_A_GPU = replace(GPU, score_bytes=0, least_queries=4)
IN_BLOCKS = {"cpu": SMALL_BLOCKS, "gpu": SMALL_BLOCKS_OF_A_GPU}


@pytest.fixture(params=IN_BLOCKS.values(), ids=list(IN_BLOCKS))
def small_blocks(request):
    """Many blocks of few queries (and of few keys on a CPU), whatever the shapes."""
    with forced_profile(request.param):
        yield


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
@pytest.mark.parametrize("blocks", [CPU, *IN_BLOCKS.values()], ids=["whole", *IN_BLOCKS])
def test_attention_and_its_gradients_are_those_of_mlx(blocks, name, mask):
    shape = SHAPES[name]
    batch, heads, kv_heads, queries, keys, width = shape
    q = mx.random.normal((batch, heads, queries, width))
    k, v = (mx.random.normal((batch, kv_heads, keys, width)) for _ in range(2))
    chosen = masks(shape)[mask]

    def reference(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=chosen)

    with forced_profile(blocks):
        results = output_and_gradients(lambda *a: attention(*a, 0.2, chosen), [q, k, v])
    assert all_close(results, output_and_gradients(reference, [q, k, v]), atol=1e-5)


def test_attention_allows_a_block_with_all_keys_hidden(small_blocks):
    arrays = [mx.random.normal((1, 2, 24, 8)) for _ in range(3)]
    near = mx.abs(mx.arange(24)[:, None] - mx.arange(24)[None]) < 3
    hidden = mx.where(near, 0.0, -float("inf"))
    results = output_and_gradients(lambda *a: attention(*a, 0.3, hidden), arrays)
    fused = partial(mx.fast.scaled_dot_product_attention, scale=0.3, mask=near)
    assert all_close(results, output_and_gradients(fused, arrays), atol=1e-5)


def test_segments_in_many_blocks_equal_their_mask(small_blocks):
    arrays = [mx.random.normal((2, h, 30, 8)) for h in (4, 2, 2)]
    segments = mx.array([[0] * 5 + [1] * 12 + [2] * 13, [0] * 9 + [1] * 11 + [2] * 10])
    own = (segments[:, :, None] == segments[:, None])[:, None]
    mask = own & (mx.arange(30)[:, None] >= mx.arange(30)[None])
    results = output_and_gradients(lambda *a: attention(*a, 0.3, "causal", segments), arrays)
    expected = output_and_gradients(lambda *a: attention(*a, 0.3, mask), arrays)
    assert all_close(results, expected, atol=1e-5)


@pytest.fixture
def off_cpu():
    """The path of Metal with many blocks of queries, computed here."""
    with forced_profile(replace(GPU, score_bytes=0)):
        yield


def test_bfloat16_gradients_of_many_blocks_are_as_accurate_as_mlxs(off_cpu):
    q = mx.random.normal((1, 4, 512, 32))
    k, v = (mx.random.normal((1, 2, 512, 32)) for _ in range(2))
    fused = mx.fast.scaled_dot_product_attention

    def gradients(attend, dtype):
        arguments = [a.astype(mx.bfloat16).astype(dtype) for a in (q, k, v)]
        weight = q.astype(mx.bfloat16).astype(dtype)
        return mx.vjp(lambda *a: [attend(*a, scale=0.2, mask="causal")], arguments, [weight])[1]

    exact = gradients(fused, mx.float32)
    for ours, theirs, wanted in zip(
        gradients(attention, mx.bfloat16), gradients(fused, mx.bfloat16), exact, strict=True
    ):
        assert ours.dtype == mx.bfloat16
        error, accepted = (mx.linalg.norm(g.astype(mx.float32) - wanted) for g in (ours, theirs))
        assert error.item() < 1.5 * accepted.item()


def test_attention_off_the_cpu_holds_the_scores_of_one_block(off_cpu):
    q = mx.random.normal((1, 8, 1024, 32))
    k, v = (mx.random.normal((1, 2, 1024, 32)) for _ in range(2))
    peak = peak_bytes(lambda: attention(q, k, v, 0.2, "causal"), q, k, v)
    assert peak < 0.5 * 4 * 8 * 1024 * 1024


def test_attention_of_a_long_row_holds_a_few_blocks():
    q, w = (mx.random.normal((1, 8, 2048, 32)) for _ in range(2))
    k, v = (mx.random.normal((1, 2, 2048, 32)) for _ in range(2))
    compute = partial(mx.vjp, lambda *a: [attention(*a, 0.2, "causal")], [q, k, v], [w])
    assert peak_bytes(compute, q, k, v, w) < 0.35 * 4 * 8 * 2048 * 2048


@pytest.mark.parametrize(
    ("mask", "in_blocks"), [("none", False), ("causal", False), ("boolean", True)]
)
def test_attention_is_one_call_of_mlx_where_its_gradient_is_fused(mask, in_blocks, monkeypatch):
    calls = []
    fused = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(attention_module, "_has_fused_gradient", lambda *_: True)
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda *heads, **options: calls.append(1) or fused(*heads, **options),
    )
    with forced_profile(SMALL_BLOCKS_OF_A_GPU):
        q = mx.random.normal((1, 4, 33, 16))
        attention(q, q, q, 0.2, masks((1, 4, 4, 33, 33, 16))[mask])
    assert (len(calls) > 1) == in_blocks


def test_a_fused_gradient_is_asked_for_with_as_many_queries(monkeypatch):
    """MLX may have a fused gradient only where there are as many queries as keys."""
    monkeypatch.setattr(attention_module, "_has_fused_gradient", lambda *a: not a[-1])
    q, keys = mx.random.normal((1, 4, 9, 16)), mx.random.normal((1, 4, 33, 16))
    with forced_profile(SMALL_BLOCKS_OF_A_GPU):
        assert has_fused_gradient(q.dtype, 16, "causal")
        assert not has_fused_gradient(q.dtype, 16, "causal", True)
        actual = attention(q, keys, keys, 0.2, "causal")
    expected = mx.fast.scaled_dot_product_attention(q, keys, keys, scale=0.2, mask="causal")
    assert mx.abs(actual - expected).max().item() < 1e-6


def test_attention_by_blocks_of_a_gpu_has_no_float32_scores(monkeypatch):
    softmax, dtypes = mx.softmax, set()
    monkeypatch.setattr(
        mx, "softmax", lambda scores, **how: dtypes.add(scores.dtype) or softmax(scores, **how)
    )
    q = mx.random.normal((1, 4, 33, 16)).astype(mx.bfloat16)
    some = masks((1, 4, 4, 33, 33, 16))
    with forced_profile(SMALL_BLOCKS_OF_A_GPU):
        for mask in (None, "causal", some["boolean"], some["additive"].astype(mx.bfloat16)):
            mx.grad(lambda q, mask=mask: attention(q, q, q, 0.2, mask).sum())(q)
    assert dtypes == {mx.bfloat16}
