"""Benchmarks on bases of milliseconds: records are whole, and unequal losses give no speed."""

import contextlib
import csv
import importlib
import json
import re
import sys

import numpy as np
import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import (
    alone,
    bench_grouped_lora,
    bench_lora_qmv,
    bench_nf4,
    cost_tables,
    first,
    generate,
    history,
    implementations,
    kernel_plans,
    launch_costs,
    load,
    memory,
    offload,
    op_race,
    prefix,
    profile,
    report,
    soak,
    steady,
    stock,
    stream,
    swap,
    timeline,
    train_run,
    train_step,
    trees,
    whole,
    workloads,
)
from benchmarks.apple_gpu.trees import TreeShape
from benchmarks.rates import examine_rates
from benchmarks.rates import main as print_rates
from mlx_packs.chips import CHIPS
from mlx_packs.data.rows import read_rows
from mlx_packs.ops import diagnostics
from mlx_packs.runtime import BLAS, mx
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.variants import nightly_except

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
CONFIG = workloads.QWEN3_4B | SIZES | HEADS


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch):
    """Workloads of milliseconds, in which mlx-lm does not call g++."""
    small = workloads.Workload(CONFIG, 2, 32, ("transient", "dense"))
    monkeypatch.setitem(workloads.WORKLOADS, "small", small)
    monkeypatch.setitem(workloads.CONFIGS, "small", CONFIG)
    steps = workloads.Workload(CONFIG, 4, 32, ("quantized", "dense"), mlx_lm_rows=2)
    monkeypatch.setitem(workloads.WORKLOADS, "steps", steps)
    monkeypatch.setattr(stock, "_compile_on", contextlib.nullcontext)


@pytest.fixture
def in_this_process(monkeypatch, capsys):
    """`alone.run` in this process: its printed line, as the parent would read it."""

    def run(module, arguments, blas=None):
        capsys.readouterr()
        assert importlib.import_module(f"benchmarks.{module}").main(list(arguments)) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(alone, "run", run)


SMALL = "--workload small"
STOCK = implementations.STOCK
# Arguments of benchmarks, and what is in their records.
RUNS = {
    whole: ("--model small --blocks 1 --length 32", {"most while building", "beyond the base"}),
    swap: ("--rounds 2 --rank 2", {swap.BASELINE, swap.SAME, swap.OTHER, swap.ON_OFF}),
    memory: (SMALL, {STOCK, implementations.PATCHED, "mlx_packs dense", *memory._METRICS}),
    load: ("--rounds 1", {"load", "most in MLX", "process"}),
    generate: (
        "--rounds 1 --tokens 4 --repeat 1 --matmul-path dense",
        {"prompt", "decode", "mlx_packs dense"},
    ),
    timeline: (f"{SMALL} --recompute block --out line.png", {"base", "for scale: whole logits"}),
    offload: ("--rounds 2 --rank 2 --length 32", {"step", "times in memory", "waited at most"}),
    prefix: (
        f"{SMALL} --rows 3 --rank 2 --rounds 1 --matmul-path dense",
        {"without the cache, dense", "mlx_packs dense", "5 epochs", "times without"},
    ),
    profile: (
        f"{SMALL} --matmul-path transient --repeats 2",
        {"unpacking weights", "low-rank parts", "optimizer", "unexplained rest", "whole step"},
    ),
    steady: ("--iters 6 --every 2 --length 96 --out steady", {"step"}),
    train_run: ("--iters 6 --held-out 4 --implementation STOCK", {STOCK, train_run.OURS}),
}


@pytest.mark.parametrize(
    "module",
    nightly_except(RUNS, whole, swap, often_is=()),
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_a_benchmark_appends_its_records(module, in_this_process, here, monkeypatch):
    data = write_rows(here / "d", train=CHATS * 8, valid=CHATS, test=CHATS)
    monkeypatch.setattr(train_run, "PASSAGES", data)
    monkeypatch.setattr(train_run, "BATCH_SIZE", 2)
    arguments, expected = RUNS[module]
    words = [STOCK if word == "STOCK" else word for word in arguments.split()]
    monkeypatch.setenv(prefix.CACHE_VARIABLE, "")  # its benchmark turns it off
    assert module.main([*words, "--history", "h.jsonl"]) == 0

    records = history.read(here / "h.jsonl")
    assert expected <= {name for r in records for name in (r.implementation, r.metric)}
    negative = {f"{r.metric} {r.implementation}" for r in records if r.p50 < 0}
    assert all("growth" in name or "unexplained rest" in name for name in negative)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in here.glob("*.png"))
    assert module is not steady or len((here / "steady.csv").read_text().splitlines()) == 4


def test_a_slope_is_told_from_noise():
    counts = np.arange(1, 201) * 50
    noise = np.random.default_rng(0).normal(0, 0.5, 200)
    warm_up = np.where(counts < 500, 40.0, 0.0)
    assert soak.slope(counts, 100 + noise + warm_up).within_noise
    leak = soak.slope(counts, 100 + noise + counts * 5e-4)
    assert leak.growth_mb == pytest.approx(4.5, abs=0.3) and not leak.within_noise
    assert soak.slope(counts, np.full(200, 100.0)) == soak.Slope(pytest.approx(0), pytest.approx(0))
    grown_once = 100 + (counts > 5000) * 3  # a buffer, whose neighbours are alike
    assert soak.slope(counts, grown_once).noise_mb > 1


