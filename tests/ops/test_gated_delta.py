"""The gated delta rule by chunks against the loop over tokens, and who computes it on a device."""

import io
import re
from unittest import mock

import pytest

from mlx_packs import runtime
from mlx_packs.chips import chip
from mlx_packs.ops import _backend, dispatch, gated_delta, gated_delta_kernel
from mlx_packs.ops._check import normal
from mlx_packs.runtime import mx
from tests.helpers.emulation import forget_verdicts
from tests.helpers.memory import peak_bytes

SHAPES = {  # rows, tokens, key heads, value heads, key width, value width
    "part_of_a_chunk": (2, 37, 1, 2, 8, 16),
    "grouped": (1, 130, 2, 4, 32, 32),
    "whole_chunks": (1, 128, 2, 2, 16, 8),
    "one_token": (2, 1, 1, 1, 8, 8),
}
NAMES = ("output", "last state", "q", "k", "v", "log_decay", "beta", "state")
QWEN = gated_delta.RecurrenceSizes(1, 2048, 16, 32, 128, 128)


def unit(x: mx.array) -> mx.array:
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def inputs_of(shape: tuple, strength: float = 1.0) -> list[mx.array]:
    rows, tokens, key_heads, heads, wide, narrow = shape
    q, k = (unit(normal((rows, tokens, key_heads, wide), seed)) for seed in (0, 1))
    v = normal((rows, tokens, heads, narrow), 2)
    log_decay = -strength * mx.exp(2 * normal((rows, tokens, heads), 3))
    beta = mx.sigmoid(normal((rows, tokens, heads), 4))
    return [q, k, v, log_decay, beta, normal((rows, heads, narrow, wide), 5)]


def all_of(function, inputs: list[mx.array]) -> dict[str, mx.array]:
    """Outputs and the gradients of every input."""

    def both(*arrays: mx.array) -> list[mx.array]:
        return list(function(*arrays))

    cotangents = [normal(y.shape, 7).astype(y.dtype) for y in both(*inputs)]
    outputs, gradients = mx.vjp(both, inputs, cotangents)
    return dict(zip(NAMES, [*outputs, *gradients], strict=True))


def check_close(found: dict, expected: dict, level: float) -> None:
    for name, truth in expected.items():
        error = mx.abs(found[name].astype(mx.float64) - truth).max() / mx.abs(truth).max()
        assert error.item() < level, f"{name}: off by {error.item():.1e}"


def check_against_loop(function, inputs: list[mx.array], level: float = 2e-6) -> None:
    expected = all_of(gated_delta.reference, [x.astype(mx.float64) for x in inputs])
    check_close(all_of(function, inputs), expected, level)


@pytest.mark.parametrize(
    ("shape", "strength"),
    [*((shape, 1.0) for shape in SHAPES), ("grouped", 1e-3), ("grouped", 30.0)],
)
def test_values_and_gradients_are_those_of_the_loop(shape, strength):
    check_against_loop(gated_delta.gated_delta, inputs_of(SHAPES[shape], strength))


def test_tokens_with_one_key_are_no_worse():
    q, k, v, log_decay, _, state = inputs_of((1, 64, 1, 1, 16, 16))
    k, beta = mx.broadcast_to(k[:, :1], k.shape), mx.ones(log_decay.shape)
    inputs = [q, k, v, 1e-6 * log_decay, beta, state]
    check_against_loop(gated_delta.gated_delta, inputs, 2e-5)


def test_a_decay_of_each_column_is_that_of_the_loop(monkeypatch):
    q, k, v, log_decay, *rest = inputs_of((2, 11, 1, 2, 8, 16))
    log_decay = log_decay[..., None] * mx.sigmoid(normal((8,), 6))
    monkeypatch.setattr(gated_delta, "SEGMENT_BYTES", 4 * 5 * 4 * 2 * 2 * 8 * 16)
    check_against_loop(gated_delta.gated_delta, [q, k, v, log_decay, *rest])


def test_masked_tokens_are_as_if_they_were_not_there():
    *inputs, state = inputs_of((2, 20, 1, 2, 8, 16))
    mask = mx.arange(20)[None] < mx.array([[20], [13]])
    output, last = gated_delta.gated_delta(*inputs, state, mask)
    alone, last_alone = gated_delta.gated_delta(*(x[1:, :13] for x in inputs), state[1:])
    assert mx.allclose(output[1:, :13], alone, atol=1e-6).item()
    assert mx.allclose(last[1:], last_alone, atol=1e-6).item()
    assert not mx.any(output[1, 13:]).item()


