"""Losses and gradients that are not finite: stopped, skipped or backed off from, with their rows."""

import json
import math
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, Phase, TrainConfig, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.errors import RunStopped
from mlx_packs.objectives.causal_lm import CausalLM, split_head
from mlx_packs.objectives.embedding import EmbeddingObjective
from mlx_packs.optim import make_optimizer
from mlx_packs.reading import sha256
from mlx_packs.training import on_nan, step
from mlx_packs.training.run_folder import latest_checkpoint, read_metrics
from mlx_packs.training.step import Stepper
from tests.helpers.encoders import all_scored, write_pairs
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.observers import observe
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import LORA, TRAIN, Lines
from tests.helpers.steps import examples_of, fill_b, make_batch, weighted, with_weight

WORDS = "one two six ten red sun".split()
ROWS = [chat(f"Say {w}.", f"Yes, I say {w} to you.") for w in WORDS]
BAD = 3  # the example whose loss is nan: the fourth line
FEW = {"iters": 6, "batch_size": 1, "save_every": 100, "test_batches": 1}
ONE = replace(TRAIN, **FEW)  # each batch is an example
DROPOUT = LoRAConfig(rank=2, num_layers=1, dropout=0.1)


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows", train=ROWS, valid=ROWS[:1])


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


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "not_finite.jsonl").read_text().splitlines()]


def files_of(run: Path) -> dict[str, str]:
    """Hashes of the tensors of the last checkpoint."""
    return {f.name: sha256(f) for f in latest_checkpoint(run).glob("*.safetensors")}


def snapshot(model, optimizer) -> dict[str, list]:
    state = {"weights": model.trainable_parameters(), **optimizer.state}
    return {name: array.tolist() for name, array in tree_flatten(state)}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_a_skipped_update_changes_nothing(name, alone):
    results = {}
    for skips in (True, False):
        base = base_of("qwen3")
        fill_b(attach(base, LoRAConfig(rank=4)))
        base.model.train()
        optimizer = make_optimizer(TrainConfig(iters=9, optimizer=name))
        optimizer.init(base.model.trainable_parameters())
        objective = CausalLM(base.model, split_head(base.model))
        stepper = Stepper(base.model, partial(weighted, objective), optimizer, 1.0, skips)
        batch = make_batch(examples_of((9, 17)), range(2), 2, 64)
        good, bad = with_weight(batch, 1.0), with_weight(batch, math.nan)
        stepper(good, True, alone)
        before = snapshot(base.model, optimizer)
        if skips:
            if not alone:  # the fault is in the first batch of two
                stepper(bad, False, alone)
            value, norm = stepper(good if not alone else bad, True, alone)
            assert math.isnan(norm) and math.isnan(value) == alone
            assert snapshot(base.model, optimizer) == before
        stepper(good, True, alone)
        results[skips] = snapshot(base.model, optimizer)
        assert results[skips] != before
    assert results[True] == results[False]


@pytest.mark.parametrize("settings", [{}, {"grad_accumulation_steps": 2, "packing": True}])
def test_policies_change_no_byte_without_a_fault(small, rows, tmp_path, settings):
    hashes = set()
    for policy in ("stop", "skip", "back-off"):
        train = replace(ONE, **settings, on_nan=policy, max_seq_length=32)
        train_pack(small, rows, DROPOUT, train, tmp_path / policy)
        hashes.add(tuple(files_of(tmp_path / f"{policy}-run").values()))
    assert len(hashes) == 1


def test_stopping_names_the_rows(small, rows, tmp_path, monkeypatch):
    train = replace(ONE, save_every=1)
    with monkeypatch.context() as patch:
        poison(patch, BAD)
        with raises("diverged", None, "the loss is nan", f"{rows}/train.jsonl:{BAD + 1}."):
            train_pack(small, rows, LORA, train, tmp_path / "p")
        (record,) = records(tmp_path / "p-run")
        assert record["rows"] == [f"{rows}/train.jsonl:{BAD + 1}"] and record["action"] == "stop"
        batch = record["batch"]
        assert latest_checkpoint(tmp_path / "p-run").name == f"step-{batch - 1:06d}"
        # the same command goes on with another policy
        run = train_pack(
            small, rows, LORA, replace(train, on_nan="skip"), tmp_path / "p", resume=True
        )
    assert run.report["batches"] == 6 and run.report["skipped"] == 1
    assert [r["action"] for r in records(tmp_path / "p-run")] == ["stop", "skip"]


