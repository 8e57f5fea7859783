"""Choosing the matmul path of frozen weights, and remembering it."""

import mlx.nn as nn
import pytest

from mlx_packs import chips, measurements, runtime
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.memory import matmul_path
from mlx_packs.memory.matmul_path import (
    LIMIT_S,
    Timing,
    choose_matmul_path,
    generation_path,
    weight_kinds,
)
from mlx_packs.runtime import mx
from tests.helpers.models import base_of

EVERY = {"quantized", "transient", "dense"}
STEP_S = {"quantized": 3.0, "transient": 2.0, "dense": 1.0}


def quantized(bits: int = 4, dtype: mx.Dtype = mx.float32, **changes):
    base = base_of("qwen3", **changes)
    base.model.set_dtype(dtype)
    nn.quantize(base.model, group_size=32, bits=bits)
    base.model.freeze()
    return base.model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "measurements"


@pytest.fixture
def limits(monkeypatch):
    """The limits of all measurements, which take no time and find `STEP_S`."""
    limits = []

    def time_paths(kinds, paths, limit_s):
        limits.append(limit_s)
        return Timing([{path: STEP_S[path] for path in paths} for _ in kinds], len(kinds), 0.25)

    monkeypatch.setattr(matmul_path, "time_paths", time_paths)
    return limits


def test_choice_names_every_path_with_its_time():
    choice = choose_matmul_path(quantized(), 64, 16)
    assert set(choice.step_ms) == EVERY
    assert all(ms > 0 for ms in choice.step_ms.values())
    assert choice.step_ms[choice.matmul_path] == min(choice.step_ms.values())
    assert f"→ {choice.matmul_path} (measured in " in choice.line()
    assert sum(kind.count for kind in weight_kinds(quantized(), 64, 16)) == 2 * 7 + 1


def test_both_passes_of_a_tree_count(limits):
    """Each pass dequantizes its weights; the head is multiplied once."""
    rows = choose_matmul_path(quantized(), 96, 16)
    tree = choose_matmul_path(quantized(), (32, 64), 16)
    kinds = len(weight_kinds(quantized(), 96, 16))
    share = (2 * kinds - 1) / kinds
    assert tree.step_ms == pytest.approx({p: share * ms for p, ms in rows.step_ms.items()})


def test_the_fastest_path_that_is_planned_is_taken(limits):
    def best(planned):
        return choose_matmul_path(quantized(), 64, planned=planned).matmul_path

    assert best({"quantized", "transient", "dense"}) == "dense"
    assert best({"quantized", "transient"}) == "transient"
    assert len(limits) == 2
    assert best({"quantized"}) == "quantized"
    assert len(limits) == 2, "one path is no choice"


def test_dense_is_not_taken_where_it_does_not_fit(limits, monkeypatch):
    monkeypatch.setattr(runtime, "total_memory", lambda: 0)
    choice = choose_matmul_path(quantized(), 64)
    assert choice.matmul_path != "dense" and "dense would need" in choice.reason


def test_a_dense_base_needs_no_choice():
    choice = choose_matmul_path(base_of("qwen3").model, 64)
    assert (choice.matmul_path, choice.step_ms) == ("dense", {})


def test_scales_without_biases_are_measured_too():
    base = base_of("qwen3", hidden_size=64)
    nn.quantize(base.model, group_size=32, bits=4, mode="mxfp4")
    base.model.freeze()
    choice = choose_matmul_path(base.model, 32)
    assert choice.matmul_path in EVERY and set(choice.step_ms) == EVERY


def test_what_was_measured_before_is_not_measured_again(cache, limits):
    model = quantized()
    first, again = (choose_matmul_path(model, 64, 16) for _ in range(2))
    assert limits == [LIMIT_S]
    assert "(measured in 0.2 s)" in first.line() and "(measured before)" in again.line()
    assert (again.matmul_path, again.step_ms) == (first.matmul_path, first.step_ms)
    choose_matmul_path(quantized(), 64, 16, steps=1)
    assert len(limits) == 1, "another base of the same geometry, and little work"
    fewer = choose_matmul_path(model, 64, 16, {"quantized", "transient"})
    assert fewer.matmul_path == "transient" and set(fewer.step_ms) == {"quantized", "transient"}
    assert len(limits) == 1


def test_other_work_and_devices_are_measured(cache, limits, monkeypatch):
    choose_matmul_path(quantized(), 64, 16)
    others = [
        (quantized(), 65, 16),
        (quantized(), 64, 17),
        (quantized(bits=8), 64, 16),
        (quantized(dtype=mx.bfloat16), 64, 16),
        (quantized(intermediate_size=128), 64, 16),
        (quantized(num_hidden_layers=1), 64, 16),
    ]
    for number, arguments in enumerate(others, 2):
        choose_matmul_path(*arguments)
        assert len(limits) == number

    for module, name, value in (
        (runtime, "device_name", lambda: "Apple M9 (metal)"),
        (measurements.mx, "__version__", "9.9"),
    ):
        before = len(limits)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            choose_matmul_path(quantized(), 64, 16)
        assert len(limits) == before + 1

    choose_matmul_path(quantized(), 64, 16)
    assert len(limits) == before + 1