@pytest.mark.slow
def test_steps_swaps_and_texts_are_soaked_and_plotted(tmp_path, monkeypatch):
    monkeypatch.setattr(soak.alone, "run", lambda module, arguments: soak.WORK[arguments[1]](12, 3))
    file, out = tmp_path / "h.jsonl", tmp_path / "soak"
    size = ["--count", "12", "--every", "3"]
    assert soak.main([*size, "--out", str(out), "--history", str(file)]) == 0
    with out.with_suffix(".csv").open() as f:
        rows = list(csv.DictReader(f))
    assert [row["count"] for row in rows] == ["3", "6", "9", "12"] * 3
    assert all(float(row["rss_mb"]) > float(row["mlx_mb"]) > 1 for row in rows)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert {r.metric for r in history.read(file)} == {"growth: process", "growth: kept in MLX"}


def test_tables_in_the_readmes_are_those_of_the_history():
    records = history.read()
    for readme in report.READMES:
        text = readme.read_text(encoding="utf-8")
        assert "<!-- measured: " in text and report.with_tables(text, records) == text, readme


def test_every_benchmark_is_listed_and_says_its_options(capsys):
    assert benchmarks_main.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in benchmarks_main.NAMES:
        assert name in shown
        with pytest.raises(SystemExit) as stopped:
            benchmarks_main.main([name, "--help"])
        assert stopped.value.code == 0 and "usage: python -m benchmarks" in capsys.readouterr().out
    assert benchmarks_main.main(["nothing"]) == 2


def test_a_command_is_timed_to_its_first_answer(tmp_path):
    def command(code):
        return [sys.executable, "-c", f"import time; {code}"]

    answering = command("print(input(), flush=True); time.sleep(60)")
    asked = first.Start(answering, "yes\n", lambda printed: b"yes" in printed)
    seconds, cpu = first.timed(asked, tmp_path)
    assert 0 < cpu < seconds < 30
    assert first.timed(first.Start(command("pass")), tmp_path)[0] < 30
    with pytest.raises(alone.Failed, match="no such thing"):
        first.timed(first.Start(command("raise SystemExit('no such thing')")), tmp_path)


QUICK = ["--workload", "steps", "--rounds", "1", "--steps", "1"]


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


def test_the_report_shows_the_latest_run_of_each_task_and_device(tmp_path, capsys):
    file = tmp_path / "history.jsonl"
    about = ("train_step tiny", "mlx_packs dense", "4 x 128", "step", "ms")
    for device, month, ms in (("M4", 1, 100.0), ("M4", 2, 50.0), ("M1", 1, 75.0)):
        date = f"2026-0{month}-01T00:00:00Z"
        here = history.Environment(device, "Darwin arm64", {"mlx": "0.32.4"}, "abc", date)
        history.append([history.record(here, *about, [ms], ratio=7.5, note="Mind it.")], file)
    assert benchmarks_main.main(["report", "--history", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("**train_step tiny**") == 2 and "100" not in shown
    for text in ("2026-02-01", "7.50x", "mlx 0.32.4", "Mind it."):
        assert text in shown


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


def test_trees_are_timed_beside_their_rows(monkeypatch):
    shape = TreeShape("pairs on two levels", 48, 20, 8, groups=4, root=24)
    monkeypatch.setattr(trees, "_MOST_INPUTS", 150)
    sides = trees.sides_of(CONFIG, shape)
    trees.measure(sides, 1)
    records = trees.records(history.Environment.here(), "small", 1, shape, sides)
    assert [r.baseline for r in records] == [trees.ROWS] * 3
    assert all(r.ratio > 0 and r.peak_mb > 0 for r in records)
    assert [side.parts for side in sides.values()] == [4, 4, 1]
    assert f"{trees.TREE}  " in trees.table(sides)


@pytest.mark.slow
def test_the_fixed_time_of_a_step_and_products_of_all_formats_are_timed(monkeypatch, capsys):
    rates = examine_rates()
    assert rates["step"]["ms"] > 0 and rates["step"]["blocks"] == 36
    assert all(p["tflops"] > 0 and p["gradient_tflops"] > 0 for p in rates["products"])
    assert {p["format"] for p in rates["products"]} == {"affine4", "mxfp4", "nvfp4"}

    monkeypatch.setattr("benchmarks.rates.examine_rates", lambda: rates)
    print_rates()
    assert "with 36 blocks of next to nothing" in capsys.readouterr().out


def test_shards_have_about_so_many_tokens(tmp_path):
    stream.write_shards(tmp_path, 3000, 3, "chats")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"train-0000{i}-of-00003.jsonl" for i in range(3)]
    assert len({str(row.value) for file in files for row in read_rows(file)}) > 15  # no two alike


@pytest.mark.nightly(seconds=40)  # two processes that tokenize have two parts of 4 MB each
def test_every_row_is_seen_once_in_the_same_order_after_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    stream.write_shards(tmp_path / "shards", 6e6, 4, "chats")
    result = stream.check(tmp_path, tmp_path / "shards", 2)
    assert result["kills"] == 3 and result["peak_rss_mb"] < result["rss_before_mb"] + 120
