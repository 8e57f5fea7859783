"""Losses and gradients that are not finite: stopped or skipped, with their rows."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Phase, TrainConfig, train_pack
from mlx_packs.errors import RunStopped
from mlx_packs.objectives.causal_lm import CausalLM
from mlx_packs.objectives.embedding import EmbeddingObjective
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from mlx_packs.training import on_nan, step
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.encoders import all_scored, write_pairs
from tests.helpers.errors import raises
from tests.helpers.observers import observe
from tests.helpers.rows import write_rows
from tests.helpers.runs import LORA, Lines
from tests.helpers.steps import weighted, with_weight
from tests.helpers.variants import slow_except
from tests.training.conftest import ROWS, files_of, interrupt_at, snapshot
from tests.training.test_float16 import batch_of, stepper_of

BAD = 3  # the example whose loss is nan: the fourth line
BAD_ROW = f"d/train.jsonl:{BAD + 1}"
# Each batch is an example.
ONE = {"iters": 6, "batch_size": 1, "save_every": 100, "test_batches": 1, "val_batches": 0}
DROPOUT = replace(LORA, dropout=0.1)
RUN = Path("p-run")


def poison(monkeypatch, *bad: int, times: int = 10**6) -> list[tuple]:
    """Give batches with these examples a loss of nan, ``times`` times; the batches that were."""
    prepare, poisoned = CausalLM.prepare, []

    def prepared(objective, batch):
        is_bad = bool(set(bad) & set(batch.examples)) and len(poisoned) < times
        if is_bad:
            poisoned.append(batch.examples)
        return with_weight(prepare(objective, batch), math.nan if is_bad else 1.0)

    monkeypatch.setattr(CausalLM, "prepare", prepared)
    monkeypatch.setattr(CausalLM, "loss", weighted)
    return poisoned


def records(run: Path = RUN) -> list[dict]:
    return [line for line in RunFolder(run).metrics() if "action" in line]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", slow_except(["adamw", "adamw_8bit", "muon"], "adamw"))
def test_a_skipped_update_changes_nothing(name, alone):
    results = {}
    for skips in (True, False):
        optimizer = make_optimizer(TrainConfig(iters=9, optimizer=name))
        model, stepper = stepper_of(mx.float32, None, optimizer, 1.0, skips)
        good, bad = batch_of(), batch_of(math.nan)
        stepper(good, True, alone)
        before = snapshot(model, optimizer)

        if skips:
            if not alone:  # the fault is in the first batch of two
                stepper(bad, False, alone)
            value, norm = stepper(bad if alone else good, True, alone)
            assert math.isnan(norm) and math.isnan(value) == alone
            assert snapshot(model, optimizer) == before

        stepper(good, True, alone)
        results[skips] = snapshot(model, optimizer)
        assert results[skips] != before

    assert results[True] == results[False]


@pytest.mark.parametrize(
    ("device", "save_every"), slow_except([("cpu", 1), ("gpu", 1), ("gpu", 100)], ("gpu", 1))
)
def test_stopping_names_the_rows_and_keeps_what_was_finite(train, monkeypatch, device, save_every):
    monkeypatch.setattr(step, "runs_ahead", lambda: device == "gpu")
    poison(monkeypatch, BAD)
    announced = []
    observe(monkeypatch, on_step=lambda line: announced.append(line["batch"]))
    kept = "No checkpoint was due" if save_every > 6 else "step-0"
    with raises("diverged", None, ": the loss is nan", f"{BAD_ROW}.", kept):
        train(**{**ONE, "save_every": save_every, "steps_per_report": 10})
    (record,) = records()
    assert record["rows"] == [BAD_ROW] and record["action"] == "stop"
    assert announced == list(range(1, record["batch"])) and not Path("p").exists()
    last = RunFolder(RUN).latest_checkpoint()
    assert (last and last.name) == (None if save_every > 6 else f"step-{announced[-1]:06d}")
    for file in RUN.rglob("*.safetensors"):
        assert all(mx.isfinite(array).all() for array in mx.load(str(file)).values())


@pytest.mark.parametrize(
    ("device", "accumulate"), slow_except([("cpu", 1), ("cpu", 2), ("gpu", 2)], ("gpu", 2))
)
def test_a_run_resumes_bit_identically_after_a_skip(train, monkeypatch, device, accumulate):
    monkeypatch.setattr(step, "runs_ahead", lambda: device == "gpu")
    poison(monkeypatch, BAD)
    settings = {**ONE, "iters": 12, "grad_accumulation_steps": accumulate, "steps_per_report": 5}
    settings |= {"on_nan": "skip", "lora": DROPOUT}
    whole = train("whole", **settings)
    skipped = [r["batch"] for r in records(whole.run)]
    assert len(skipped) == 2 and whole.report["skipped"] == 2
    assert whole.report["steps"] == 12 // accumulate - 2

    with monkeypatch.context() as patch:
        interrupt_at(patch, skipped[0])
        with pytest.raises(RunStopped):
            train(**settings)
    assert len(records()) == 1
    train(resume=True, **settings)
    assert files_of(RUN) == files_of(whole.run) and records() == records(whole.run)
    assert all(math.isfinite(line["loss"]) for line in whole.curve if "loss" in line)
    assert [line["batch"] for line in whole.curve if line.get("action") == "skip"] == skipped


@pytest.mark.parametrize(
    "settings",
    slow_except([{"batch_size": 2}, {"packing": True, "max_seq_length": 48}], {"batch_size": 2}),
)
def test_all_rows_of_a_batch_are_named(train, monkeypatch, settings):
    poisoned = poison(monkeypatch, BAD)
    display = Lines()
    train(progress=display, on_nan="skip", **{**ONE, **settings})
    for record, examples in zip(records(), poisoned, strict=True):
        assert record["rows"] == [f"d/train.jsonl:{i + 1}" for i in examples]
    assert any(BAD_ROW in line for line in display.lines)


def test_a_gradient_that_is_not_finite_is_skipped(train, monkeypatch):
    """The loss is finite; without a culprit all batches of the update are named."""
    loss, calls = CausalLM.loss, []

    def steep(objective, inputs, layout):
        total, count = loss(objective, inputs, layout)
        calls.append(1)
        zero = total - total
        return total + zero.square().sqrt() if len(calls) == 3 else total, count  # d: 0 / 0

    monkeypatch.setattr(CausalLM, "loss", steep)
    train(**{**ONE, "iters": 4, "grad_accumulation_steps": 2, "on_nan": "skip"})
    (record,) = records()
    assert record["fault"] == "the gradient is not finite" and len(record["rows"]) == 2


def test_many_skips_in_a_row_end_the_run(monkeypatch):
    monkeypatch.setattr(on_nan, "MOST_SKIPPED", 3)
    train = TrainConfig(on_nan="skip")
    files = SimpleNamespace(latest_checkpoint=lambda: None)
    run = SimpleNamespace(train=train, display=Lines(), files=files)
    batch = SimpleNamespace(rows=["d:1"])

    events = []
    first = on_nan.OnNan(run, [SimpleNamespace(on_event=events.append)])
    first.handle(1, "the loss is nan", [batch])
    first.updated()
    for number in (3, 4):
        first.handle(number, "the loss is nan", [batch])
    assert first.facts() == {"skipped": 3}

    resumed = on_nan.OnNan(run, ())  # two in a row were before
    resumed.resume(events, 4)
    resumed.handle(5, "the loss is nan", [batch])
    with raises("diverged", None, "step 6", "3 updates in a row", "d:1"):
        resumed.handle(6, "the loss is nan", [batch])


def test_phases_go_on_after_a_fault(train, monkeypatch):
    write_rows(Path("narrow"), train=ROWS[::-1], valid=ROWS[:1])
    two = (Phase("one", data="d", iters=6), Phase("two", data="narrow", iters=6))
    poison(monkeypatch, 8, times=1)
    run = train(data=None, phases=two, on_nan="skip", **ONE)
    (record,) = records()
    assert record["batch"] > 6 and record["rows"] == ["narrow/train.jsonl:3"]
    assert len(run.report["phases"]) == 2 and run.report["batches"] == 12


def test_pairs_have_rows_too(encoder, here, monkeypatch):
    data, prepared = write_pairs(here / "d", all_scored()), []

    def poisoned_once(objective, batch):
        prepared.append(batch.examples)
        weight = math.nan if len(prepared) == 1 else 1.0
        return batch.having(weights=batch.inputs["weights"] * np.float32(weight))

    monkeypatch.setattr(EmbeddingObjective, "prepare", poisoned_once)
    config = TrainConfig(task="embedding", batch_size=4, iters=2, on_nan="skip", val_batches=0)
    run = train_pack(encoder, str(data), LoRAConfig(rank=2), config, "p")
    (skipped,) = records()
    assert run.report["skipped"] == 1 and len(skipped["rows"]) == 4
    assert skipped["rows"] == [f"{data}/train.jsonl:{i + 1}" for i in prepared[0]]
