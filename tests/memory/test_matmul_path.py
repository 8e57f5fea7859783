"""Choosing how the frozen weights are multiplied."""

import mlx.nn as nn
import pytest

from mlx_packs.memory import matmul_path
from mlx_packs.memory.matmul_path import choose_matmul_path, weight_kinds
from mlx_packs.runtime import mx
from tests.helpers.models import base_of


def quantized(**changes):
    base = base_of("qwen3", **changes)
    nn.quantize(base.model, group_size=32, bits=4)
    base.model.freeze()
    return base.model


def test_seconds_runs_forward_and_backward():
    """Both products are in the graph that is evaluated."""
    calls = []
    x = mx.ones((4, 8))
    weight = mx.ones((6, 8))

    @mx.custom_function
    def multiply(v):
        calls.append("forward")
        return v @ weight.T

    @multiply.vjp
    def multiply_vjp(primals, cotangent, _):
        calls.append("backward")
        return cotangent @ weight

    matmul_path._seconds(multiply, x)
    assert calls.count("backward") >= 2 and calls.count("forward") > calls.count("backward")


@pytest.mark.parametrize(("tied", "kinds"), [(True, 6), (False, 6)])
def test_an_embedding_counts_as_a_head_only_where_it_is_one(tied, kinds):
    model = quantized(tie_word_embeddings=tied)
    assert weight_kinds(model) == kinds


def test_choice_names_every_path_with_its_time():
    counted = []
    choice = choose_matmul_path(quantized(), 64, 16, lambda: counted.append(1))
    assert set(choice.step_ms) == {"quantized", "transient", "dense"}
    assert all(ms > 0 for ms in choice.step_ms.values())
    assert choice.step_ms[choice.matmul_path] == min(choice.step_ms.values())
    assert len(counted) == weight_kinds(quantized())
    assert choice.line().endswith(f"→ {choice.matmul_path}")
    assert len(choice.kinds) == weight_kinds(quantized())
    for path, ms in choice.step_ms.items():
        assert ms == pytest.approx(sum(kind.step_ms[path] for kind in choice.kinds))
    measured = {name for kind in choice.kinds for name in kind.names}
    assert {"q_proj", "down_proj", "lm_head"} <= measured
    assert sum(kind.count for kind in choice.kinds) == 2 * 7 + 1


def test_the_fastest_path_that_is_planned_is_taken(monkeypatch):
    seconds = {"quantized": 3.0, "transient": 2.0, "dense": 1.0}
    monkeypatch.setattr(matmul_path, "product_seconds", lambda module, rows: seconds)

    def best(planned):
        return choose_matmul_path(quantized(), 64, planned=planned).matmul_path

    assert best({"quantized", "transient", "dense"}) == "dense"
    assert best({"quantized", "transient"}) == "transient"
    assert best({"quantized"}) == "quantized"


def test_dense_is_not_taken_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(matmul_path.runtime, "total_memory", lambda: 0)
    choice = choose_matmul_path(quantized(), 64)
    assert choice.matmul_path != "dense" and "dense would need" in choice.reason


def test_a_dense_base_needs_no_choice():
    choice = choose_matmul_path(base_of("qwen3").model, 64)
    assert (choice.matmul_path, choice.step_ms) == ("dense", {})


def test_scales_without_biases_are_measured_too():
    base = base_of("qwen3", hidden_size=64)
    nn.quantize(base.model, group_size=32, bits=4, mode="mxfp4")
    base.model.freeze()
    assert choose_matmul_path(base.model, 32).matmul_path in ("quantized", "transient", "dense")