def test_paths_that_were_not_measured_before_are(cache, limits):
    choose_matmul_path(quantized(), 64, planned={"quantized", "transient"})
    assert choose_matmul_path(quantized(), 64).matmul_path == "dense" and len(limits) == 2


def test_a_measurement_takes_a_tenth_of_the_work_at_most(limits, monkeypatch):
    monkeypatch.setattr(matmul_path, "_expected", lambda *_: {"quantized": 0.2, "dense": 0.1})
    short = choose_matmul_path(quantized(), 64, steps=9)
    assert not limits and not short.step_ms and short.matmul_path == "dense"
    assert "by formula" in short.line()
    for steps, limit in ((110, 1.1), (150, 1.5), (10_000, LIMIT_S), (None, LIMIT_S)):
        choose_matmul_path(quantized(), 64, steps=steps)
        assert limits[-1] == pytest.approx(limit)


def test_without_time_for_a_repetition_the_formula_chooses(cache, monkeypatch):
    monkeypatch.setattr(matmul_path, "time_paths", lambda *_: None)
    choice = choose_matmul_path(quantized(), 64)
    assert choice.line() == f"dense (by formula, since {LIMIT_S:.1f} s were too short to measure)"
    assert not cache.exists()


def test_formula_of_a_cpu_prefers_dense_then_transient():
    kinds = matmul_path.weight_kinds(quantized(), 512, 64)
    expected = matmul_path._expected(kinds, sorted(EVERY))
    assert sorted(expected, key=expected.get) == ["dense", "transient", "quantized"]


@pytest.mark.parametrize(("tokens", "fastest"), [(16, "quantized"), (4096, "transient")])
def test_formula_of_a_gpu_dequantizes_for_many_tokens(monkeypatch, tokens, fastest):
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(chips, "chip_here", lambda: chips.chip("Apple M2 Pro"))
    model = quantized(dtype=mx.bfloat16, hidden_size=512, intermediate_size=1536)
    kinds = matmul_path.weight_kinds(model, tokens, tokens)
    expected = matmul_path._expected(kinds, ["quantized", "transient"])
    assert min(expected, key=expected.get) == fastest


@pytest.mark.parametrize(
    ("mode", "chip", "fastest"),
    [("mxfp4", "M5", "transient"), ("mxfp4", "M4", "quantized"), ("affine", "M5", "quantized")],
)
def test_formula_of_matrix_units_knows_that_gradients_of_fp4_have_none(
    monkeypatch, mode, chip, fastest
):
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(chips, "chip_here", lambda: chips.chip(f"Apple {chip}"))
    model = base_of("qwen3", hidden_size=512, intermediate_size=1536).model
    nn.quantize(model, group_size=32, bits=4, mode=mode)
    kinds = matmul_path.weight_kinds(model, 256, 256)
    expected = matmul_path._expected(kinds, ["quantized", "transient"])
    assert min(expected, key=expected.get) == fastest


def test_formula_takes_the_rates_that_were_measured(cache, monkeypatch):
    rates = {"quantized": 4e9, "transient": 2e9, "dense": 1e9}
    monkeypatch.setattr(matmul_path, "_LARGE", 1)

    def time_paths(kinds, paths, limit_s):
        times = [{path: kind.multiply_adds / rates[path] for path in paths} for kind in kinds]
        return Timing(times, len(kinds), 1.0)

    monkeypatch.setattr(matmul_path, "time_paths", time_paths)
    choose_matmul_path(quantized(), 64)
    kinds = matmul_path.weight_kinds(quantized(), 128, 128)
    work = sum(kind.multiply_adds for kind in kinds)
    expected = matmul_path._expected(kinds, sorted(EVERY))
    assert expected == pytest.approx({path: work / rate for path, rate in rates.items()})
    assert choose_matmul_path(quantized(), 128, steps=1).matmul_path == "quantized"
    other = matmul_path.weight_kinds(quantized(bits=8), 128, 128)
    assert matmul_path._expected(other, sorted(EVERY)) != expected


def test_text_is_generated_with_dense_weights_on_a_cpu_that_has_the_memory(monkeypatch):
    model = quantized()
    with runtime.assumed_device("cpu"):
        assert generation_path(model) == "dense"
        needed = matmul_path.dense_bytes(model)
        monkeypatch.setattr(runtime, "total_memory", lambda: mx.get_active_memory() + 2 * needed)
        assert generation_path(model) == "transient"
    with runtime.assumed_device("gpu"):
        assert generation_path(model) == "quantized"
