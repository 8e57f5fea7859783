"""How long a run takes: its steps and evaluations, in a range, or the reason why that is not known."""

import json
from dataclasses import replace

import pytest

from mlx_packs import chips, runtime
from mlx_packs.config.schema import DataConfig, LoRAConfig, Phase, TrainConfig
from mlx_packs.memory import run_time
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.read import read_headers
from mlx_packs.memory.row_shapes import row_shapes
from mlx_packs.memory.run_time import MEASURED, NOT_KNOWN, PREDICTED, EpochSize, predict_run
from mlx_packs.memory.step_time import MeasuredStep, StepTime, predict
from tests.helpers.rows import CHATS, write_rows

LORA = LoRAConfig(rank=8)
RUN = TrainConfig(iters=100, batch_size=4, max_seq_length=257, steps_per_eval=40, val_batches=5)
EVALUATED = 2 * 5 + 2 * 32 / 4  # batches: of validations, and of 32 examples before and after
LEAST, MOST = run_time._EVALUATED  # steps of each


@pytest.fixture(scope="module")
def tiny() -> Headers:
    return read_headers("tiny")


@pytest.fixture
def steps_only(monkeypatch):
    """The start and answers take no time."""
    for name, value in {"START_S": 0.0, "GENERATED": 0.0, "READ_BYTES_PER_S": float("inf")}.items():
        monkeypatch.setattr(run_time, f"_{name}", (value, value))


@pytest.fixture
def step(monkeypatch, steps_only):
    """A step takes a thousandth of a second for each token of an example, by a calibration."""

    def predicted(headers, lora, train) -> StepTime:
        return StepTime(train.max_seq_length / 1000, "calibrated", 0.2)

    monkeypatch.setattr(run_time, "predict", predicted)
    timed = MeasuredStep("tiny", (1, 64), 1.0, 1.0, "2026-11-30")
    monkeypatch.setattr(run_time, "measured_steps", lambda: [timed])


def test_a_run_is_its_steps_and_evaluations(tiny, step):
    time = predict_run(tiny, LORA, RUN)
    assert time.low == pytest.approx(0.8 * 0.257 * (100 + LEAST * EVALUATED))
    assert time.high == pytest.approx(1.2 * 0.257 * (100 + MOST * EVALUATED))
    assert (time.source, time.why) == (MEASURED, "calibrated")
    without = predict_run(tiny, LORA, replace(RUN, val_batches=0, test_batches=1))
    assert without.high == pytest.approx(1.2 * 0.257 * (100 + MOST * 2))


def test_examples_decide_lengths_epochs_and_validations(tiny, step):
    epoch = EpochSize(batches=30, inputs=63.4, validation=3, held_out=7)
    two_epochs = TrainConfig(epochs=2.0, batch_size=4, steps_per_eval=40, val_batches=5)
    time = predict_run(tiny, LORA, two_epochs, epoch)
    assert time.high == pytest.approx(1.2 * 0.064 * (60 + MOST * (3 + 2 * 7)))
    everything = predict_run(tiny, LORA, replace(RUN, val_batches=-1), epoch)
    assert everything.high == pytest.approx(1.2 * 0.064 * (100 + MOST * (2 * 3 + 2 * 7)))
    for train in (two_epochs, replace(RUN, val_batches=-1), replace(RUN, test_batches=-1)):
        time = predict_run(tiny, LORA, train)
        assert (time.low, time.source) == (None, NOT_KNOWN) and "--data" in time.why


def test_the_start_and_all_answers_count(tiny, step, monkeypatch):
    train = replace(RUN, sample_every=50)
    epoch = EpochSize(30, 256.0, 3, 7, questions=10, answer=20.0)
    without = predict_run(tiny, LORA, train, epoch)
    for name, value in {"START_S": (2.0, 12.0), "GENERATED": (0.1, 1.0)}.items():
        monkeypatch.setattr(run_time, f"_{name}", value)
    time = predict_run(tiny, LORA, train, epoch)
    tokens_s = 0.002 * 20 * (2 * 10 + 5 * 3)
    assert time.low - without.low == pytest.approx(2 + 0.8 * 0.1 * tokens_s)
    assert time.high - without.high == pytest.approx(12 + 1.2 * tokens_s)