def test_half_precision_keeps_decays_in_float32():
    inputs = inputs_of((1, 130, 1, 2, 16, 16), 1e-4)
    half = [x.astype(mx.bfloat16) for x in inputs[:3]] + inputs[3:]
    output, state = gated_delta.gated_delta(*half)
    assert output.dtype == mx.bfloat16 and state.dtype == mx.float32
    wide = [x.astype(mx.float32) for x in half]
    assert mx.allclose(state, gated_delta.reference(*wide)[1], atol=1e-5).item()


def test_backward_keeps_no_state_of_a_token():
    inputs = inputs_of((1, 512, 1, 2, 64, 64))
    peak = peak_bytes(lambda: all_of(gated_delta.gated_delta, inputs), inputs)
    assert peak < 0.8 * 512 * inputs[-1].nbytes


@pytest.fixture
def on_metal(monkeypatch):
    """MLX computes on Metal, has a kernel for every head, and its loop stands in for that."""
    monkeypatch.setattr(runtime, "_assumed", "gpu")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(gated_delta_kernel, "has_fused_gradient", lambda *_: True)
    forget_verdicts()
    yield monkeypatch
    forget_verdicts()


def test_kernels_of_mlx_compute_where_they_are_faster(on_metal):
    on_metal.setattr(_backend, "first_fault", lambda _: None)
    on_metal.setattr(gated_delta_kernel, "chip_here", lambda: chip("Apple M5 Max"))
    assert gated_delta_kernel.choose(QWEN) == "metal"
    on_metal.setattr(gated_delta_kernel, "chip_here", lambda: chip("Apple M3 Max"))
    assert gated_delta_kernel.choose(QWEN._replace(rows=2)) == "reference"
    with dispatch.backend("metal"):
        assert gated_delta_kernel.choose(QWEN) == "metal"
    with dispatch.backend("reference"):
        assert gated_delta_kernel.choose(QWEN) == "reference"


def test_chosen_kernels_are_called_and_checked_first(on_metal):
    inputs = inputs_of(SHAPES["part_of_a_chunk"])
    with dispatch.backend("metal"):
        check_against_loop(gated_delta.gated_delta, inputs)  # on a CPU MLX's op is a loop
        assert any(key[1] == "gated_delta" for key in _backend._checked)
    wrong = mock.patch.object(gated_delta_kernel, "fused", lambda *a: [x * 1.01 for x in loop(*a)])
    loop = gated_delta.reference
    forget_verdicts()
    with wrong, dispatch.backend("metal"):
        check_against_loop(gated_delta.gated_delta, inputs)
        assert "off by" in _backend.record()["fallbacks"]["gated_delta"]


def test_a_cpu_has_no_fused_gradient():
    gated_delta_kernel.has_fused_gradient.cache_clear()
    assert not gated_delta_kernel.has_fused_gradient(16, 32, 128, 128)
    with runtime.assumed_device("gpu"):  # MLX lays out the loop of a CPU here
        assert not gated_delta_kernel.has_fused_gradient(16, 32, 128, 128)
    gated_delta_kernel.has_fused_gradient.cache_clear()


def count_of_arrays(function, inputs: list[mx.array]) -> int:
    mx.eval(inputs)
    graph = io.StringIO()
    mx.export_to_dot(graph, *all_of(function, inputs).values())
    views = "Broadcast Reshape Transpose ExpandDims Squeeze Slice Split Depends".split()
    return sum(name not in views for name in re.findall(r'label ="(\w+)"', graph.getvalue()))


def test_launches_grow_by_a_few_for_each_chunk():
    counts = [
        count_of_arrays(gated_delta.gated_delta, inputs_of((1, tokens, 1, 1, 8, 8)))
        for tokens in (512, 1024)
    ]
    assert counts[1] - counts[0] == 8 * (2 * 3 + 4)  # three launches forward, four backward
    assert counts[0] < 300 < count_of_arrays(gated_delta.reference, inputs_of((1, 64, 1, 1, 8, 8)))
