"""Timing of matmul paths: forward and backward, on the first rows, never longer than its limit."""

import mlx.nn as nn
import pytest

from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.memory import matmul_path
from mlx_packs.memory.matmul_path import time_paths, weight_kinds
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.nf4 import NF4Linear
from mlx_packs.nn.quantized import PATHS
from mlx_packs.runtime import mx
from tests.helpers.models import base_of, nf4_embedding

EVERY = tuple(MATMUL_PATHS)


def quantized(**changes) -> nn.Module:
    base = base_of("qwen3", **changes)
    nn.quantize(base.model, group_size=32, bits=4)
    base.model.freeze()
    return base.model


class FakeClock:
    """Time passes in products alone: ``rates`` has multiply-adds per second by path."""

    def __init__(self, monkeypatch, rates: dict[str, float], compilation_s: float = 0.0) -> None:
        self.now, self.compilation_s, self.calls = 100.0, compilation_s, []
        self.rates = {PATHS[path].product: (path, rate) for path, rate in rates.items()}
        monkeypatch.setattr(matmul_path, "perf_counter", lambda: self.now)
        monkeypatch.setattr(matmul_path, "_compute", self.compute)

    def compute(self, multiply, x, cotangent) -> None:
        path, rate = self.rates[multiply.func]
        call = path, cotangent.shape[1], x.shape
        self.now += 2 * cotangent.size * x.shape[1] / rate + self.compilation_s * (
            call not in self.calls
        )
        self.calls.append(call)


def test_a_timed_product_runs_forward_and_backward():
    calls = []
    weight = mx.ones((6, 8))

    @mx.custom_function
    def multiply(v):
        calls.append("forward")
        return v @ weight.T

    @multiply.vjp
    def multiply_vjp(primals, cotangent, _):
        calls.append("backward")
        return cotangent @ weight

    matmul_path._compute(multiply, mx.ones((4, 8)), mx.ones((4, 6)))
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_counts_as_a_head_only_where_it_is_one(tied):
    model = quantized(tie_word_embeddings=tied)
    kinds = weight_kinds(model, 64, 16)
    assert len(kinds) == 6 and sum(kind.count for kind in kinds) == 2 * 7 + 1
    (head,) = [kind.module for kind in kinds if kind.tokens == 16]
    assert head is (model.model.embed_tokens if tied else model.lm_head)


def test_passes_multiply_by_their_own_tokens():
    kinds = weight_kinds(quantized(), (24, 40), 16)
    assert sorted({kind.tokens for kind in kinds}) == [16, 24, 40] and len(kinds) == 2 * 5 + 1


def frozen(kind: str) -> nn.Module:
    """A module of 200 x 96 weights."""
    weight = mx.random.normal((200, 96))
    linear, embedding = nn.Linear(96, 200), nn.Embedding(200, 96)
    linear.weight = embedding.weight = weight
    return {
        "linear": lambda: nn.QuantizedLinear.from_linear(linear, 32, 8),
        "embedding": lambda: nn.QuantizedEmbedding.from_embedding(embedding, 32, 4),
        "mxfp4": lambda: nn.QuantizedLinear.from_linear(linear, mode="mxfp4"),
        "nf4": lambda: NF4Linear.from_linear(linear, 64, False),
        "nf4 double": lambda: NF4Linear.from_linear(linear, 64, True),
        "nf4 embedding": lambda: nf4_embedding(embedding, 64, True),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["linear", "embedding", "mxfp4", "nf4", "nf4 double", "nf4 embedding"]
)
def test_first_rows_are_those_of_the_weight(kind):
    module = frozen(kind)
    part, whole = frozen_weight(module).first_rows(7), frozen_weight(module).dense()
    assert mx.array_equal(frozen_weight(part).dense(), whole[:7])
    assert mx.array_equal(frozen_weight(module).dense(), whole), "the module stays as it was"


def test_times_are_those_of_whole_weights_and_all_tokens(monkeypatch):
    rates = {"quantized": 2e7, "transient": 4e7, "dense": 5e7}
    FakeClock(monkeypatch, rates)
    monkeypatch.setattr(matmul_path, "_TOKENS_CPU", {True: 4, False: 32})
    kinds = weight_kinds(quantized(vocab_size=512), 64, 16)
    timing = time_paths(kinds, EVERY, 60.0)
    for kind, times in zip(kinds, timing.step_s, strict=True):
        for path, seconds in times.items():
            assert seconds == pytest.approx(kind.multiply_adds / rates[path])


@pytest.mark.parametrize(
    ("rate", "compilation_s"), [(1e5, 0.0), (1e6, 0.05), (1e7, 0.0), (1e7, 0.05), (1e9, 0.05)]
)
def test_the_limit_is_passed_by_one_product_at_most(monkeypatch, rate, compilation_s):
    rates = {"quantized": rate / 20, "transient": rate / 2, "dense": rate}
    clock = FakeClock(monkeypatch, rates, compilation_s)
    kinds = weight_kinds(quantized(vocab_size=4096), 64, 16)
    timing = time_paths(kinds, EVERY, 2.0)
    path, rows, (tokens, width) = clock.calls[-1]
    assert clock.now <= 102 + 2 * rows * tokens * width / rates[path] + compilation_s
    if timing is not None:
        assert timing.seconds == pytest.approx(clock.now - 100)
        order = sorted(EVERY, key=lambda path: sum(times[path] for times in timing.step_s))
        assert order == ["dense", "transient", "quantized"]


def test_no_time_for_each_path_is_no_measurement(monkeypatch):
    clock = FakeClock(monkeypatch, dict.fromkeys(EVERY, 1e3))
    assert time_paths(weight_kinds(quantized(), 64, 16), EVERY, 2.0) is None
    assert len(clock.calls) == 1


def test_kinds_without_time_have_the_rate_of_the_others(monkeypatch):
    rates = {"quantized": 1e6, "transient": 2e6, "dense": 4e6}
    FakeClock(monkeypatch, rates)
    kinds = weight_kinds(quantized(), 64, 16)
    timing = time_paths(kinds, EVERY, 4.0)
    assert 0 < timing.timed < len(kinds)
    for path, rate in rates.items():
        step_s = sum(times[path] for times in timing.step_s)
        assert step_s == pytest.approx(sum(kind.multiply_adds for kind in kinds) / rate)


def test_a_path_that_is_far_behind_is_timed_once(monkeypatch):
    clock = FakeClock(monkeypatch, {"quantized": 1e8, "transient": 8e8, "dense": 1e9})
    kinds = weight_kinds(quantized(vocab_size=2048), 64, 16)
    time_paths(kinds, EVERY, 2.0)
    counts = {path: [call[0] for call in clock.calls].count(path) for path in EVERY}
    assert counts["quantized"] == 2 * len(kinds) < counts["transient"] == counts["dense"]
