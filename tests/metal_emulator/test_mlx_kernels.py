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


def operands(rows: int, width: int, outputs: int, dtype: mx.Dtype):
    """x, the quantized matrix, and their product on the CPU.

    The product is in float32: in 16 bits the CPU also sums in 16 bits, which is ten times worse.
    """
    x = mx.random.normal((rows, width), key=mx.random.key(1)).astype(dtype)
    matrix = mx.random.normal((outputs, width), key=mx.random.key(2)).astype(dtype)
    packed = mx.quantize(matrix, group_size=GROUP_SIZE, bits=BITS)
    wide = [a.astype(mx.float32) for a in (x, *packed[1:])]
    product = mx.quantized_matmul(
        wide[0], packed[0], *wide[1:], group_size=GROUP_SIZE, bits=BITS, stream=mx.cpu
    )
    return x, packed, product


def qmv(rows: int, width: int, outputs: int, dtype: mx.Dtype, checks: Checks = ONE_ORDER):
    """y of MLX's matrix-vector kernel, and the product to compare with."""
    x, packed, product = operands(rows, width, outputs, dtype)
    kernel = metal_kernel(
        "qmv",
        ["w", "scales", "biases", "x", "in_vec_size", "out_vec_size"],
        ["y"],
        """
        qmv_impl<T, GROUP_SIZE, BITS>(
            w, scales, biases, x, y, in_vec_size, out_vec_size, threadgroup_position_in_grid,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
        """,
        headers(),
        checks=checks,
    )
    y = kernel(
        inputs=[*packed, x, mx.array(width), mx.array(outputs)],
        template=[("T", dtype), ("GROUP_SIZE", GROUP_SIZE), ("BITS", BITS)],
        grid=(32 * rows, 2 * -(-outputs // 8), 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[dtype],
    )[0]
    return y, product


def qmm(
    rows: int, width: int, outputs: int, dtype: mx.Dtype, header: str, checks: Checks = NOT_STRICT
):
    """y of MLX's tiled matrix-matrix kernel (simdgroup matrices), and the product."""
    x, packed, product = operands(rows, width, outputs, dtype)
    kernel = metal_kernel(
        "qmm",
        ["w", "scales", "biases", "x", "K", "N", "M"],
        ["y"],
        """
        threadgroup T x_tile[32 * (32 + 16 / sizeof(T))];
        threadgroup T w_tile[32 * (32 + 16 / sizeof(T))];
        qmm_t_impl<T, GROUP_SIZE, BITS, false>(
            w, scales, biases, x, y, x_tile, w_tile, K, N, M, K, threadgroup_position_in_grid,
            thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
        """,
        header,
        checks=checks,
    )
    y = kernel(
        inputs=[*packed, x, mx.array(width), mx.array(outputs), mx.array(rows)],
        template=[("T", dtype), ("GROUP_SIZE", GROUP_SIZE), ("BITS", BITS)],
        grid=(32 * -(-outputs // 32), 2 * -(-rows // 32), 2),
        threadgroup=(32, 2, 2),
        output_shapes=[(rows, outputs)],
        output_dtypes=[dtype],
    )[0]
    return y, product


def error(y: mx.array, product: mx.array) -> float:
    y, product = y.astype(mx.float32), product.astype(mx.float32)
    return (mx.abs(y - product).max() / mx.abs(product).max()).item()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("outputs", [12, 6])
def test_qmv_agrees_with_mlx(outputs, dtype):
    assert error(*qmv(3, 320, outputs, dtype)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_qmm_with_edge_tiles_agrees_with_mlx(dtype):
    assert error(*qmm(33, 128, 40, dtype, headers())) < BOUNDS[dtype]


def test_kernels_of_mlx_pass_in_each_order_of_threads():
    checks = Checks(low_precision=True)
    assert error(*qmv(2, 320, 12, mx.float32, checks)) < BOUNDS[mx.float32]
    checks = replace(checks, strict=False)
    assert error(*qmm(33, 64, 40, mx.float32, headers(), checks)) < BOUNDS[mx.float32]


def test_qmv_that_moves_its_last_tile_back_writes_twice():
    """Ten outputs: two simdgroups write the same values to rows 6 and 7. True, and seen."""
    with pytest.raises(KernelFault, match="race"):
        qmv(1, 320, 10, mx.float32)


@pytest.mark.parametrize("number", range(8))
def test_each_barrier_of_qmm_is_needed(number):
    text = headers()
    start = text.index("METAL_FUNC void qmm_t_impl(")
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    at = start
    for _ in range(number + 1):
        at = text.index(barrier, at + 1)
    without = text[:at] + " " * len(barrier) + text[at + len(barrier) :]
    with pytest.raises(KernelFault, match="race"):
        qmm(33, 128, 40, mx.float32, without)


def test_word_linter_accepts_the_headers_of_mlx():
    """Only the files for Metal 4 (`nax`) use lambdas; no other file may raise a hit."""
    texts = [p for p in HEADERS.rglob("*.h") if "nax" not in p.name]
    hits = {p.name: found for p in texts if (found := lint_words(p.read_text()))}
    assert len(texts) > 50 and not hits
