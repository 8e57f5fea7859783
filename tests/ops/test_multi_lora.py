"""Deltas of many packs in a batch: reference against a loop over sequences, kernels against it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from mlx_packs.ops import _backend, dispatch
from mlx_packs.ops._check import examine
from mlx_packs.ops.grouped_lora_kernel import row_tile
from mlx_packs.ops.multi_lora import multi_lora, reference
from mlx_packs.ops.multi_lora_kernel import BatchProgram, BatchSizes, check_of, instances
from mlx_packs.ops.profile import GPU, forced_profile
from mlx_packs.runtime import mx
from tests.helpers.comparison import all_close
from tests.helpers.emulation import emulation
from tests.helpers.variants import slow_except
from tests.ops.cases import DTYPES, by_dtype, outputs_and_gradients

DEPTH, PACKS = 40, 3


def inputs(sequences, rows, dtype=mx.float32, ranks=(4, 2), widths=(48, 16)):
    x = mx.random.normal((sequences, rows, DEPTH)).astype(dtype)
    outputs = [mx.random.normal((sequences, rows, w)).astype(dtype) for w in widths]
    a = [mx.random.normal((PACKS, DEPTH, r)) * 0.2 for r in ranks]
    b = [mx.random.normal((PACKS, r, w)) * 0.2 for r, w in zip(ranks, widths, strict=True)]
    scales = [mx.random.uniform(0.5, 2.0, (PACKS,)) for _ in ranks]
    pack = mx.array([(2, 0, -1, 1, 2)[i % 5] for i in range(sequences)], dtype=mx.int32)
    return x, outputs, a, b, scales, pack


def looped(x, outputs, a, b, scales, pack):
    """One sequence and one projection at a time, all in the dtype of the arguments."""
    summed = []
    for y, p, q, s in zip(outputs, a, b, scales, strict=True):
        rows = [
            y[i] if k < 0 else y[i] + s[k].astype(x.dtype) * ((x[i] @ p[k]) @ q[k])
            for i, k in enumerate(pack.tolist())
        ]
        summed.append(mx.stack(rows))
    return summed


def bits(value: mx.array) -> mx.array:
    return value.view(mx.uint32 if value.dtype == mx.float32 else mx.uint16)


@pytest.mark.parametrize(("sequences", "rows"), [(1, 1), (8, 1), (64, 1), (5, 7)])
def test_multi_lora_equals_a_loop_over_sequences_with_all_gradients(sequences, rows):
    *trained, pack = inputs(sequences, rows)
    results, expected = (outputs_and_gradients(op, trained, pack) for op in (multi_lora, looped))
    assert all_close(results, expected)


@pytest.mark.parametrize("factors", [mx.bfloat16, mx.float32])
def test_reference_on_a_gpu_casts_no_factors_of_its_dtype(factors, monkeypatch):
    x, outputs, a, b, scales, pack = inputs(5, 2, mx.bfloat16)
    a, b = ([v.astype(factors) for v in part] for part in (a, b))
    expected = reference(x, outputs, a, b, scales, pack)
    gather_mm, seen = mx.gather_mm, set()

    def of_a_gpu(x, factors, **chosen):
        seen.add((x.dtype, factors.dtype))
        product = gather_mm(x.astype(mx.float32), factors.astype(mx.float32), **chosen)
        return product.astype(x.dtype)

    monkeypatch.setattr(mx, "gather_mm", of_a_gpu)
    with forced_profile(GPU):
        result = reference(x, outputs, a, b, scales, pack)
    assert seen == {(factors, factors)}
    assert all_close(result, expected, rtol=0.05, atol=0.05)


def test_reference_with_cuda_takes_no_gathered_product(monkeypatch):
    """MLX's ends the process there, where a row of factors is no multiple of 16 bytes."""
    case = inputs(5, 2)
    expected = reference(*case)
    monkeypatch.setattr(dispatch, "detect", lambda: "cuda")
    monkeypatch.setattr(mx, "gather_mm", None)
    assert all_close(reference(*case), expected)


