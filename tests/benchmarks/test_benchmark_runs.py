"""Benchmarks that run implementations alone, take a step apart, or draw: each on a base of milliseconds."""

import contextlib
import csv
import importlib
import json

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.trainer import default_loss

from benchmarks import __main__ as benchmarks_main
from benchmarks import (
    alone,
    generate,
    history,
    implementations,
    load,
    memory,
    offload,
    patched,
    prefix,
    profile,
    report,
    soak,
    steady,
    stock,
    swap,
    timeline,
    train_run,
    whole,
    workloads,
)
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.quantized import quantized_modules
from mlx_packs.runtime import mx
from tests.helpers.memory import active_bytes
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.variants import nightly_except

CONFIG = workloads.QWEN3_4B | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch):
    """A workload of milliseconds; implementations that would run alone run here, and mlx-lm does not call g++."""
    monkeypatch.setitem(
        workloads.WORKLOADS, "small", workloads.Workload(CONFIG, 2, 32, ("transient", "dense"))
    )
    monkeypatch.setitem(workloads.CONFIGS, "small", CONFIG)
    monkeypatch.setattr(stock, "_compile_on", contextlib.nullcontext)


@pytest.fixture
def in_this_process(monkeypatch, capsys):
    """`alone.run` in this process: its printed line, as the parent would read it."""

    def run(module, arguments, blas=None):
        capsys.readouterr()
        assert importlib.import_module(f"benchmarks.{module}").main(list(arguments)) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(alone, "run", run)


def test_a_random_base_never_has_a_dense_weight():
    before = active_bytes()
    mx.reset_peak_memory()
    base = workloads.random_base(CONFIG | {"vocab_size": 8192}, seed=0)
    size = workloads.base_bytes(base)
    assert mx.get_peak_memory() - before < 1.2 * size  # dense, one of its weights has 6.4 times it
    assert all(m.bits == 4 for _, m in quantized_modules(base.model))
    weights = frozen_weight(base.model.layers[0].mlp.gate_proj).dense()
    assert abs(weights.mean().item()) < 1e-3
    assert weights.var().sqrt().item() == pytest.approx(0.02, rel=0.05)


def test_patched_loss_is_that_of_mlx_lm_without_the_pad():
    base = workloads.random_base(CONFIG, seed=0)
    tokens = mx.array(np.random.default_rng(0).integers(1, 128, (2, 33)))
    whole_rows = mx.array([[9, 33], [17, 33]])

    expected, count = default_loss(base.model, tokens, whole_rows)
    result, targets_found = patched.loss(base.model, *patched.with_targets(tokens, whole_rows))
    assert result.item() == pytest.approx(expected.item(), rel=1e-6)
    assert targets_found.item() == count.item()

    padded = mx.array([[9, 20], [17, 33]])
    _, with_pad = default_loss(base.model, tokens, padded)
    result, without = patched.loss(base.model, *patched.with_targets(tokens, padded))
    assert (with_pad.item(), without.item()) == (12 + 16, 11 + 16)

    logits = base.model(tokens[:, :-1])
    nll = nn.losses.cross_entropy(logits, tokens[:, 1:])
    by_hand = (nll[0, 8:19].sum() + nll[1, 16:32].sum()) / 27
    assert result.item() == pytest.approx(by_hand.item(), rel=1e-6)


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


def record(task, implementation, metric, p50, **more) -> history.Record:
    here = history.Environment("cpu", "os", {"mlx": "1"}, "abc", "2026-01-01T00:00:00Z")
    return history.record(here, task, implementation, "shape", metric, "u", [p50], **more)


def test_tables_in_the_readmes_are_those_of_the_history():
    records = history.read()
    for readme in report.READMES:
        text = readme.read_text(encoding="utf-8")
        assert "<!-- measured: " in text and report.with_tables(text, records) == text, readme


def test_a_table_stands_between_its_marks():
    text = "a\n<!-- measured: one -->\nold\n<!-- end of measured -->\nb\n"
    shown = report.with_tables(text, [record("one", "x", "m", 3.0), record("two", "y", "m", 4.0)])
    assert shown.startswith("a\n<!-- measured: one -->\n\n**one** on cpu")
    assert shown.endswith("\n\n<!-- end of measured -->\nb\n") and "two" not in shown
    assert report.with_tables(shown, []) == text.replace("old\n", "")


def test_every_benchmark_is_listed_and_says_its_options(capsys):
    assert benchmarks_main.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in benchmarks_main.NAMES:
        assert name in shown
        with pytest.raises(SystemExit) as stopped:
            benchmarks_main.main([name, "--help"])
        assert stopped.value.code == 0 and "usage: python -m benchmarks" in capsys.readouterr().out
    assert benchmarks_main.main(["nothing"]) == 2