@pytest.mark.parametrize(("device", "accumulate"), [("cpu", 1), ("cpu", 2), ("gpu", 2)])
def test_a_run_resumes_bit_identically_after_a_skip(
    small, rows, tmp_path, monkeypatch, device, accumulate
):
    monkeypatch.setattr(step, "runs_ahead", lambda: device == "gpu")
    poison(monkeypatch, BAD)
    settings = {"grad_accumulation_steps": accumulate, "steps_per_report": 5}
    train = replace(ONE, on_nan="skip", iters=12, **settings)
    run = train_pack(small, rows, DROPOUT, train, tmp_path / "whole")
    skipped = [r["batch"] for r in records(tmp_path / "whole-run")]
    assert len(skipped) == 2 and run.report["skipped"] == 2
    assert run.report["steps"] == 12 // accumulate - 2

    def interrupt(line):
        if line["batch"] == skipped[0]:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        observe(patch, on_step=interrupt)
        with pytest.raises(RunStopped):
            train_pack(small, rows, DROPOUT, train, tmp_path / "cut")
    assert len(records(tmp_path / "cut-run")) == 1
    train_pack(small, rows, DROPOUT, train, tmp_path / "cut", resume=True)
    assert files_of(tmp_path / "cut-run") == files_of(tmp_path / "whole-run")
    assert records(tmp_path / "cut-run") == records(tmp_path / "whole-run")
    assert all(math.isfinite(line["loss"]) for line in run.curve if "loss" in line)
    assert [line["batch"] for line in run.curve if line.get("action") == "skip"] == skipped


@pytest.mark.parametrize("settings", [{"batch_size": 2}, {"packing": True, "max_seq_length": 48}])
def test_all_rows_of_a_batch_are_named(small, rows, tmp_path, monkeypatch, settings):
    poisoned = poison(monkeypatch, BAD)
    train = replace(ONE, iters=6, on_nan="skip", **settings)
    display = Lines()
    train_pack(small, rows, LORA, train, tmp_path / "p", display=display)
    for record, examples in zip(records(tmp_path / "p-run"), poisoned, strict=True):
        assert record["rows"] == [f"{rows}/train.jsonl:{i + 1}" for i in examples]
    assert any(f"train.jsonl:{BAD + 1}" in line for line in display.lines)


def test_a_gradient_that_is_not_finite_is_skipped(small, rows, tmp_path, monkeypatch):
    """The loss is finite; without a culprit all batches of the update are named."""
    loss, calls = CausalLM.loss, []

    def steep(objective, inputs, layout):
        total, count = loss(objective, inputs, layout)
        calls.append(1)
        zero = total - total
        return total + zero.square().sqrt() if len(calls) == 3 else total, count  # d: 0 / 0

    monkeypatch.setattr(CausalLM, "loss", steep)
    train = replace(ONE, iters=4, grad_accumulation_steps=2, on_nan="skip")
    train_pack(small, rows, LORA, train, tmp_path / "p")
    (record,) = records(tmp_path / "p-run")
    assert record["fault"] == "the gradient is not finite" and len(record["rows"]) == 2


