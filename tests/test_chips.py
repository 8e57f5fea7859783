"""What is known of GPUs: by the table, or measured; never another chip's figures."""

import pytest

from mlx_packs import chips, measurements
from mlx_packs.chips import CHIPS, chip, chip_here, measure
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.runtime import mx

RATES = {
    "copied_gb_s": 90.0,
    "float32_tflops": 7.0,
    "float16_tflops": 21.0,
    "bfloat16_tflops": 20.0,
}


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine whose GPU has the name that is called; the rates that it measures."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    rates, measured = dict(RATES), []

    def product(dtype):
        measured.append(dtype)
        return rates[f"{str(dtype).removeprefix('mlx.core.')}_tflops"]

    monkeypatch.setattr(chips, "_copied_gb_s", lambda: rates["copied_gb_s"])
    monkeypatch.setattr(chips, "product_tflops", product)
    monkeypatch.setattr(chips, "_launch_us", lambda: 4.5)

    def named(name: str) -> dict:
        monkeypatch.setattr(mx, "device_info", lambda: {"device_name": name})
        chip_here.cache_clear()
        return rates

    named.measured = measured
    yield named
    chip_here.cache_clear()


def test_table_has_every_mac():
    sold = [f"Apple M{n}{size}" for n in range(1, 6) for size in ("", " Pro", " Max", " Ultra")]
    assert {name for name in sold if chip(name) is None} == {"Apple M4 Ultra", "Apple M5 Ultra"}
    assert all(entry.name == name for name, entry in CHIPS.items())


def test_figures_of_table_grow_with_generation_and_size():
    for n in range(1, 6):
        sizes = [chip(f"Apple M{n}{size}") for size in ("", " Pro", " Max", " Ultra")]
        for small, large in zip(sizes, sizes[1:], strict=False):
            if large is not None:
                assert small.bandwidth_gb_s < large.bandwidth_gb_s
                assert small.vector_tflops < large.vector_tflops
                assert small.gpu_cores < large.gpu_cores
        assert sizes[0].native_bf16 == (n >= 3) and sizes[0].matrix_units == (n == 5)
    assert chip("NVIDIA H200").matrix_units


@pytest.mark.parametrize("name", ["Apple M9 Max", ""])
def test_an_unknown_chip_is_measured_once_and_remembered(gpu, name):
    gpu(name)
    assert chip() is None and chip(name) is None
    here = chip_here()
    assert here.measured and here.name == name
    assert here.bandwidth_gb_s == pytest.approx(90 / chips.BANDWIDTH_REACHED)
    assert here.matrix_tflops == pytest.approx(21 / chips.MATMUL_REACHED)
    assert here.matrix_units and here.native_bf16
    count = len(gpu.measured)
    chip_here.cache_clear()  # as in a new process
    assert chip_here() == here and len(gpu.measured) == count == 3


def test_rates_of_other_names_are_measured_again(gpu):
    gpu("Apple M9")
    measurements.remember("rates", {"name": "Apple M9"}, {"copied_gb_s": 1.0, "tflops": 2.0})
    assert chips.known_chip() is None
    assert chip_here().bandwidth_gb_s == pytest.approx(120) and chips.known_chip() == chip_here()


def test_emulated_bfloat16_of_an_unknown_chip_is_seen(gpu):
    gpu("Apple M9")["bfloat16_tflops"] = 11.0
    assert not chip_here().native_bf16


def test_a_known_chip_is_not_measured_unless_asked_for(gpu):
    gpu("Apple M3 Max")
    assert chip_here() == chip() == chip("Apple M3 Max") and not gpu.measured
    measured = measure()
    assert chip_here() == measured and measured.measured
    assert measured.bandwidth_gb_s == pytest.approx(120)  # a laptop that throttles, say
    assert (measured.gpu_cores, measured.vector_tflops, measured.launch_us) == (40, 10.0, 4.5)
    assert chip() == chip("Apple M3 Max")  # the table is the table


@pytest.mark.slow
def test_rates_are_measured_on_this_machine():
    assert chips._copied_gb_s() > 0.01
    assert chips.product_tflops(mx.float32) > 1e-4
    assert 0.01 < chips._launch_us() < 1e4
