"""Benchmarks: records are whole, the report renders, and unequal losses give no speed."""

import contextlib
import dataclasses
import re

import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import (
    bench_grouped_lora,
    bench_lora_qmv,
    bench_nf4,
    cost_tables,
    history,
    implementations,
    kernel_plans,
    launch_costs,
    op_race,
    report,
    stock,
    train_step,
    trees,
    workloads,
)
from benchmarks.apple_gpu.trees import TreeShape
from mlx_packs.chips import CHIPS
from mlx_packs.ops import diagnostics
from mlx_packs.runtime import BLAS, mx

CONFIG = workloads.QWEN3_4B | {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}
QUICK = ["--workload", "small", "--rounds", "1", "--steps", "1"]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """A workload of milliseconds. mlx-lm steps as mlx_packs has set MLX: compiling takes g++."""
    small = workloads.Workload(CONFIG, 4, 32, ("quantized", "dense"), mlx_lm_rows=2)
    monkeypatch.setitem(workloads.WORKLOADS, "small", small)
    monkeypatch.setattr(stock, "_compile_on", contextlib.nullcontext)


def test_a_run_prints_its_table_and_appends_whole_records(tmp_path, capsys):
    file = tmp_path / "history.jsonl"
    assert train_step.main([*QUICK, "--history", str(file)]) == 0
    printed = capsys.readouterr().out
    records = history.read(file)
    assert report.render(records) == printed.strip()

    names = [implementations.STOCK]
    if BLAS.bound:
        names.append(implementations.SAME_BLAS)
    names += [implementations.PATCHED, "mlx_packs quantized", "mlx_packs dense"]
    assert [r.implementation for r in records[::2]] == names
    assert {r.metric for r in records} == {"step", "speed"}
    assert {r.date for r in records} == {records[0].date}

    for record in records:
        assert 0 < record.p20 <= record.p50 <= record.p80
        assert record.samples == 2 and record.dtype == "float32" and record.peak_mb > 0
        assert record.unit and record.device and record.os and record.commit and record.blas
        assert {"mlx", "mlx-lm", "mlx-packs", "python"} <= set(record.versions)
        assert (record.ratio is None) == (record.metric == "step")

    assert records[1].ratio == 1.0
    assert not re.search(r'[" ]/', file.read_text())  # no paths


@pytest.mark.slow
def test_losses_that_differ_only_after_the_update_print_no_speed(tmp_path, capsys, monkeypatch):
    step = train_step.Ours.step

    def other_rate(self, batch):
        self.stepper.optimizer.learning_rate = 1e-2
        return step(self, batch)

    monkeypatch.setattr(train_step.Ours, "step", other_rate)
    file = tmp_path / "history.jsonl"
    assert train_step.main([*QUICK, "--history", str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "losses of mlx-lm" in captured.err and not file.exists()


def example(**changes) -> history.Record:
    versions, date = {"mlx": "0.32.4"}, "2026-01-01T00:00:00Z"
    here = history.Environment("M4 (metal)", "Darwin arm64", versions, "abc", date)
    about = ("train_step tiny", "mlx_packs dense", "4 x 128", "step", "ms")
    record = history.record(here, *about, [100.0], ratio=7.5)
    return dataclasses.replace(record, p20=90.0, p80=1234.5, **changes)


def test_the_report_shows_the_latest_run_of_each_task_and_device(tmp_path, capsys):
    file = tmp_path / "history.jsonl"
    newer = example(date="2026-02-01T00:00:00Z", p50=50.0)
    elsewhere = example(device="M1 (metal)", note="Mind the fan.")
    history.append([example()], file)
    history.append([newer, elsewhere], file)
    assert history.read(file) == [example(), newer, elsewhere]
    assert benchmarks_main.main(["report", "--history", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("**train_step tiny**") == 2
    assert "50 (90 to 1,234)" in shown and "2026-02-01" in shown
    assert "7.50x" in shown and "mlx 0.32.4" in shown and "Mind the fan." in shown


def test_stock_baseline_has_its_own_blas_and_compile_and_leaves_ours(monkeypatch):
    monkeypatch.undo()  # of _compile_on
    before = stock.compiles()
    left = mx.random.normal((64, 64))
    right = mx.random.normal((64, 64))
    expected = left @ right
    mx.eval(expected)
    with stock.mlx(reference_blas=BLAS.bound):
        assert stock.compiles()
        assert mx.allclose(left @ right, expected, atol=1e-4).item()
    assert stock.compiles() == before
    assert mx.array_equal(left @ right, expected).item()


@pytest.mark.parametrize(
    "task, bench, shape",
    [
        ("grouped_lora", bench_grouped_lora, "qwen3_0_6b q/k/v, 1 rows, rank 8, forward"),
        ("lora_qmv", bench_lora_qmv, "qwen3_0_6b q/k/v of 1 blocks, 1 rows"),
        ("nf4", bench_nf4, "qwen3_0_6b q, 1 rows"),
    ],
)
def test_an_op_is_raced_in_turns_and_recorded(task, bench, shape, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_lora_qmv, "BLOCKS", 1)
    monkeypatch.setattr(op_race, "_TURN_S", 1e-4)
    file = tmp_path / "history.jsonl"
    arguments = ["--rounds", "1", "--only", shape, "--history", str(file)]
    assert op_race.main(task, bench.contests(), arguments) == 0
    records = history.read(file)
    assert report.render(records) == capsys.readouterr().out.strip()
    assert len(records) == 2 and records[0].ratio == 1.0 and records[1].p50 > 0
    assert {r.task for r in records} == {f"op {task}"} and {r.samples for r in records} == {2}


def test_cost_tables_in_the_readmes_are_those_that_are_printed():
    for op in cost_tables.cases():
        readme = (cost_tables.KERNELS / op / "README.md").read_text()
        assert cost_tables.with_table(readme, op) == readme, op


@pytest.mark.parametrize("op", ["grouped_lora", "lora_qmv", "multi_lora"])
def test_the_rules_of_kernels_cost_little_by_the_cost_model(op):
    kernels = {each.OP: each for each in diagnostics.OPS}[op]
    for chip in (each for name, each in CHIPS.items() if name.startswith("Apple")):
        chosen = best = 0.0
        for instance in kernels.instances():
            plans = getattr(kernel_plans, op)(*instance.call)
            plain, kernel = (launch_costs.seconds(plan, chip) for plan in plans)
            best += min(plain, kernel)
            chosen += plain if kernels.SPEC.slower(*instance.call) else kernel
        assert chosen < 1.05 * best, chip.name


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        (TreeShape("pairs on two levels", 48, 20, 8, groups=4, root=24), 4),
        (TreeShape("short rows", 16, 4, 4), 1),
    ],
)
def test_trees_are_timed_beside_their_rows(shape, parts, monkeypatch):
    monkeypatch.setattr(trees, "_MOST_INPUTS", 150)
    sides = trees.sides_of(CONFIG, shape)
    trees.measure(sides, 1)
    records = trees.records(history.Environment.here(), "small", 1, shape, sides)
    assert [r.baseline for r in records] == [trees.ROWS] * 3
    assert all(r.ratio > 0 and r.peak_mb > 0 for r in records)
    assert [side.parts for side in sides.values()] == [parts, parts, 1]
    assert f"{trees.TREE}  " in trees.table(sides)