def test_a_limit_of_time_ends_the_training(tiny, step):
    time = predict_run(tiny, LORA, replace(RUN, iters=10**6, time="1m", test_batches=1))
    assert time.low == pytest.approx(60 + 0.8 * 0.257 * LEAST * 2) and time.high < 61


def test_rates_of_a_chip_give_a_wider_range(tiny, monkeypatch, steps_only):
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(chips, "_name", lambda: "Apple M3 Max")
    chips.chip_here.cache_clear()
    time = predict_run(tiny, LORA, RUN)
    chips.chip_here.cache_clear()
    seconds = predict(tiny, LORA, RUN).seconds * (100 + EVALUATED / 2)
    assert time.source == PREDICTED and "Apple M3 Max" in time.why
    assert time.low < seconds < time.high < 3 * seconds


def test_a_base_that_was_not_timed_has_the_range_of_a_prediction(tiny, step):
    other = predict_run(replace(tiny, name="other"), LORA, RUN)
    assert (other.source, other.why) == (PREDICTED, "calibrated")
    assert other.high > 1.8 * predict_run(tiny, LORA, RUN).high


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "dpo"}, "--task dpo"),
        ({"method": "full"}, "full fine-tuning"),
        ({"offload_base": "on"}, "on disk"),
        ({"phases": (Phase(name="a"),)}, "phases"),
    ],
)
def test_what_has_no_formula_says_so(tiny, step, changes, reason):
    time = predict_run(tiny, LORA, replace(RUN, **changes))
    assert (time.low, time.high, time.source) == (None, None, NOT_KNOWN) and reason in time.why
    mixture = Headers("m", tiny.config | {"model_type": "qwen3_moe"}, tiny.tensors)
    assert "qwen3_moe" in predict_run(mixture, LORA, RUN).why


def test_a_device_without_measurements_is_not_known(tiny):
    time = predict_run(tiny, LORA, RUN)  # tests have no cache
    assert (time.low, time.source) == (None, NOT_KNOWN) and "`packs bench`" in time.why


@pytest.mark.parametrize("share_prefix", ["off", "auto"])
def test_an_epoch_has_the_batches_and_lengths_of_the_rows(tmp_path, share_prefix):
    rows = [{"text": "word " * count} for count in (3, 3, 3, 3, 40, 40, 40, 40)]
    data = DataConfig(data=str(write_rows(tmp_path / "d", train=rows, valid=rows[:5])))
    train = replace(RUN, share_prefix=share_prefix)
    shapes = row_shapes("tiny", data, train, LORA)
    epoch = shapes.epoch_of(train)
    assert (epoch.batches, epoch.validation, epoch.held_out) == (2, 2, 2)
    assert 3 < epoch.inputs < 40 and max(shapes.shapes_of(train))[0] > epoch.inputs
    assert shapes.epoch_of(replace(train, batch_size=2)).batches == 4


def test_the_plan_shows_the_time_of_the_run(run, step, tmp_path):
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    few = "--val-batches 2 --test-batches 2 --iters 10 --memory 8 --data".split() + [data]

    best = json.loads(run("plan", *few, "--json")[1])["options"][0]
    assert best["seconds"].keys() == {"low", "high", "source", "why"}
    assert 0 < best["seconds"]["low"] < best["seconds"]["high"]

    out = run("plan", *few)[1]
    (line,) = [line for line in out.splitlines() if line.startswith("run ")]
    assert MEASURED in line and " to " in line
    table = run("plan", *few, "--model", "tiny", "--model", "none/of-these")[1]
    assert " to 0:" in table
