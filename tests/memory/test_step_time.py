"""Seconds of a step: predicted by rates of a chip, or by what was measured on this device."""

import json
from dataclasses import replace

import pytest

from benchmarks.workloads import LLAMA3_8B, QWEN3_4B
from mlx_packs import chips, measurements, runtime
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.memory import step_time
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.plan_text import answer
from mlx_packs.memory.read import describe, read_headers
from mlx_packs.memory.recommend import recommend
from mlx_packs.memory.step_time import predict, remember_steps, slow_in_place
from tests.helpers.fp4 import write_compressed

LORA = LoRAConfig(rank=16)
RATES = {"copied_gb_s": 10.0, "float32_tflops": 0.1}
RATES |= {"float16_tflops": 0.1, "bfloat16_tflops": 0.1, "launch_us": 5.0}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    chips.chip_here.cache_clear()
    yield tmp_path
    chips.chip_here.cache_clear()


@pytest.fixture
def measured_rates(cache):
    """Rates of dense products and memory, as this device's earlier runs have measured them."""
    measurements.remember(chips._KIND, {"name": chips._name()}, RATES)


@pytest.fixture
def on_gpu(cache, monkeypatch):
    """This process plans for a GPU of a name."""
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)

    def named(name: str) -> None:
        monkeypatch.setattr(chips, "_name", lambda: name)
        chips.chip_here.cache_clear()

    return named


def run(rows: int, length: int, **settings) -> TrainConfig:
    settings = {"matmul_path": "dense", "recompute": "none"} | settings
    return TrainConfig(batch_size=rows, max_seq_length=length + 1, **settings)


def quantized(config: dict, mode: str = "affine", group_size: int = 64) -> Headers:
    """The headers of a 4-bit checkpoint of a config."""
    headers = describe("base", config)
    scales = {n.replace(".weight", ".scales"): t for n, t in headers.tensors.items()}
    quantization = {"bits": 4, "group_size": group_size, "mode": mode}
    return Headers("base", config | {"quantization": quantization}, {**headers.tensors, **scales})


def calibrate(factor: float) -> Headers:
    """Remember steps of the embedded base that take a factor of what rates predict."""
    headers = read_headers("tiny")
    steps = []
    for shape in ((1, 64), (1, 256), (4, 64)):
        train = run(*shape)
        needed = step_time.work(headers, LORA, train)
        seconds = factor * step_time._by_rates(needed, headers, train)
        steps.append((headers, LORA, train, "tiny", seconds))
    assert remember_steps(steps) == 3
    return headers


# Seconds of the captured graphs of these steps (4 bits, rank 16, quantized), by a model of the chips
CAPTURED = [
    (QWEN3_4B, 1, 2048, {"M2 Pro": 9.24, "M3 Max": 4.33, "M4 Max": 3.55}),
    (QWEN3_4B, 4, 512, {"M2 Pro": 8.36, "M3 Max": 3.92, "M4 Max": 3.22}),
    (LLAMA3_8B, 1, 2048, {"M2 Pro": 15.63, "M3 Max": 7.30, "M4 Max": 6.00}),
]


@pytest.mark.parametrize("config, rows, length, captured", CAPTURED, ids=["4b", "4b-4", "8b"])
def test_rates_of_a_chip_give_what_captured_graphs_give(on_gpu, config, rows, length, captured):
    for name, seconds in captured.items():
        on_gpu(f"Apple {name}")
        predicted = predict(quantized(config), LORA, run(rows, length, matmul_path="quantized"))
        assert predicted.seconds == pytest.approx(seconds, rel=0.15)
        assert predicted.source == f"predicted by rates of the Apple {name}, not measured"
        assert predicted.error is None


# Seconds of captured graphs of Qwen3-4B in nvfp4 at 1 x 2048, `python -m benchmarks graph`
NVFP4 = {
    "M4 Max": {"quantized": 3.50, "transient": 3.31},
    "M5 Max": {"quantized": 1.88, "transient": 1.08},
}


@pytest.mark.parametrize("chip", NVFP4)
def test_gradients_through_fp4_do_not_use_matrix_units(on_gpu, chip):
    on_gpu(f"Apple {chip}")
    base = quantized(QWEN3_4B, "nvfp4", 16)
    for path, seconds in NVFP4[chip].items():
        predicted = predict(base, LORA, run(1, 2048, matmul_path=path)).seconds
        assert predicted == pytest.approx(seconds, rel=0.15), path

    is_m5 = chip == "M5 Max"
    lines = " ".join(answer(options := recommend(base, 64 << 30), base, 64 << 30, verbose=True))
    assert options[0].plan.matmul_path == ("transient" if is_m5 else "quantized")
    assert ("gradients through nvfp4" in lines) == is_m5
    affine = quantized(QWEN3_4B)
    assert recommend(affine, 64 << 30)[0].plan.matmul_path == "quantized"


