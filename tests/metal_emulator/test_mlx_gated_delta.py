"""MLX's own kernels of the gated delta rule, forward and backward, run in the emulator.

No gradient of `mx.fast.gated_delta_update` can be taken on a CPU but that of a loop. The headers of
the kernels that Macs before the M5 run travel in the wheel; they must agree with our reference.
"""

import functools
import re
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_packs.ops.gated_delta import reference

from . import Checks, metal_kernel, why_not
from .test_mlx_kernels import HEADERS

NAMES = ("gated_delta_update.h", "gated_delta_update_vjp.h")
pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(
        not all((HEADERS / name).is_file() for name in NAMES), reason="an MLX without the kernels"
    ),
]
CHECKS = replace(Checks(orders=("forward",), low_precision=True), strict=False)
ROWS, TOKENS, KEY_HEADS, HEADS, WIDTH, VALUES, KEPT = 2, 11, 1, 2, 32, 4, 4
SIZES = {"Dk": WIDTH, "Dv": VALUES, "Hk": KEY_HEADS, "Hv": HEADS, "Ckpt": KEPT}
PLACE = "thread_position_in_grid, thread_position_in_threadgroup, thread_index_in_simdgroup"
LAUNCH = {"grid": (32, VALUES, ROWS * HEADS), "threadgroup": (32, VALUES, 1)}


# Of mlx's atomic.h, which uses what only Apple's compiler has, the one operation.
ATOMICS = """
#include <metal_atomic>
template <typename T>
struct mlx_atomic {
  atomic<T> val;
};
template <typename T>
METAL_FUNC void mlx_atomic_fetch_add_explicit(device mlx_atomic<T>* at, T value, size_t offset) {
  atomic_fetch_add_explicit(&(at[offset].val), value, memory_order_relaxed);
}
"""


@functools.cache
def header(name: str, function: str) -> str:
    """The text of one kernel as a function that a custom kernel can call."""
    text = (HEADERS / name).read_text()
    start = text.rindex("template <", 0, text.index(f"void {function}("))
    end = (text + "\n").index("\n}\n", start) + 3
    body = text[start:end].replace("[[kernel]] void", "METAL_FUNC void")
    body = re.sub(r"\[\[[^\]]*\]\]", "", body).replace("constant int& T", "int T")
    return f"{ATOMICS}\nconstant bool save_state = true;\n{body}"


def inputs() -> list[mx.array]:
    q, k = (
        mx.random.normal((ROWS, TOKENS, KEY_HEADS, WIDTH), key=mx.random.key(i)) / WIDTH**0.5
        for i in (0, 1)
    )
    v = mx.random.normal((ROWS, TOKENS, HEADS, VALUES), key=mx.random.key(2))
    gates = mx.random.uniform(0.2, 1.0, (2, ROWS, TOKENS, HEADS), key=mx.random.key(3))
    state = mx.random.normal((ROWS, HEADS, VALUES, WIDTH), key=mx.random.key(4))
    return [q, k, v, gates[0], gates[1], state]


def forward(q, k, v, decay, beta, state) -> list[mx.array]:
    """Outputs, last state and the states that the backward pass begins with."""
    kernel = metal_kernel(
        "gated_delta_seq",
        ["q", "k", "v", "state_in", "g", "beta", "T"],
        ["y", "state_out", "state_cache"],
        f"gated_delta_seq<float, Dk, Dv, Hk, Hv, Ckpt>(q, k, v, state_in, g, beta, y, state_out, "
        f"T, state_cache, {PLACE});",
        header(NAMES[0], "gated_delta_seq"),
        checks=CHECKS,
    )
    return kernel(
        inputs=[q, k, v, state, decay, beta, mx.array(TOKENS)],
        template=list(SIZES.items()),
        output_shapes=[v.shape, state.shape, (ROWS * HEADS, -(-TOKENS // KEPT), VALUES, WIDTH)],
        output_dtypes=[mx.float32] * 3,
        **LAUNCH,
    )


def test_the_forward_kernel_of_mlx_agrees():
    q, k, v, decay, beta, state = inputs()
    output, last, _ = forward(q, k, v, decay, beta, state)
    expected = reference(q, k, v, mx.log(decay), beta, state)
    assert mx.allclose(output, expected[0], atol=1e-5).item()
    assert mx.allclose(last, expected[1], atol=1e-5).item()


def test_the_gradient_kernel_of_mlx_agrees():
    q, k, v, decay, beta, state = inputs()
    _, _, states = forward(q, k, v, decay, beta, state)
    cotangents = [mx.random.normal(x.shape, key=mx.random.key(5)) for x in (v, state)]
    kernel = metal_kernel(
        "gated_delta_vjp_seq",
        ["q", "k", "v", "g", "b", "cot_o", "cot_h", "state_cache", "T"],
        ["dq", "dk", "dv", "dg", "db", "dh"],
        "gated_delta_vjp_seq<float, Dk, Dv, Hk, Hv, Ckpt>(q, k, v, g, b, cot_o, cot_h, state_cache, "
        "T, (device mlx_atomic<float>*)dq, (device mlx_atomic<float>*)dk, dv, "
        f"(device mlx_atomic<float>*)dg, (device mlx_atomic<float>*)db, dh, {PLACE});",
        header(NAMES[1], "gated_delta_vjp_seq"),
        checks=CHECKS,
    )
    found = kernel(
        inputs=[q, k, v, decay, beta, *cotangents, states, mx.array(TOKENS)],
        template=list(SIZES.items()),
        output_shapes=[x.shape for x in (q, k, v, decay, beta, state)],
        output_dtypes=[mx.float32] * 6,
        init_value=0.0,
        **LAUNCH,
    )

    def loop(q, k, v, decay, beta, state):
        return reference(q, k, v, mx.log(decay), beta, state)

    _, expected = mx.vjp(loop, [q, k, v, decay, beta, state], cotangents)
    names = ("q", "k", "v", "g", "beta", "state")
    for name, ours, theirs in zip(names, expected, found, strict=True):
        assert mx.allclose(theirs, ours, rtol=1e-4, atol=1e-4).item(), name
