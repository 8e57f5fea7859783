"""Several packs in one batch: the memory of a step, what it saves, and when that is nothing."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.workloads import QWEN3_4B
from mlx_packs import chips, runtime
from mlx_packs.cli.plan import plan
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.read import read_headers
from mlx_packs.memory.together import of_packs, saving
from tests.helpers.errors import check
from tests.memory.test_step_time import quantized

LORA = LoRAConfig(rank=16)


@pytest.fixture
def on_m3_max(tmp_path, monkeypatch):
    """This process plans for an M3 Max on which nothing was measured."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(chips, "_name", lambda: "Apple M3 Max")
    chips.chip_here.cache_clear()
    yield
    chips.chip_here.cache_clear()


def one_row(tokens: int) -> TrainConfig:
    settings = {"matmul_path": "quantized", "recompute": "none"}
    return TrainConfig(batch_size=1, max_seq_length=tokens + 1, **settings)


def test_short_rows_save_time_and_long_ones_none(on_m3_max):
    headers = quantized(QWEN3_4B)
    short = saving(headers, LORA, one_row(84), 3)
    assert 0.2 < short.share < 0.5  # 0.31 by its captured graph
    assert "3 packs in one batch save" in short.line() and "%" in short.line()

    long = saving(headers, LORA, one_row(2048), 3)
    assert -0.05 < long.share < 0.1
    assert "save nothing" in long.line()


def test_a_cpu_that_measured_no_step_predicts_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(runtime, "on_cpu", lambda: True)
    assert saving(read_headers("tiny"), LORA, one_row(84), 3) is None


def test_packs_take_the_rows_and_adapters_of_all():
    headers = read_headers("tiny")
    one = estimate(headers, LORA, one_row(84))
    three = estimate(headers, *of_packs(LORA, one_row(84), 3))
    assert three.adapters == 3 * one.adapters
    assert three.optimizer == 3 * one.optimizer
    assert three.base == one.base


def test_ranks_of_all_packs_may_exceed_the_width_of_a_projection():
    headers = read_headers("tiny")
    one = estimate(headers, LORA, one_row(84))
    many = estimate(headers, *of_packs(LORA, one_row(84), 64))  # 64 * 16 > 256
    assert many.adapters == 64 * one.adapters


def test_plan_shows_packs_in_one_batch_and_their_command():
    result = CliRunner().invoke(plan, ["--seeds", "3"])
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("seeds   3 packs in one batch: peak")]
    assert lines[-1].endswith("--seeds 3 --out DIR")

    report = json.loads(CliRunner().invoke(plan, ["--seeds", "3", "--json"]).stdout)["options"]
    assert report[0]["together"]["packs"] == 3
    assert report[0]["together"]["peak_gb"] > report[0]["peak_gb"]

    refused = CliRunner().invoke(plan, ["--seeds", "3", "--method", "dora"], standalone_mode=False)
    check(refused.exception, "conflict", "method")
