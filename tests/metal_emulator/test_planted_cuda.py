"""Bugs planted in the CUDA twin of the kernel of test_planted_metal.py."""

import mlx.core as mx
import pytest

from . import Checks, KernelFault, cuda_kernel, why_not
from .samples import BOUNDS, CUDA, N, expected

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

WRITTEN = "__syncthreads();  // parts written"
SUM = "sum = warp_sum(sum);"

# A thread that comes too early finds memory that nobody has written, or races with the writer.
EARLY = "(race|uninitialised)"

# What is CUDA's own: its words, its barriers and shuffles, its compiler. The run time is Metal's.
# name: (kind of the fault and a word of its message, the changes of the text)
BUGS = {
    "missing_barrier": (EARLY + ": .*parts", (WRITTEN, "")),
    "barrier_of_the_warp_only": (EARLY + ": .*parts", (WRITTEN, "__syncwarp();")),
    "shuffle_in_half_the_lanes": ("divergence: .*__shfl_xor_sync", (SUM, f"if (lane < 16) {SUM}")),
    "mask_of_half_the_lanes": ("lane: .*mask", ("0xffffffff", "0xffff")),
    "shuffle_from_lane_32": (
        "lane: .*lane 64",
        (SUM, f"sum += 0.0f * __shfl_sync(0xffffffff, sum, lane + 2); {SUM}"),
    ),
    "local_accumulator_not_set": (
        "compile: .*uninitialized",
        ("float sum = 0.0f;\n  for (unsigned", "float sum;\n  for (unsigned"),
    ),
    "double_literal": ("lint: .*double", ("* scale[0]", "* 1.0 * scale[0]")),
    "too_much_shared_memory": (
        "threadgroup memory: .*limit is 49152",
        ("parts[SIMDGROUPS];", "parts[SIMDGROUPS]; __shared__ float more[12288]; more[0] = 0.0f;"),
    ),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_kernel_without_bugs_is_right(dtype):
    y, _ = CUDA.run(dtype)
    assert mx.abs(y.astype(mx.float32) - expected(dtype)).max() < BOUNDS[dtype]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_seen(bug):
    pattern, *changes = BUGS[bug]
    CUDA.fault(*changes, match=pattern)


def test_arithmetic_in_16_bits_is_counted():
    change = ("float(x[k]) * float(w[k])", "float(x[k] * w[k])")
    for dtype in (mx.float16, mx.bfloat16):
        CUDA.fault(change, match="precision: ", dtype=dtype)
        assert CUDA.planted(change).run(dtype, Checks(low_precision=True))[0].shape == (N,)


def test_threads_past_the_grid_exist():
    """CUDA rounds the grid up to whole blocks: without its own test the kernel writes too far."""

    def run(test: str) -> mx.array:
        body = "int i = blockIdx.x * blockDim.x + threadIdx.x; {} y[i] = x[i] * 2.0f;"
        kernel = cuda_kernel("twice", ["x"], ["y"], body.format(test))
        return kernel(
            inputs=[mx.arange(50).astype(mx.float32)],
            grid=(50, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(50,)],
            output_dtypes=[mx.float32],
        )[0]

    assert run("if (i < 50)").tolist() == [2.0 * i for i in range(50)]
    with pytest.raises(KernelFault, match="bounds"):
        run("")


def test_shapes_templates_and_cooperative_groups():
    """The rules of MLX that cuda_source.py states again, in one kernel."""
    kernel = cuda_kernel(
        "rules",
        ["x", "c"],
        ["y"],
        """
        auto i = cg::this_grid().thread_rank();
        float more = float(c[0]) * x_ndim * (FLAG ? R : 0);
        if (i < x_shape[0] * x_strides[0]) y[i] = T(float(x[i]) + more);
        """,
    )
    y = kernel(
        inputs=[mx.ones((3, 5), mx.bfloat16), mx.array(2.0)],
        template=[("T", mx.float16), ("R", 3), ("FLAG", True)],
        grid=(15, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(3, 5)],
        output_dtypes=[mx.float16],
    )[0]
    assert y.dtype == mx.float16 and (y == 13).all()
