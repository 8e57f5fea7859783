"""A small kernel in both languages into which the tests plant bugs, and the way to call it.

y[n] = scale * sum over k of x[n, k] * w[k]. A threadgroup of two simdgroups takes ROWS rows, one
after the other: lanes sum over k, simdgroups reduce, the first thread adds the parts. Everything a
kernel of this project does is in it: tails in n and k, threadgroup memory, barriers, a reduction.
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import pytest

from . import Checks, EmulatedKernel, KernelFault, cuda_kernel, metal_kernel

METAL_HEADER = """
template <typename T>
inline float row_part(const device T* x, const device T* w, int width, uint first, uint step) {
  float sum = 0.0f;
  for (uint k = first; k < uint(width); k += step) {
    sum += float(x[k]) * float(w[k]);
  }
  return sum;
}

inline float total(const threadgroup float* parts, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; i++) sum += parts[i];
  return sum;
}
"""
METAL_BODY = """
  threadgroup float parts[SIMDGROUPS];
  uint thread_index = thread_index_in_threadgroup;
  uint lane = thread_index_in_simdgroup;
  uint simd = simdgroup_index_in_threadgroup;
  for (int r = 0; r < ROWS; r++) {
    int row = int(threadgroup_position_in_grid.x) * ROWS + r;
    bool inside = row < N;
    float sum = inside ? row_part(x + row * K, w, K, thread_index, 32 * SIMDGROUPS) : 0.0f;
    sum = metal::simd_sum(sum);
    if (lane == 0) parts[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // parts written
    if (thread_index == 0 && inside) y[row] = T(total(parts, SIMDGROUPS) * scale[0]);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // parts read
  }
"""
# The words of Metal, in this order, and what CUDA has in their place.
CUDA_WORDS = {
    "const device ": "const ",
    "const threadgroup ": "const ",
    "threadgroup float": "__shared__ float",
    "inline": "__device__ inline",
    "uint": "unsigned",
    "thread_index_in_threadgroup": "threadIdx.x",
    "thread_index_in_simdgroup": "threadIdx.x % 32",
    "simdgroup_index_in_threadgroup": "threadIdx.x / 32",
    "threadgroup_position_in_grid": "blockIdx",
    "metal::simd_sum": "warp_sum",
    "threadgroup_barrier(mem_flags::mem_threadgroup)": "__syncthreads()",
}
WARP_SUM = """
__device__ inline float warp_sum(float sum) {
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, offset);
  }
  return sum;
}
"""
ROWS, SIMDGROUPS, N, K = 2, 2, 5, 70


@dataclass(frozen=True)
class Sample:
    """The kernel in one language, ready to be changed and run."""

    language: str
    header: str
    body: str

    def planted(self, *changes: tuple[str, str]) -> "Sample":
        """The same kernel with each text replaced; each must be there exactly once."""
        parts = {"header": self.header, "body": self.body}
        for old, new in changes:
            places = [name for name, text in parts.items() if text.count(old) == 1]
            assert len(places) == 1, f"{old!r} is not in the kernel exactly once"
            parts[places[0]] = parts[places[0]].replace(old, new)
        return Sample(self.language, **parts)

    def run(
        self,
        dtype: mx.Dtype = mx.float32,
        checks: Checks = Checks(),  # noqa: B008 - frozen
        **changes,
    ) -> tuple[mx.array, EmulatedKernel]:
        """y, and the kernel with its report; ``changes`` replace arguments of the call."""
        make = metal_kernel if self.language == "metal" else cuda_kernel
        names = ["x", "w", "scale"], ["y"]
        kernel = make("row_dots", *names, self.body, self.header, checks=checks)
        call = {
            "inputs": list(inputs(dtype)),
            "template": [("T", dtype), *dict(ROWS=ROWS, SIMDGROUPS=SIMDGROUPS, N=N, K=K).items()],
            "grid": (-(-N // ROWS) * 32 * SIMDGROUPS, 1, 1),
            "threadgroup": (32 * SIMDGROUPS, 1, 1),
            "output_shapes": [(N,)],
            "output_dtypes": [dtype],
        }
        return kernel(**(call | changes))[0], kernel

    def fault(self, *changes: tuple[str, str], match: str, **arguments) -> None:
        """Check the fault of a run with each text replaced."""
        with pytest.raises(KernelFault, match=rf"(?s)\] {match}"):
            self.planted(*changes).run(**arguments)


def inputs(dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    x = mx.random.normal((N, K), key=mx.random.key(5))
    w = mx.random.normal((K,), key=mx.random.key(6))
    return x.astype(dtype), w.astype(dtype), mx.array([0.5])


def expected(dtype: mx.Dtype) -> mx.array:
    """The reference in float32, from the rounded inputs."""
    x, w, scale = (a.astype(mx.float32) for a in inputs(dtype))
    return (x * w).sum(axis=1) * scale


BOUNDS = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 5e-2}  # of its errors


def in_cuda(text: str) -> str:
    for word, other in CUDA_WORDS.items():
        text = text.replace(word, other)
    return text


METAL = Sample("metal", METAL_HEADER, METAL_BODY)
CUDA = Sample("cuda", in_cuda(METAL_HEADER) + WARP_SUM, in_cuda(METAL_BODY))


def run(
    source: str,
    *inputs: mx.array,
    shape: tuple[int, ...] | None = None,
    dtype: mx.Dtype = mx.float32,
    header: str = "",
    checks: Checks = Checks(low_precision=True),  # noqa: B008 - frozen
    atomic_outputs: bool = False,
    **changes,
) -> mx.array:
    """The output y of a small Metal kernel of a, b, c..: by default a thread for each element."""
    shape = inputs[0].shape if shape is None else shape
    size = math.prod(shape)
    names = list("abcdef"[: len(inputs)])
    kernel = metal_kernel(
        "small", names, ["y"], source, header, atomic_outputs=atomic_outputs, checks=checks
    )
    call = {
        "inputs": list(inputs),
        "grid": (size, 1, 1),
        "threadgroup": (min(size, 256), 1, 1),
        "output_shapes": [shape],
        "output_dtypes": [dtype],
    }
    return kernel(**(call | changes))[0]
