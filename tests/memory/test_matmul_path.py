"""Choosing the matmul path of frozen weights, and remembering it."""

import mlx.nn as nn
import pytest

from mlx_packs import chips, measurements, runtime
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.memory import matmul_path
from mlx_packs.memory.matmul_path import (
    LIMIT_S,
    choose_matmul_path,
    dense_bytes,
    generation_path,
    time_paths,
    weight_kinds,
)
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.nf4 import NF4Linear
from mlx_packs.nn.quantized import PATHS, DenseLinear, apply_matmul_path
from mlx_packs.runtime import mx
from tests.helpers.models import base_of, nf4_embedding

EVERY = tuple(MATMUL_PATHS)
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
        return {path: STEP_S[path] for path in paths}

    monkeypatch.setattr(matmul_path, "time_paths", time_paths)
    return limits


def test_choice_names_every_path_with_its_time():
    choice = choose_matmul_path(quantized(), 64, 16)
    assert set(choice.step_ms) == set(EVERY)
    assert all(ms > 0 for ms in choice.step_ms.values())
    assert choice.step_ms[choice.matmul_path] == min(choice.step_ms.values())
    assert f"→ {choice.matmul_path} (measured in " in choice.line()
    assert sum(kind.count for kind in weight_kinds(quantized(), 64, 16)) == 2 * 7 + 1


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


def test_scales_without_biases_are_measured_too():
    base = base_of("qwen3", hidden_size=64)
    nn.quantize(base.model, group_size=32, bits=4, mode="mxfp4")
    base.model.freeze()
    choice = choose_matmul_path(base.model, 32)
    assert choice.matmul_path in EVERY and set(choice.step_ms) == set(EVERY)


def test_what_was_measured_before_is_not_measured_again(cache, limits):
    model = quantized()
    first, again = (choose_matmul_path(model, 64, 16) for _ in range(2))
    assert limits == [LIMIT_S]
    assert "(measured in 0.0 s)" in first.line() and "(measured before)" in again.line()
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
    ]
    for arguments in others:
        choose_matmul_path(*arguments)
    for module, name, value in (
        (runtime, "device_name", lambda: "Apple M9 (metal)"),
        (measurements.mx, "__version__", "9.9"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            choose_matmul_path(quantized(), 64, 16)
    choose_matmul_path(quantized(), 64, 16)
    assert len(limits) == 1 + len(others) + 2


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


@pytest.mark.parametrize(
    ("chip", "mode", "tokens", "fastest"),
    [
        ("M2 Pro", "affine", 16, "quantized"),
        ("M2 Pro", "affine", 4096, "transient"),
        ("M5", "affine", 256, "quantized"),
        ("M4", "mxfp4", 256, "quantized"),
        ("M5", "mxfp4", 256, "transient"),  # whose matrix units have no gradients of FP4
    ],
)
def test_formula_of_a_gpu_dequantizes_for_many_tokens(monkeypatch, chip, mode, tokens, fastest):
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(chips, "chip_here", lambda: chips.chip(f"Apple {chip}"))
    model = base_of("qwen3", hidden_size=512, intermediate_size=1536).model
    if mode == "affine" and chip == "M2 Pro":
        model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4, mode=mode)
    kinds = matmul_path.weight_kinds(model, tokens, tokens)
    expected = matmul_path._expected(kinds, ["quantized", "transient"])
    assert min(expected, key=expected.get) == fastest


def test_text_is_generated_with_dense_weights_on_a_cpu_that_has_the_memory(monkeypatch):
    model = quantized()
    with runtime.assumed_device("cpu"):
        assert generation_path(model) == "dense"
        needed = matmul_path.dense_bytes(model)
        monkeypatch.setattr(runtime, "total_memory", lambda: mx.get_active_memory() + 2 * needed)
        assert generation_path(model) == "transient"
    with runtime.assumed_device("gpu"):
        assert generation_path(model) == "quantized"


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_beside_a_head_has_no_dense_copy(tied):
    model = quantized(tie_word_embeddings=tied)
    table = model.model.embed_tokens
    with runtime.assumed_device("cpu"):
        before = dense_bytes(model)
        originals = dict(apply_matmul_path(model, "dense"))
    copies = [module for _, module in model.named_modules() if type(module) is DenseLinear]
    copies += [model.model.embed_tokens] * tied
    assert sum(module.weight.nbytes for module in copies) == before
    is_dense = model.model.embed_tokens is not table
    assert is_dense == tied == ("model.embed_tokens" in originals)


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


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_counts_as_a_head_only_where_it_is_one(tied):
    model = quantized(tie_word_embeddings=tied)
    kinds = weight_kinds(model, 64, 16)
    assert len(kinds) == 6 and sum(kind.count for kind in kinds) == 2 * 7 + 1
    (head,) = [kind.module for kind in kinds if kind.tokens == 16]
    assert head is (model.model.embed_tokens if tied else model.lm_head)


def test_times_are_those_of_whole_weights_and_all_tokens(monkeypatch):
    rates = {"quantized": 2e7, "transient": 4e7, "dense": 5e7}
    FakeClock(monkeypatch, rates)
    monkeypatch.setattr(matmul_path, "_TOKENS_CPU", {True: 4, False: 32})
    kinds = weight_kinds(quantized(vocab_size=512), 64, 16)
    work = sum(kind.multiply_adds for kind in kinds)
    for path, seconds in time_paths(kinds, EVERY, 60.0).items():
        assert seconds == pytest.approx(work / rates[path])


@pytest.mark.parametrize(("rate", "compilation_s"), [(1e6, 0.05), (1e9, 0.05)])
def test_the_limit_is_passed_by_one_product_at_most(monkeypatch, rate, compilation_s):
    rates = {"quantized": rate / 20, "transient": rate / 2, "dense": rate}
    clock = FakeClock(monkeypatch, rates, compilation_s)
    kinds = weight_kinds(quantized(vocab_size=4096), 64, 16)
    timing = time_paths(kinds, EVERY, 2.0)
    path, rows, (tokens, width) = clock.calls[-1]
    assert clock.now <= 102 + 2 * rows * tokens * width / rates[path] + compilation_s
    if timing is not None:
        assert sorted(EVERY, key=timing.__getitem__) == ["dense", "transient", "quantized"]


def test_no_time_for_each_path_is_no_measurement(monkeypatch):
    clock = FakeClock(monkeypatch, dict.fromkeys(EVERY, 1e3))
    assert time_paths(weight_kinds(quantized(), 64, 16), EVERY, 2.0) is None
    assert len(clock.calls) == 1


def first_rows_of(linear: nn.Linear, embedding: nn.Embedding) -> list[nn.Module]:
    return [
        nn.QuantizedLinear.from_linear(linear, 32, 8),
        nn.QuantizedLinear.from_linear(linear, mode="mxfp4"),
        NF4Linear.from_linear(linear, 64, False),
        nf4_embedding(embedding, 64, True),
    ]


@pytest.mark.parametrize("kind", range(4))
def test_first_rows_are_those_of_the_weight(kind):
    linear, embedding = nn.Linear(96, 200), nn.Embedding(200, 96)
    module = first_rows_of(linear, embedding)[kind]
    part, whole = frozen_weight(module).first_rows(7), frozen_weight(module).dense()
    assert mx.array_equal(frozen_weight(part).dense(), whole[:7])
    assert mx.array_equal(frozen_weight(module).dense(), whole), "the module stays as it was"
