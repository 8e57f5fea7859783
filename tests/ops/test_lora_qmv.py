"""Few rows by quantized weights with low-rank deltas: plain MLX by definition, kernels against it."""

import pytest

from mlx_packs.ops import lora_qmv as op
from mlx_packs.ops import lora_qmv_kernel as op_kernel
from mlx_packs.ops._check import examine
from mlx_packs.ops.lora_qmv import AffineWeight, Format, GroupTask, LowRank, Norm, reference
from mlx_packs.runtime import mx
from tests.helpers.comparison import all_close
from tests.helpers.variants import slow_except

BF16, FP16, FP32 = mx.bfloat16, mx.float16, mx.float32


def group(dtype=FP32):
    """x, weights, A's, B's and scales of three projections, of which the second has no adapter."""
    x = mx.random.normal((2, 3, 128)).astype(dtype)
    weights = [
        AffineWeight(*mx.quantize(mx.random.normal((o, 128)).astype(dtype), 64, 4))
        for o in (64, 32, 40)
    ]
    a = [mx.random.normal((128, 4)), None, mx.random.normal((128, 3))]
    b = [mx.random.normal((4, 64)), None, mx.random.normal((3, 40))]
    return x, weights, a, b, [2.0, 0.0, 0.5]


def by_definition(x, weights, a, b, scales) -> list[mx.array]:
    outputs = []
    for w, p, q, s in zip(weights, a, b, scales, strict=True):
        y = x @ mx.dequantize(*w, 64, 4).T
        outputs.append(y if p is None else y + s * (x @ p) @ q)
    return outputs


def close(ours: list[mx.array], wanted: list[mx.array]) -> bool:
    return all_close(ours, wanted, atol=1e-3)


def test_reference_is_the_product_with_deltas_norms_and_swiglu():
    x, weights, a, b, scales = group()
    wanted = by_definition(x, weights, a, b, scales)

    factors = LowRank.of(a, b, scales, FP32)
    assert factors.ranks == (4, 0, 3) and factors.down.shape == (7, 128)
    form = Format(64, 4)
    rows = x.reshape(-1, 128)
    flat = [y.reshape(6, -1) for y in wanted]
    task = GroupTask(form, factors.ranks, (None,) * 3, False)
    assert close(reference(rows, weights, factors, task), flat)

    weight = mx.random.normal((32,))
    task = task._replace(norms=(Norm(weight, 0.1), Norm(weight, 0.1), None))
    heads = [y.reshape(6, -1, 32) for y in flat[:2]]
    normed = [
        (y / mx.sqrt(y.square().mean(-1, keepdims=True) + 0.1) * weight).reshape(6, -1)
        for y in heads
    ]
    assert close(reference(rows, weights, factors, task), [*normed, flat[2]])


def test_prepared_launches_are_two_and_compute_the_group(emulated):
    x, weights, a, b, scales = group()
    factors = LowRank.of(a, b, scales, FP32)
    launches = op.prepare(x.shape, FP32, weights, Format(64, 4), factors)  # checks the kernels
    before = emulated.launches()
    outputs = launches(x)
    assert sorted((emulated.launches() - before).values()) == [1, 1]
    assert close(outputs, by_definition(x, weights, a, b, scales))
    assert close(launches(-x), [-y for y in outputs])


def test_other_calls_are_left_to_plain_mlx(nothing_launched):
    x, weights, a, b, scales = group()
    factors = LowRank.of(a, b, scales, FP32)
    form = Format(64, 4)

    assert op.prepare((9, 128), FP32, weights, form, factors) is None  # rows
    assert op.prepare((0, 128), FP32, weights, form, factors) is None
    assert op.prepare(x.shape, BF16, weights, form, factors) is None  # scales in float32
    assert op.prepare(x.shape, FP32, weights, Format(64, 3), factors) is None

    norms = [Norm(mx.ones((40,)), 0.1), None, None]  # 64 columns are no whole number of heads
    assert op.prepare(x.shape, FP32, weights, form, factors, norms) is None
    wide = [mx.zeros((128, 65))] * 3, [mx.zeros((65, o)) for o in (64, 32, 40)]
    wide = LowRank.of(*wide, scales, FP32)
    assert op.prepare(x.shape, FP32, weights, form, wide) is None


WORKLOADS = {  # instance, rows, D, widths
    "qwen3_4b_qkv_normed": (
        (BF16, 64, 4, 1, (16,) * 3, (128, 128, 0), False),
        1,
        2560,
        (256, 128, 19),
    ),
    "qwen3_4b_gate_up": ((BF16, 64, 4, 1, (16, 16), (0, 0), True), 1, 2560, (70, 70)),
    "qwen3_4b_down": ((BF16, 64, 4, 1, (16,), (0,), False), 1, 9728, (9,)),
    "qwen3_4b_o_8_rows": ((FP16, 64, 4, 8, (8,), (0,), False), 8, 4096, (13,)),
    "qwen3_0_6b_qkv_rank_33": (
        (FP16, 64, 4, 1, (33, 1, 64), (0,) * 3, False),
        1,
        1024,
        (21, 7, 66),
    ),
    "only_q_and_v": ((BF16, 64, 4, 2, (4, 0, 4), (0,) * 3, False), 2, 896, (64, 32, 32)),
    "gate_alone": ((FP32, 64, 4, 4, (7, 0), (0, 0), True), 3, 192, (65, 65)),
    "no_adapter_on_k_but_a_norm": (
        (FP16, 64, 4, 4, (3, 0, 3), (64, 64, 0), False),
        4,
        320,
        (128, 64, 64),
    ),
    "heads_of_256": ((FP32, 64, 4, 1, (2,), (256,), False), 1, 128, (512,)),
    "8_bits_groups_of_128": ((FP16, 128, 8, 8, (4, 4), (0, 0), False), 6, 640, (10, 3)),
    "one_output": ((FP32, 32, 4, 1, (1,), (0,), False), 1, 32, (1,)),
}


QUICK = ("qwen3_4b_qkv_normed", "qwen3_4b_gate_up", "qwen3_4b_down", "qwen3_4b_o_8_rows")


@pytest.mark.parametrize("name", slow_except(WORKLOADS, *QUICK))
def test_lora_qmv_kernels_pass_their_random_and_exact_checks(emulated, name):
    fields, rows, *sizes = WORKLOADS[name]
    call = op_kernel.QmvProgram(*fields), rows, op_kernel.GroupSizes(*sizes)
    for exact in (False,) if call[0].gated or any(call[0].heads) else (True, False):
        assert examine(op_kernel.check_of(emulated.backend, *call, exact)).fault is None


@pytest.mark.parametrize("rows", slow_except(range(1, 9), 3))
def test_lora_qmv_kernels_are_exact_for_up_to_8_rows(emulated, rows):
    instance = op_kernel.QmvProgram(FP16, 32, 4, op_kernel.row_tile(rows), (3, 2), (0, 0), False)
    check = op_kernel.check_of(
        emulated.backend, instance, rows, op_kernel.GroupSizes(352, (9, 5)), True
    )
    assert examine(check).fault is None


def test_instances_are_those_of_qwen3_4b(emulated):
    instances = op_kernel.instances()
    assert len({i.name for i in instances}) == len(instances) == 16
    one = instances[0]
    assert all(examine(check).fault is None for check in one.checks(emulated.backend))
    assert one.workload(emulated.backend).inputs[0].shape == (1, 2560)
