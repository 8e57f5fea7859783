"""Pieces of an operation by one lane and by two: the same numbers, whatever the operation."""

import threading

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.nn.nf4 import NF4Linear
from mlx_packs.nn.quantized import dense_module, frozen_head, transient_matmul
from mlx_packs.ops import attention as attention_module
from mlx_packs.ops import exponential, lanes, linear_cross_entropy, matmul
from mlx_packs.runtime import mx

pytestmark = pytest.mark.skipif(runtime.COMPILES, reason="operations are compiled here")


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch):
    """Work is cut into many pieces, however small it is."""
    monkeypatch.setattr(matmul, "_LEAST_WORK", 1)
    monkeypatch.setattr(matmul, "_MULTIPLE", 16)
    monkeypatch.setitem(matmul.SLICE_WEIGHTS, "cpu", 48 * 64)
    monkeypatch.setattr(exponential, "ELEMENTS", 7 * 64)
    monkeypatch.setitem(linear_cross_entropy.LOGIT_BYTES, "cpu", 0)
    monkeypatch.setattr(linear_cross_entropy, "_LEAST_COLUMNS", 16)
    monkeypatch.setitem(attention_module.SCORE_BYTES, "cpu", 0)
    monkeypatch.setattr(attention_module, "_LEAST_QUERIES", 4)
    monkeypatch.setattr(attention_module, "_CPU_KEYS", 8)
    monkeypatch.setattr(attention_module, "_CPU_BYTES", 0)


def noise(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def operations() -> dict:
    """Name to a function with gradients and its inputs; 33 rows are no whole number of pieces."""
    mx.random.seed(3)
    linear = nn.Linear(64, 176, bias=False)
    affine = nn.QuantizedLinear.from_linear(linear, 32, 4)
    nf4 = NF4Linear.from_linear(linear)
    dense = dense_module(affine)
    head = frozen_head(dense)
    targets = mx.random.randint(0, 176, (33,), key=mx.random.key(1))
    visible = mx.random.uniform(shape=(2, 8, 33, 33), key=mx.random.key(2)) > 0.4
    visible[..., 0] = True
    segments = mx.array(np.repeat([[0, 1, 2]] * 2, 11, axis=1))
    heads = [noise(2, 8, 33, 16), noise(2, 2, 33, 16), noise(2, 2, 33, 16)]

    def loss(h):
        return linear_cross_entropy.linear_cross_entropy(h, targets, head, 1e-2, 0.1)[0]

    def attention(mask, segments=None):
        return lambda *a: attention_module.attention(*a, 0.2, mask, segments)

    return {
        "transient": (lambda x: transient_matmul(x, affine), [noise(33, 64)]),
        "nf4": (lambda x: transient_matmul(x, nf4), [noise(33, 64)]),
        "dense": (dense, [noise(3, 11, 64)]),
        "dense_learns": (matmul.dense_matmul, [noise(3, 11, 64), noise(176, 64)]),
        "swiglu": (exponential.swiglu, [noise(33, 64), noise(33, 64)]),
        "loss": (loss, [noise(33, 64)]),
        "causal": (attention("causal"), heads),
        "packed": (attention("causal", segments), heads),
        "mask_of_all_heads": (attention(visible[:, :1]), heads),
        "mask_by_head": (attention(visible), heads),
        "one_kv_head": (attention("causal"), [heads[0], noise(2, 1, 33, 16), noise(2, 1, 33, 16)]),
    }


def by(number: int, name: str, monkeypatch) -> tuple[list[mx.array], int]:
    """Results and gradients of an operation by so many lanes, and how often the second was used."""
    used = []
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_core_is_idle", lambda: number == 2)
        stream = lanes._second_stream
        patch.setattr(lanes, "_second_stream", lambda: used.append(1) or stream())
        function, inputs = operations()[name]
        outputs = function(*inputs)
        found = mx.vjp(lambda *a: [function(*a)], inputs, [noise(*outputs.shape)])
        mx.eval(found)
    return [*found[0], *found[1]], len(used)


@pytest.mark.parametrize("name", operations())
def test_two_lanes_give_the_numbers_of_one(name, monkeypatch):
    expected, unused = by(1, name, monkeypatch)
    found, used = by(2, name, monkeypatch)
    assert unused == 0
    assert (used > 1) == (name not in ("mask_by_head", "one_kv_head"))
    for one, two in zip(expected, found, strict=True):
        assert mx.allclose(one, two, rtol=1e-4, atol=1e-5).item()
    again, _ = by(2, name, monkeypatch)
    assert all(mx.array_equal(one, two).item() for one, two in zip(found, again, strict=True))


def test_the_first_of_two_best_tokens_is_the_hit_whichever_lane_finds_it(monkeypatch):
    monkeypatch.setattr(lanes, "_core_is_idle", lambda: True)
    weight = mx.zeros((64, 8))
    weight[[20, 40]] = 1  # slices of 16 rows: one for each lane
    linear = nn.Linear(8, 64, bias=False)
    linear.weight = weight
    targets = mx.array([20, 40, 0])
    hidden = mx.ones((3, 8))
    head = frozen_head(linear)
    _, hits = linear_cross_entropy.linear_cross_entropy(hidden, targets, head, gradient=False)
    assert hits.tolist() == [True, False, False]


def test_lanes_are_for_cpus_without_compiled_steps_that_have_a_core_to_spare(monkeypatch):
    monkeypatch.setattr(lanes, "_core_is_idle", lambda: True)
    assert lanes.lanes() == 2
    monkeypatch.setattr(lanes, "_core_is_idle", lambda: False)
    assert lanes.lanes() == 1
    monkeypatch.setattr(lanes, "_core_is_idle", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "COMPILES", True)
        assert lanes.lanes() == 1
    with runtime.assumed_device("gpu"):
        assert lanes.lanes() == 1


@pytest.mark.parametrize(
    ("name", "threads", "cores", "idle"),
    [
        ("some", 1, 2, True),
        ("some", 2, 4, False),
        ("some", None, 2, False),
        ("reference", None, 2, True),
        ("some", 1, 1, False),
    ],
)
def test_a_core_is_idle_beside_a_blas_of_one_thread(name, threads, cores, idle, monkeypatch):
    monkeypatch.setattr(lanes, "BLAS", runtime.Blas(name, True, "", threads))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert lanes._core_is_idle.__wrapped__() == idle


def test_operations_of_another_thread_have_a_second_stream_of_their_own(monkeypatch):
    monkeypatch.setattr(lanes, "_core_is_idle", lambda: True)
    x, y = noise(33, 64), noise(33, 64)
    expected, found = exponential.swiglu(x, y), []
    mx.eval(expected)

    def elsewhere():
        result = exponential.swiglu(x, y)
        mx.eval(result)
        found.append(np.array(result))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert (found[0] == np.array(expected)).all()
