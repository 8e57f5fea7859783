"""The grouped low-rank deltas: reference against one projection at a time, kernels against it."""

import pytest

from mlx_packs.ops._check import examine
from mlx_packs.ops.grouped_lora import grouped_lora, reference
from mlx_packs.ops.grouped_lora_kernel import GroupProgram, GroupSizes, check_of, row_tile
from mlx_packs.ops.profile import GPU, forced_profile
from mlx_packs.runtime import mx
from tests.helpers.comparison import all_close
from tests.helpers.variants import nightly_except
from tests.ops.cases import DTYPES, by_dtype, outputs_and_gradients

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
def test_grouped_lora_equals_single_projections_with_gradients(name, rows):
    *values, scales = inputs(name, rows, mx.float32)
    results = outputs_and_gradients(grouped_lora, values, scales)
    assert all_close(results, outputs_and_gradients(plain, values, scales))


def test_grouped_lora_of_a_fused_output_equals_separate_outputs():
    x = mx.random.normal((5, 40))
    widths, ranks = (24, 16, 8), (4, 0, 2)
    y = mx.random.normal((5, sum(widths)))
    a = [mx.random.normal((40, r)) for r in ranks]
    b = [mx.random.normal((r, w)) for r, w in zip(ranks, widths, strict=True)]
    scales = [2.0, 0.0, 0.5]

    def apart(x, outputs, *factors):
        separate = mx.split(outputs[0], [24, 40], axis=-1)
        return [mx.concatenate(plain(x, separate, *factors), axis=-1)]

    results, expected = (
        outputs_and_gradients(op, [x, [y], a, b], scales) for op in (grouped_lora, apart)
    )
    assert all_close(results, expected)


def test_grouped_lora_rejects_slices_that_do_not_fill_the_outputs():
    x, y = mx.zeros((2, 8)), mx.zeros((2, 12))
    with pytest.raises(ValueError, match=r"\[8\].*\[12\]"):
        grouped_lora(x, [y], [mx.zeros((8, 2))], [mx.zeros((2, 8))], [1.0])


WORKLOADS = {  # rows, D, ranks, widths, output of each slice
    "uneven_4096_1024_1024": (5, 64, (16, 16, 16), (4096, 1024, 1024), (0, 1, 2)),
    "decode_1": (1, 2560, (8, 8, 8), (512, 128, 128), (0, 1, 2)),
    "ragged_63": (63, 300, (4, 4), (272, 272), (0, 1)),
    "three_tiles_of_depth_in_one_group": (1040, 600, (2,), (4,), (0,)),
    "four_slices_three_outputs": (5, 300, (4, 8, 12, 4), (260, 24, 16, 8), (0, 1, 2, 2)),
    "mixed_ranks_1_33_8": (7, 260, (1, 33, 8), (64, 16, 48), (0, 1, 2)),
    "rank_64_three_times": (6, 257, (64, 64, 64), (65, 64, 64), (0, 1, 2)),
    "fused_with_a_zero_rank_slice": (9, 48, (4, 0, 4), (48, 48, 48), (0, 0, 0)),
    "one_column": (2, 1, (1,), (1,), (0,)),
}


LARGE = "three_tiles_of_depth_in_one_group"  # half a second
CASES = by_dtype([name for name in WORKLOADS if name != LARGE], some=("decode_1",))


@pytest.mark.parametrize(
    ("dtype", "name"), [*CASES, *nightly_except([(d, LARGE) for d in DTYPES], (mx.float32, LARGE))]
)
def test_grouped_lora_kernel_is_no_worse_than_the_reference(emulated, dtype, name):
    rows, depth, ranks, widths, outputs = WORKLOADS[name]
    for factors in {mx.float32, dtype}:
        instance = GroupProgram(dtype, factors, ranks, outputs, row_tile(rows))
        check = check_of(emulated.backend, instance, rows, GroupSizes(depth, widths))
        assert examine(check).fault is None


@pytest.mark.parametrize(("dtype", "rank"), by_dtype((1, 4, 8, 16, 33, 64), (33,)))
def test_grouped_lora_kernel_is_exact_at_every_rank(emulated, dtype, rank):
    instance = GroupProgram(dtype, mx.float32, (rank, rank), (0, 1), row_tile(18))
    check = check_of(emulated.backend, instance, 18, GroupSizes(140, (70, 64)), exact=True)
    assert examine(check).fault is None


def test_grouped_lora_runs_its_kernels_and_has_gradients(emulated):
    *values, scales = inputs("mixed_ranks", (3, 7), mx.float32)
    grouped_lora(*values, scales)  # the first call compares them with the reference
    before = emulated.launches()
    results = outputs_and_gradients(grouped_lora, values, scales)
    assert emulated.launches() - before == {"down": 2, "up": 2}
    assert all_close(results, outputs_and_gradients(reference, values, scales))


def test_grouped_lora_keeps_a_zero_rank_slice_bit_identical(emulated):
    y = mx.concatenate([mx.ones((3, 8)), mx.full((3, 8), -0.0)], axis=1)
    a, b = [mx.ones((8, 2)), mx.ones((8, 0))], [mx.ones((2, 8)), mx.ones((0, 8))]
    result = grouped_lora(mx.ones((3, 8)), [y], a, b, [1.0, 0.0])[0]
    assert (result[:, :8] == 17).all().item()
    assert mx.array_equal(result[:, 8:].view(mx.uint32), y[:, 8:].view(mx.uint32)).item()


def test_grouped_lora_launches_nothing_for_an_empty_batch_or_no_rank(nothing_launched):
    y = mx.ones((2, 0, 12))
    result = grouped_lora(mx.ones((2, 0, 8)), [y], [mx.ones((8, 2))], [mx.ones((2, 12))], [1.0])
    assert result[0].shape == (2, 0, 12)
    y = mx.ones((3, 12))
    assert grouped_lora(mx.ones((3, 8)), [y], [mx.ones((8, 0))], [mx.ones((0, 12))], [1.0]) == [y]


def test_reference_is_the_same_where_b_is_scaled_before_the_product():
    """On a GPU; with a scale that is no power of two, values and gradients."""
    x, y, a, b = (mx.random.normal(s) for s in ((70, 12), (70, 10), (12, 3), (3, 10)))
    values = [x, [y], [a], [b]], [1.7]
    expected = outputs_and_gradients(reference, *values)
    with forced_profile(GPU):
        assert all_close(outputs_and_gradients(reference, *values), expected)
