"""Pieces of an operation on one stream and on two: the same numbers, whatever the operation."""

import threading
from dataclasses import replace

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs import runtime
from mlx_packs.cpu import profile as cpu_profile
from mlx_packs.cpu.blas import Blas
from mlx_packs.cpu.profile import CPUProfile
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.nf4 import NF4Linear
from mlx_packs.nn.quantized import dense_module
from mlx_packs.objectives.causal_lm import frozen_head
from mlx_packs.ops import attention as attention_module
from mlx_packs.ops import linear_cross_entropy
from mlx_packs.ops.profile import forced_profile, profile
from mlx_packs.runtime import mx
from tests.helpers.comparison import all_close

pytestmark = pytest.mark.skipif(runtime.COMPILES, reason="operations are compiled here")


# Work is cut into many pieces, however small it is.
MANY_PIECES = CPUProfile(
    slice_weights=48 * 64,
    score_bytes=0,
    logit_bytes=0,
    slice_rows=16,
    stream_work=1,
    least_queries=4,
    block_keys=8,
    block_bytes=0,
    least_columns=16,
    elements=7 * 64,
)
TWO_STREAMS = replace(MANY_PIECES, streams=2)


def noise(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def operations() -> dict:
    """Name to a function with gradients and its inputs; 33 rows do not divide into pieces."""
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
        "transient": (lambda x: frozen_weight(affine).transient_product(x), [noise(33, 64)]),
        "nf4": (lambda x: frozen_weight(nf4).transient_product(x), [noise(33, 64)]),
        "dense": (dense, [noise(3, 11, 64)]),
        "dense_trainable": (profile().matmul, [noise(3, 11, 64), noise(176, 64)]),
        "swiglu": (profile().swiglu, [noise(33, 64), noise(33, 64)]),
        "loss": (loss, [noise(33, 64)]),
        "causal": (attention("causal"), heads),
        "packed": (attention("causal", segments), heads),
        "mask_of_all_heads": (attention(visible[:, :1]), heads),
        "mask_by_head": (attention(visible), heads),
        "one_kv_head": (attention("causal"), [heads[0], noise(2, 1, 33, 16), noise(2, 1, 33, 16)]),
    }


def computed(name: str, count: int, monkeypatch) -> tuple[list[mx.array], int]:
    """Results and gradients of an operation on so many streams; how often the second was used."""
    used = []
    second_stream = cpu_profile.second_stream
    with forced_profile(replace(MANY_PIECES, streams=count)), monkeypatch.context() as patch:
        function, inputs = operations()[name]
        patch.setattr(cpu_profile, "second_stream", lambda: used.append(1) or second_stream())
        outputs = function(*inputs)
        results = mx.vjp(lambda *a: [function(*a)], inputs, [noise(*outputs.shape)])
        mx.eval(results)
    return [*results[0], *results[1]], len(used)


@pytest.mark.parametrize("name", operations())
def test_two_streams_give_the_results_of_one(name, monkeypatch):
    expected, unused = computed(name, 1, monkeypatch)
    results, used = computed(name, 2, monkeypatch)
    assert unused == 0
    assert (used > 1) == (name not in ("mask_by_head", "one_kv_head"))
    assert all_close(results, expected, atol=1e-5)
    again, _ = computed(name, 2, monkeypatch)
    assert all_close(again, results, rtol=0, atol=0)


def test_linear_cross_entropy_on_two_streams_ranks_the_first_best_token():
    weight = mx.zeros((64, 8))
    weight[[20, 40]] = 1  # slices of 16 rows: one for each stream
    linear = nn.Linear(8, 64, bias=False)
    linear.weight = weight
    targets = mx.array([20, 40, 0])
    hidden = mx.ones((3, 8))
    head = frozen_head(linear)
    with forced_profile(TWO_STREAMS):
        _, hits = linear_cross_entropy.linear_cross_entropy(hidden, targets, head, gradient=False)
    assert hits.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("idle", "compiles", "count"), [(True, False, 2), (False, False, 1), (True, True, 1)]
)
def test_stream_count_is_two_on_an_uncompiled_cpu_with_an_idle_core(
    idle, compiles, count, monkeypatch
):
    monkeypatch.setattr(cpu_profile, "core_is_idle", lambda: idle)
    monkeypatch.setattr(runtime, "COMPILES", compiles)
    assert cpu_profile.stream_count() == count


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
    monkeypatch.setattr(runtime, "BLAS", Blas(name, True, "", threads))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert cpu_profile.core_is_idle() == idle


def test_another_thread_has_a_second_stream_of_its_own():
    x, y = noise(33, 64), noise(33, 64)
    results = []

    def compute():
        result = profile().swiglu(x, y)
        mx.eval(result)
        results.append(np.array(result))

    with forced_profile(TWO_STREAMS):
        compute()
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert (results[0] == results[1]).all()