@pytest.fixture(params=slow_except(["reference", "metal", "cuda"], "reference", "metal"))
def each_backend(request) -> Iterator[str]:
    """Plain MLX, and the kernels executed."""
    if request.param == "reference":
        with dispatch.backend("reference"):
            yield "reference"
    else:
        with (
            emulation(request.param, orders=("forward",)) as built,
            dispatch.backend(request.param),
        ):
            yield request.param
            assert built and not _backend.record()["fallbacks"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_multi_lora_keeps_outputs_without_a_pack_bit_identical(each_backend, dtype):
    x, outputs, a, b, scales, _ = inputs(3, 2, dtype)
    special = mx.array([-0.0, 0.0, float("inf"), float("nan")]).astype(dtype)
    outputs = [mx.concatenate([special, y.flatten()[4:]]).reshape(y.shape) for y in outputs]
    x[0] = float("inf")
    pack = mx.array([-1, 2, -1], dtype=mx.int32)
    for result, y in zip(multi_lora(x, outputs, a, b, scales, pack), outputs, strict=True):
        for i in (0, 2):
            assert mx.array_equal(bits(result[i]), bits(y[i])).item()
        assert not mx.array_equal(result[1], y[1]).item()


def test_multi_lora_counts_an_invalid_pack_as_none(each_backend):
    x, outputs, a, b, scales, _ = inputs(4, 1)
    wild = mx.array([PACKS, 1, -7, 2**31 - 1], dtype=mx.int32)
    tame = mx.array([-1, 1, -1, -1], dtype=mx.int32)
    result, wanted = (multi_lora(x, outputs, a, b, scales, pack) for pack in (wild, tame))
    for ours, theirs in zip(result, wanted, strict=True):
        assert mx.array_equal(ours, theirs).item()


def test_multi_lora_ignores_padding_of_pack_and_scales(each_backend):
    x, outputs, a, b, scales, pack = inputs(3, 1)
    longer = [mx.pad(s, (0, 5)) for s in scales], mx.pad(pack, (0, 5))
    wanted = looped(x, outputs, a, b, scales, pack)
    assert all_close(multi_lora(x, outputs, a, b, *longer), wanted)


WORKLOADS = {  # pack of each sequence, rows, D, packs, ranks, widths
    "decode_1": ((3,), 1, 2560, 4, (4, 2), (512, 128)),
    "decode_8": ((0, 1, -1, 3, 2, 2, -1, 0), 1, 520, 4, (4, 2), (272, 40)),
    "decode_64": (tuple(i % 6 - 1 for i in range(64)), 1, 24, 5, (4, 2), (16, 12)),
    "prefill_with_tails_and_mixed_ranks": ((1, -1), 19, 260, 2, (1, 33, 8), (16, 40, 257)),
    "rank_64": ((1,), 5, 24, 2, (64, 64), (65, 24)),
}


@pytest.mark.parametrize(("dtype", "name"), by_dtype(WORKLOADS, ("decode_8", "rank_64")))
def test_multi_lora_kernel_passes_its_random_and_exact_checks(emulated, dtype, name):
    pack, rows, depth, packs, ranks, widths = WORKLOADS[name]
    instance = BatchProgram(dtype, mx.float32, ranks, row_tile(rows))
    sizes = BatchSizes(len(pack), depth, widths, packs)
    for exact in (False, True):
        check = check_of(emulated.backend, instance, rows, sizes, exact, pack)
        assert examine(check).fault is None


def test_multi_lora_kernel_takes_arrays_of_fewer_than_8_numbers(emulated):
    x, outputs, a, b, scales, pack = inputs(1, 1, ranks=(1,), widths=(2,))
    few = x[..., :2], outputs, [a[0][:, :2]], b, scales, pack
    assert all_close(multi_lora(*few), looped(*few))


def test_multi_lora_runs_its_kernel_and_keeps_a_rank_0_slice(emulated):
    batch = inputs(8, 3, ranks=(4, 0, 2), widths=(48, 16, 40))
    result, wanted = multi_lora(*batch), looped(*batch)
    assert result[1] is batch[1][1]
    assert all_close(result, wanted)
    (text,) = _backend.record()["kernels"]
    assert text.endswith("sequences 8, inputs 40, widths 48/40, packs 3")
    *trained, pack = inputs(5, 2)
    result, wanted = (outputs_and_gradients(op, trained, pack) for op in (multi_lora, reference))
    assert all_close(result[:2], wanted[:2])
    assert all_close(result[2:], wanted[2:], rtol=0, atol=0)


def test_multi_lora_launches_nothing_when_there_is_no_delta(nothing_launched):
    x, outputs, a, b, scales, _ = inputs(0, 3)
    assert multi_lora(x, outputs, a, b, scales, mx.zeros((0,), mx.int32)) == outputs
    x, outputs, a, b, scales, pack = inputs(2, 3, ranks=(0, 0))
    assert multi_lora(x, outputs, a, b, scales, pack) == outputs
    a, b, scales = ([v[:0] for v in m] for m in (a, b, scales))
    assert multi_lora(x, outputs, a, b, scales, pack) == outputs
    assert not _backend.record()["kernels"]


def test_multi_lora_leaves_an_unsupported_rank_to_plain_mlx(nothing_launched):
    batch = inputs(2, 1, ranks=(65,), widths=(80,))
    assert mx.array_equal(multi_lora(*batch)[0], reference(*batch)[0]).item()


def test_instances_are_distinct_and_the_reference_passes_them_alone():
    result = instances()
    assert len({instance.name for instance in result}) == len(result) == 12
    for instance in result[2::4] + result[3::4]:  # one of decode and one of prefill in each dtype
        for check in instance.checks("reference"):
            alone = replace(check, kernel=check.reference, exact=False, alone=True)
            assert examine(alone).fault is None