def test_bases_in_fp4_are_planned_by_their_mode(on_gpu, tmp_path):
    on_gpu("Apple M5 Max")
    headers = read_headers(write_compressed(tmp_path / "base", "mxfp4"))
    reason = slow_in_place(headers, run(1, 2048))
    assert "gradients through mxfp4" in reason and "M5 Max" in reason
    assert recommend(headers, 64 << 30)[0].plan.matmul_path == "transient"
    headers = read_headers(write_compressed(tmp_path / "nvfp4", "nvfp4"))
    way = recommend(headers, 64 << 30)[0]  # loading quantizes it again
    assert (way.quantize, way.plan.matmul_path) == ("affine4", "quantized")


def test_more_work_takes_longer(on_gpu):
    on_gpu("Apple M3 Max")
    base, settings = quantized(QWEN3_4B), run(1, 1024, matmul_path="quantized")

    def seconds(lora=LORA, **changes):
        return predict(base, lora, replace(settings, **changes)).seconds

    assert seconds(recompute="block") > 1.2 * seconds()
    assert seconds(batch_size=2) > 1.8 * seconds()
    assert seconds(max_seq_length=2049) > 2 * seconds()
    assert seconds(LoRAConfig(rank=64)) > seconds()
    assert seconds(LoRAConfig(rank=16, num_layers=4)) < 0.8 * seconds()
    assert seconds(matmul_path="dense") < seconds()


def test_nothing_is_predicted_where_nothing_is_known(cache, monkeypatch):
    tiny = read_headers("tiny")
    assert predict(tiny, LORA, run(1, 64)) is None  # a CPU without a measurement
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(chips, "_name", lambda: "Apple M99")
    assert predict(tiny, LORA, run(1, 64)) is None
    monkeypatch.setattr(chips, "_name", lambda: "Apple M3 Max")
    assert predict(tiny, LORA, run(1, 64)) is not None
    assert predict(tiny, LORA, run(1, 64, method="full")) is None
    mixture = Headers("m", tiny.config | {"model_type": "qwen3_moe"}, tiny.tensors)
    assert predict(mixture, LORA, run(1, 64)) is None


def test_measured_steps_calibrate_other_shapes_and_paths(measured_rates):
    headers = calibrate(factor=2.0)
    for path in ("dense", "transient", "quantized"):
        train = run(2, 512, matmul_path=path)
        needed = step_time.work(headers, LORA, train)
        predicted = predict(headers, LORA, train)
        expected = 2 * step_time._by_rates(needed, headers, train)
        assert predicted.seconds == pytest.approx(expected, rel=1e-3)
        assert predicted.source.startswith("calibrated by packs bench of 20")
        assert predicted.source.endswith("(tiny)") and predicted.error == 0.1
    slow, fast = (run(2, 512, matmul_path=path) for path in ("quantized", "dense"))
    assert predict(headers, LORA, slow).seconds > 5 * predict(headers, LORA, fast).seconds


def test_measurements_of_another_device_are_ignored(measured_rates, monkeypatch):
    headers = calibrate(2.0)
    assert predict(headers, LORA, run(1, 64)) is not None
    with runtime.assumed_device("cpu"):
        assert predict(headers, LORA, run(1, 64)) is None
    monkeypatch.setattr(runtime, "device_name", lambda: "Apple M9 (metal)")
    assert predict(headers, LORA, run(1, 64)) is None


@pytest.mark.parametrize("steps", [None, [], [{"model": "x"}], [3]])
def test_a_damaged_calibration_is_none(measured_rates, steps):
    headers = calibrate(2.0)
    measurements.remember("step-times", {}, {"steps": steps} if steps is not None else {})
    assert step_time.measured_steps() == [] and predict(headers, LORA, run(1, 64)) is None


def test_the_plan_shows_seconds_and_where_they_are_from(measured_rates):
    headers = calibrate(2.0)
    options = recommend(headers, 10**10, LORA)
    lines = answer(options, headers, 10**10, width=80, verbose=True)
    assert max(map(len, lines[:-1])) <= 80
    assert any(line.endswith("s/step fits") for line in lines)
    assert "calibrated by packs bench of 20" in " ".join(" ".join(lines).split())
    report = json.loads(json.dumps([option.to_json() for option in options]))
    assert all(o["step_s"] > 0 and o["step_error"] == 0.1 for o in report if o["method"] != "full")
    assert report[-1]["method"] == "full" and report[-1]["step_s"] is None