def test_many_skips_in_a_row_end_the_run(small, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(on_nan, "MOST_SKIPPED", 3)
    poison(monkeypatch, *range(6))
    train = replace(ONE, iters=9, on_nan="skip", save_every=2)
    with raises("diverged", None, "step 4", "3 updates in a row", "train.jsonl"):
        train_pack(small, rows, LORA, train, tmp_path / "p")
    assert latest_checkpoint(tmp_path / "p-run").name == "step-000002"
    with raises("diverged", None, "step 4"):  # two of the three were before
        train_pack(small, rows, LORA, train, tmp_path / "p", resume=True)


@pytest.mark.parametrize("saved", [True, False])
def test_backing_off_halves_the_rate_from_the_last_checkpoint(
    small, rows, tmp_path, monkeypatch, saved
):
    train = replace(ONE, iters=6, on_nan="back-off", save_every=1 if saved else 100)
    with monkeypatch.context() as patch:
        poison(patch, BAD, times=1)
        run = train_pack(small, rows, DROPOUT, train, tmp_path / "p")
    (record,) = records(tmp_path / "p-run")
    batch = record["batch"]
    assert record["to"] == (f"step-{batch - 1:06d}" if saved else "step-000000")
    assert record["rows"] == [f"{rows}/train.jsonl:{BAD + 1}"] and run.report["back_offs"] == 1
    rates = {line["batch"]: line["learning_rate"] for line in run.curve if "loss" in line}
    assert sorted(rates) == [1, 2, 3, 4, 5, 6]
    for number, rate in rates.items():
        halved = number >= batch or not saved
        assert rate == pytest.approx(train.learning_rate * (0.5 if halved else 1))
    # a run that is resumed keeps the rate
    with monkeypatch.context() as patch:
        observe(patch, on_step=lambda line: line["batch"] == 5 and os.kill(os.getpid(), 15))
        poison(patch, BAD, times=1)
        with pytest.raises(RunStopped):
            train_pack(small, rows, DROPOUT, train, tmp_path / "cut")
    train_pack(small, rows, DROPOUT, train, tmp_path / "cut", resume=True)
    assert files_of(tmp_path / "cut-run") == files_of(tmp_path / "p-run")


def test_backing_off_has_an_end(small, rows, tmp_path, monkeypatch):
    poison(monkeypatch, BAD)
    train = replace(ONE, on_nan="back-off", save_every=1)
    with raises("diverged", None, "backed off 3 times", f"train.jsonl:{BAD + 1}", "--on-nan skip"):
        train_pack(small, rows, LORA, train, tmp_path / "p")
    actions = [record["action"] for record in records(tmp_path / "p-run")]
    assert actions == ["back-off"] * 3 + ["stop"]


def test_a_signal_ends_a_run_that_backs_off(small, rows, tmp_path, monkeypatch):
    backing_off = on_nan.OnNan.end

    def end(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        backing_off(self, *args)

    monkeypatch.setattr(on_nan.OnNan, "end", end)
    poison(monkeypatch, BAD, times=1)
    train = replace(ONE, on_nan="back-off", save_every=1)
    with pytest.raises(RunStopped) as stopped:
        train_pack(small, rows, LORA, train, tmp_path / "p")
    assert stopped.value.exit_code == 143
    run = train_pack(small, rows, LORA, train, tmp_path / "p", resume=True)
    assert run.report["back_offs"] == 1


@pytest.mark.parametrize("policy", ["skip", "back-off"])
@pytest.mark.parametrize("bad", [1, 8])  # in the first phase, in the second
def test_phases_go_on_after_a_fault(small, rows, tmp_path, monkeypatch, policy, bad):
    narrow = write_rows(tmp_path / "narrow", train=ROWS[::-1], valid=ROWS[:1])
    two = (
        Phase("one", data=str(rows), iters=6),
        Phase("two", data=str(narrow), iters=6, learning_rate=5e-4, warmup_steps=3),
    )
    train = replace(ONE, phases=two, on_nan=policy)
    poison(monkeypatch, bad, times=1)
    run = train_pack(small, None, LORA, train, tmp_path / "p")
    (record,) = records(tmp_path / "p-run")
    assert (record["batch"] > 6) == (bad > 5)
    folder = "narrow" if bad > 5 else "rows"
    assert record["rows"] == [f"{tmp_path / folder}/train.jsonl:{bad % 6 + 1}"]
    lines = [line for line in run.curve if "loss" in line]
    rates = {line["batch"]: line["learning_rate"] for line in lines}
    # a skipped update is not counted: after one in the first phase, the second starts one later
    late = policy == "skip" and bad < 6
    warm = ([0] if late else []) + [0, 1 / 3, 2 / 3, 1, 1, 1]  # of the rate, which rises from 0
    expected = dict(enumerate([1e-3] * 6 + [5e-4 * share for share in warm[:6]], 1))
    if policy == "skip":
        del expected[record["batch"]]
    else:  # from the last checkpoint, at the start of a phase
        since = 7 if bad > 5 else 1
        expected = {n: rate / (2 if n >= since else 1) for n, rate in expected.items()}
    assert rates == pytest.approx(expected)
    assert len(run.report["phases"]) == 2 and lines[-1]["batch"] == 12


def test_pairs_have_rows_too(encoder, tmp_path, monkeypatch):
    data, prepared = write_pairs(tmp_path / "d", all_scored()), []

    def poisoned_once(objective, batch):
        prepared.append(batch.examples)
        weight = math.nan if len(prepared) == 1 else 1.0
        return batch.having(weights=batch.inputs["weights"] * np.float32(weight))

    monkeypatch.setattr(EmbeddingObjective, "prepare", poisoned_once)
    train = TrainConfig(task="embedding", batch_size=4, iters=2, on_nan="skip", val_batches=0)
    run = train_pack(encoder, str(data), LoRAConfig(rank=2), train, tmp_path / "p")
    (skipped,) = records(tmp_path / "p-run")
    assert run.report["skipped"] == 1 and len(skipped["rows"]) == 4
    assert skipped["rows"] == [f"{data}/train.jsonl:{i + 1}" for i in prepared[0]]


def test_damaged_records_are_left_out(small, rows, tmp_path, monkeypatch):
    train = replace(ONE, on_nan="skip", iters=3, save_every=1)
    train_pack(small, rows, LORA, train, tmp_path / "p")
    lines = ["{", "[]", "7", '{"batch": "x", "action": "skip"}', "[" * 100_000]
    lines += ['{"batch": 2, "action": "skip", "in_a_row": "9"}']
    (tmp_path / "p-run" / "not_finite.jsonl").write_text("\n".join(lines))
    longer = replace(train, iters=4)
    run = train_pack(small, rows, LORA, longer, tmp_path / "p", resume=True)
    assert run.report["batches"] == 4 and "skipped" not in run.report


def test_a_new_run_has_no_records_of_the_old(small, rows, tmp_path, monkeypatch):
    train = replace(ONE, on_nan="skip")
    with monkeypatch.context() as patch:
        poison(patch, BAD)
        train_pack(small, rows, LORA, train, tmp_path / "p")
    assert records(tmp_path / "p-run")
    run = train_pack(small, rows, LORA, train, tmp_path / "p", overwrite=True)
    assert "skipped" not in run.report and not (tmp_path / "p-run" / "not_finite.jsonl").exists()
    assert read_metrics(tmp_path / "p-run", 100)
