"""Attention of packed segments: the same as of each alone, forward and backward."""

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs.ops.span_attention import row_of, span_attention, tree_attention
from mlx_packs.runtime import mx
from tests.helpers.comparison import all_close
from tests.ops.cases import output_and_gradients

SPANS = [((7,),), ((3, 3, 3), (5, 4)), ((1, 1, 6), (8,)), ((2, 9, 2),)]


def inputs(length: int, kv_heads: int) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(0), 3)
    heads = (4, kv_heads, kv_heads)
    return [
        mx.random.normal((1, n, length, 8), key=key) for n, key in zip(heads, keys, strict=True)
    ]


def by_mask(queries, keys, values, spans):
    """All scores, those of other segments and of later keys masked."""
    lengths = [n for row in spans for n in row]
    segment = mx.concatenate([mx.full((n,), i) for i, n in enumerate(lengths)])
    places = mx.arange(len(segment))
    mask = (segment[:, None] == segment) & (places[:, None] >= places)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_span_attention_equals_masked_attention(spans, kv_heads):
    arrays = inputs(sum(map(sum, spans)), kv_heads)
    results = output_and_gradients(lambda *a: span_attention(*a, 0.3, spans), arrays)
    expected = output_and_gradients(lambda *a: by_mask(*a, spans), arrays)
    assert all_close(results, expected, rtol=0, atol=1e-5)


def test_span_attention_has_no_scores_of_other_segments(monkeypatch):
    """Its operations grow with the sum of the squared lengths, not with the squared sum."""
    arrays = inputs(64, 2)
    shapes = set()
    attend = mx.fast.scaled_dot_product_attention

    def recorded(q, k, v, **options):
        shapes.add((q.shape[0], q.shape[2], k.shape[2], options["mask"]))
        return attend(q, k, v, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    span_attention(*arrays, 1.0, ((16, 16), (24, 8)))
    assert shapes == {(2, 16, 16, "causal"), (1, 24, 24, "causal"), (1, 8, 8, "causal")}


def rows_of(levels) -> list[list[int]]:
    """The places in the row of a tree that each segment of its last level sees: its ancestors'."""
    paths = [[]]
    place = 0
    for level in levels:
        each = len(level) // len(paths)
        following = []
        for i, length in enumerate(level):
            following.append([*paths[i // each], *range(place, place + length)])
            place += length
        paths = following
    return paths


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    "levels", [((5,), (4, 4, 3)), ((3, 3), (2, 2, 2, 2)), ((2,), (3, 3), (4, 4, 4, 4))], ids=str
)
def test_tree_attention_equals_that_of_each_row_alone(levels, window):
    arrays = inputs(sum(map(sum, levels)), 2)
    rope = nn.RoPE(8)
    paths = rows_of(levels)

    def of_tree(*arrays):
        row = row_of(tree_attention(*arrays, 0.3, rope, window, levels))
        return mx.unflatten(row, 2, (4, 8)).transpose(0, 2, 1, 3)

    def of_rows(*arrays):
        whole = mx.zeros(arrays[0].shape)
        for path in paths:  # ancestors are computed again, and are the same each time
            q, k, v = (array[:, :, mx.array(path)] for array in arrays)
            back = np.arange(len(path))[:, None] - np.arange(len(path))
            seen = mx.array((back >= 0) & (back < (window or len(path))))
            own = mx.fast.scaled_dot_product_attention(rope(q), rope(k), v, scale=0.3, mask=seen)
            whole[:, :, mx.array(path)] = own
        return whole

    results, expected = (output_and_gradients(attend, arrays) for attend in (of_tree, of_rows))
    assert all_close(results, expected, rtol=0, atol=1e-5)
