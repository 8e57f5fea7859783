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


def launch(file: str, function: str, inputs: dict, outputs: dict, arguments: str, **more) -> list:
    """Outputs of a kernel; ``inputs`` has arrays and ``outputs`` shapes, by name."""
    call = f"{function}<float, Dk, Dv, Hk, Hv, Ckpt>({arguments}, {PLACE});"
    names = [*inputs, "T"]
    text = header(file, function)
    kernel = metal_kernel(function, names, list(outputs), call, text, checks=CHECKS)

    return kernel(
        inputs=[*inputs.values(), mx.array(TOKENS)],
        template=list(SIZES.items()),
        output_shapes=list(outputs.values()),
        output_dtypes=[mx.float32] * len(outputs),
        **LAUNCH,
        **more,
    )


def inputs() -> list[mx.array]:
    q, k = (
        mx.random.normal((ROWS, TOKENS, KEY_HEADS, WIDTH), key=mx.random.key(i)) / WIDTH**0.5
        for i in (0, 1)
    )
    v = mx.random.normal((ROWS, TOKENS, HEADS, VALUES), key=mx.random.key(2))
    gates = mx.random.uniform(0.2, 1.0, (2, ROWS, TOKENS, HEADS), key=mx.random.key(3))
    state = mx.random.normal((ROWS, HEADS, VALUES, WIDTH), key=mx.random.key(4))
    return [q, k, v, gates[0], gates[1], state]


def loop(q, k, v, decay, beta, state):
    return reference(q, k, v, mx.log(decay), beta, state)


def test_the_kernels_of_mlx_agree():
    q, k, v, decay, beta, state = arrays = inputs()
    cache = (ROWS * HEADS, -(-TOKENS // KEPT), VALUES, WIDTH)
    output, last, states = launch(
        NAMES[0],
        "gated_delta_seq",
        {"q": q, "k": k, "v": v, "state_in": state, "g": decay, "beta": beta},
        {"y": v.shape, "state_out": state.shape, "state_cache": cache},
        "q, k, v, state_in, g, beta, y, state_out, T, state_cache",
    )

    expected = loop(*arrays)
    assert mx.allclose(output, expected[0], atol=1e-5).item()
    assert mx.allclose(last, expected[1], atol=1e-5).item()

    cotangents = [mx.random.normal(x.shape, key=mx.random.key(5)) for x in (v, state)]
    named = dict(zip("q k v g b cot_o cot_h".split(), [*arrays[:5], *cotangents], strict=True))
    names = ("dq", "dk", "dv", "dg", "db", "dh")
    gradients = launch(
        NAMES[1],
        "gated_delta_vjp_seq",
        named | {"state_cache": states},
        {name: x.shape for name, x in zip(names, arrays, strict=True)},
        "q, k, v, g, b, cot_o, cot_h, state_cache, T, "
        "(device mlx_atomic<float>*)dq, (device mlx_atomic<float>*)dk, dv, "
        "(device mlx_atomic<float>*)dg, (device mlx_atomic<float>*)db, dh",
        init_value=0.0,
    )

    _, expected = mx.vjp(loop, arrays, cotangents)
    for name, ours, theirs in zip(names, expected, gradients, strict=True):
        assert mx.allclose(theirs, ours, rtol=1e-4, atol=1e-4).item(), name
