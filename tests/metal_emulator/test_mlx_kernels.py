"""The emulator's own proof: real kernels of MLX, whose headers travel in the wheel, run in it.

They must agree with ``mx.quantized_matmul`` on the CPU, and removing any one of their barriers must
be noticed. The headers are pasted into ``header=``, as a custom kernel would have to.
"""

import functools
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from tests.helpers.variants import slow_except

from . import Checks, KernelFault, metal_kernel, why_not
from .lint import lint_words

HEADERS = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(not HEADERS.is_dir(), reason="this wheel of MLX has no Metal headers"),
]

GROUP_SIZE, BITS = 64, 4
# Largest error over the largest value. MLX's kernels compute partly in the dtype of x.
BOUNDS = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
ONE_ORDER = Checks(orders=("forward",), low_precision=True)
# MLX's BlockLoader copies a struct from device to threadgroup memory; in plain clang the assignment
# of a struct knows one address space. So this kernel goes without the strict pass.
NOT_STRICT = replace(ONE_ORDER, strict=False)

# In place of steel/utils/type_traits.h, which uses what only Apple's compiler has.
TYPE_TRAITS = """
namespace metal {
template <typename P>
using pointer_element_t = remove_cv_t<remove_addrspace_t<remove_reference_t<decltype(*P())>>>;
}
"""


@functools.cache
def headers() -> str:
    """quantized.h up to its first kernel, with all that it needs."""
    done = {"steel/utils/type_traits.h"}

    def text(name: str) -> str:
        if name in done:
            return ""
        done.add(name)
        lines = (HEADERS / name).read_text().replace("#pragma once", "")
        own = re.compile(r'#include "mlx/backend/metal/kernels/(.*?)"')
        return own.sub(lambda match: text(match[1]), lines)

    quantized = text("quantized.h")
    quantized = quantized[: quantized.index("[[kernel]]")]
    quantized = quantized[: quantized.rindex("template <")]
    return TYPE_TRAITS + text("steel/gemm/gemm.h") + text("quantized_utils.h") + quantized


QMV = """
    qmv_impl<T, GROUP_SIZE, BITS>(
        w, scales, biases, x, y, K, N, threadgroup_position_in_grid,
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """
QMM = """
    threadgroup T x_tile[32 * (32 + 16 / sizeof(T))];
    threadgroup T w_tile[32 * (32 + 16 / sizeof(T))];
    qmm_t_impl<T, GROUP_SIZE, BITS, false>(
        w, scales, biases, x, y, x_tile, w_tile, K, N, M, K, threadgroup_position_in_grid,
        thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """


def error(source: str, rows: int, width: int, outputs: int, dtype: mx.Dtype, **more) -> float:
    """The error of y of one of MLX's kernels, relative to the largest value."""
    x = mx.random.normal((rows, width), key=mx.random.key(1)).astype(dtype)
    matrix = mx.random.normal((outputs, width), key=mx.random.key(2)).astype(dtype)
    packed = mx.quantize(matrix, group_size=GROUP_SIZE, bits=BITS)
    # in float32: in 16 bits the CPU also sums in 16 bits, which is ten times worse
    wide = [a.astype(mx.float32) for a in (x, *packed[1:])]
    product = mx.quantized_matmul(
        wide[0], packed[0], *wide[1:], group_size=GROUP_SIZE, bits=BITS, stream=mx.cpu
    )

    is_vector = source is QMV
    kernel = metal_kernel(
        "product",
        ["w", "scales", "biases", "x", "K", "N", "M"],
        ["y"],
        source,
        more.get("header") or headers(),
        checks=more.get("checks") or (ONE_ORDER if is_vector else NOT_STRICT),
    )
    tiles = (32 * -(-outputs // 32), 2 * -(-rows // 32), 2)
    (y,) = kernel(
        inputs=[*packed, x, mx.array(width), mx.array(outputs), mx.array(rows)],
        template=[("T", dtype), ("GROUP_SIZE", GROUP_SIZE), ("BITS", BITS)],
        grid=(32 * rows, 2 * -(-outputs // 8), 1) if is_vector else tiles,
        threadgroup=(32, 2, 1) if is_vector else (32, 2, 2),
        output_shapes=[(rows, outputs)],
        output_dtypes=[dtype],
    )
    return (mx.abs(y.astype(mx.float32) - product).max() / mx.abs(product).max()).item()


@pytest.mark.parametrize("dtype", slow_except(BOUNDS, mx.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("source", "sizes"),
    [(QMV, (3, 320, 12)), (QMV, (3, 320, 6)), (QMM, (33, 128, 40))],
    ids=["qmv", "qmv_of_part_of_a_tile", "qmm_with_edge_tiles"],
)
def test_kernels_of_mlx_agree_with_mlx(source, sizes, dtype):
    assert error(source, *sizes, dtype) < BOUNDS[dtype]


def test_kernels_of_mlx_pass_in_each_order_of_threads():
    checks = Checks(low_precision=True)
    assert error(QMV, 2, 320, 12, mx.float32, checks=checks) < BOUNDS[mx.float32]
    checks = replace(checks, strict=False)
    assert error(QMM, 33, 64, 40, mx.float32, checks=checks) < BOUNDS[mx.float32]


def test_qmv_that_moves_its_last_tile_back_writes_twice():
    """Ten outputs: two simdgroups write the same values to rows 6 and 7. True, and seen."""
    with pytest.raises(KernelFault, match="race"):
        error(QMV, 1, 320, 10, mx.float32)


@pytest.mark.parametrize("number", slow_except(range(8), 0, 7))
def test_each_barrier_of_qmm_is_needed(number):
    text = headers()
    start = text.index("METAL_FUNC void qmm_t_impl(")
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    at = start
    for _ in range(number + 1):
        at = text.index(barrier, at + 1)
    without = text[:at] + " " * len(barrier) + text[at + len(barrier) :]
    with pytest.raises(KernelFault, match="race"):
        error(QMM, 33, 128, 40, mx.float32, header=without)


def test_word_linter_accepts_the_headers_of_mlx():
    """Only the files for Metal 4 (`nax`) use lambdas; no other file may raise a hit."""
    texts = [p for p in HEADERS.rglob("*.h") if "nax" not in p.name]
    hits = {p.name: found for p in texts if (found := lint_words(p.read_text()))}
    assert len(texts) > 50 and not hits
