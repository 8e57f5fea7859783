"""Run folders that vanish, disks that fill up, memory that gets short, clocks that are set back."""

import errno
import math
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_packs import Phase, TrainConfig, train_pack
from mlx_packs.errors import RunStopped
from mlx_packs.memory.pressure import CRITICAL, LOW, NONE, Pressure
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from mlx_packs.training import checkpoint, watch
from tests.helpers.encoders import all_scored, write_pairs
from tests.helpers.errors import raises
from tests.helpers.observers import observe
from tests.helpers.runs import LORA, Lines
from tests.helpers.variants import slow_except
from tests.training.conftest import files_of

SIX = {"iters": 6, "save_every": 2, "max_seq_length": 32, "val_batches": 0, "test_batches": 1}
RUN = Path("p-run")


@pytest.mark.parametrize("is_file", [False, True])
def test_a_folder_that_vanishes_ends_the_run(train, monkeypatch, is_file):
    def vanish(line):
        shutil.rmtree(RUN)
        if is_file:
            RUN.write_text("a file")

    observe(monkeypatch, on_step=vanish)
    with raises("unwritable", None, "p-run"):
        train()
    assert not Path("p").exists()


# --- the disk


def free_space(monkeypatch, free) -> None:
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=free()))


@pytest.mark.page
def test_too_little_space_ends_a_run_before_the_checkpoint(train, monkeypatch):
    full = []
    free_space(monkeypatch, lambda: 1000 if full else 1 << 40)
    with monkeypatch.context() as patch:
        observe(patch, on_step=lambda line: line["batch"] == 3 and full.append(1))
        with raises("unwritable", None, "p-run", "step-000002") as stopped:
            train(**SIX)
    assert isinstance(stopped.value, RunStopped) and stopped.value.exit_code == 2
    names = sorted(path.name for path in RUN.iterdir())
    assert names == ["config.json", "metrics.jsonl", "report.html", "status.json", "step-000002"]
    with raises("unwritable", None, "other-run", "1.0 kB are free"):  # without any checkpoint
        train("other")
    full.clear()
    train(resume=True, **SIX)


@pytest.mark.parametrize(
    ("code", "file"),
    slow_except(
        [(errno.ENOSPC, "adapters.safetensors"), (errno.EDQUOT, "state.json")],
        (errno.ENOSPC, "adapters.safetensors"),
    ),
)
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(train, monkeypatch, code, file):
    """Where the system says so; MLX does not, and writes a file that is too short."""
    whole = files_of(train("whole", **SIX).run)
    write_text, save, full = Path.write_text, mx.save_safetensors, []

    def text(path, *args, **options):
        if full and path.name.strip(".").startswith(file):
            raise OSError(code, os.strerror(code), str(path))
        return write_text(path, *args, **options)

    def tensors(path, arrays, *args):
        save(path, arrays, *args)
        if full and path.endswith(file):
            os.truncate(path, os.path.getsize(path) - 100)

    monkeypatch.setattr(Path, "write_text", text)
    monkeypatch.setattr(mx, "save_safetensors", tensors)
    with monkeypatch.context() as patch:
        observe(patch, on_step=lambda line: line["batch"] == 3 and full.append(1))
        with raises("unwritable", None, "p-run") as stopped:
            train(**SIX)
    assert isinstance(stopped.value, RunStopped) and stopped.value.exit_code == 2
    assert not [path.name for path in RUN.iterdir() if path.name.startswith(".")]
    assert not Path("p").exists()
    full.clear()
    train(resume=True, **SIX)
    assert files_of(RUN) == whole


# --- memory


@pytest.fixture
def short_memory(monkeypatch):
    """Memory is as short as the list says, look by look; then it is not."""
    levels: list[int] = []

    def pressure() -> Pressure:
        level = levels.pop(0) if levels else NONE
        return Pressure(level, "it is short" if level else "")

    monkeypatch.setattr(watch, "_EVERY", 0.0)
    monkeypatch.setattr(watch, "_WORTHWHILE", math.inf)
    monkeypatch.setattr(watch, "memory_pressure", pressure)
    return levels


def differences(one: str, other: str) -> float:
    """The largest relative difference of two packs' tensors."""
    first, second = (Pack.open(path).load_tensors() for path in (one, other))
    assert set(first) == set(second)
    return max(
        (mx.linalg.norm(first[n] - second[n]) / (mx.linalg.norm(first[n]) + 1e-12)).item()
        for n in first
    )


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"grad_accumulation_steps": 2}, id="accumulated", marks=pytest.mark.slow),
        pytest.param({"packing": True, "max_seq_length": 64}, id="packed"),
    ],
)
def test_smaller_micro_batches_are_the_same_update(train, short_memory, settings):
    settings = {**SIX, "batch_size": 4, **settings}
    whole = train("whole", **settings)
    short_memory += [NONE, LOW, NONE, LOW]
    display = Lines()
    parts = train("parts", progress=display, **settings)
    events = [line for line in parts.curve if "micro_batches" in line]
    assert [(event["batch"], event["micro_batches"]) for event in events] == [(2, 2), (4, 4)]
    assert sum("micro-batches" in line for line in display.lines) == 2
    assert parts.report["steps"] == whole.report["steps"]
    assert 0 < differences("whole", "parts") < 2e-3
    losses = [[line["loss"] for line in run.curve if "loss" in line] for run in (whole, parts)]
    assert np.allclose(*losses, rtol=1e-4)


def test_one_row_and_critical_memory_end_the_run_saved(train, short_memory):
    short_memory += [LOW, LOW, LOW, CRITICAL]  # 2 rows; 1 row; nothing smaller; the end
    settings = {**SIX, "grad_accumulation_steps": 3}
    with raises("memory", None, "it is short", "step-000006", "--resume") as stopped:
        train(**settings)
    assert stopped.value.exit_code == 2 and "resume=True" in str(stopped.value)
    assert train(resume=True, **settings).report["batches"] == 6


@pytest.mark.parametrize(
    ("loss", "splits"), slow_except([("cosine", True), ("cosent", False)], ("cosent", False))
)
def test_pairs_that_are_compared_stay_together(encoder, here, short_memory, loss, splits):
    data = str(write_pairs(here / "d", all_scored()))
    config = TrainConfig(task="embedding", batch_size=8, iters=2, loss=loss, steps_per_report=1)
    train_pack(encoder, data, LORA, config, "whole")
    short_memory += [LOW]
    run = train_pack(encoder, data, LORA, config, "parts")
    assert any("micro_batches" in line for line in run.curve) == splits
    assert differences("whole", "parts") < 2e-3


def test_freed_buffers_are_given_back_first(train, short_memory, monkeypatch):
    monkeypatch.setattr(watch, "_WORTHWHILE", 0)
    short_memory += [LOW, NONE, LOW, NONE]  # before and after
    run = train()
    assert not any("micro_batches" in line for line in run.curve) and not short_memory


# --- the clock


def test_a_clock_that_is_set_back_changes_no_throughput(train, monkeypatch):
    clock = [time.time()]

    def back() -> float:
        clock[0] -= 3600
        return clock[0]

    monkeypatch.setattr(time, "time", back)
    run = train()
    assert all(line["tokens_per_s"] > 0 for line in run.curve if "loss" in line)
    assert 0 < run.report["train_s"] < 3600 and run.report["tokens_per_s"] > 0


def test_pieces_persist_through_phases(train, short_memory):
    short_memory += [LOW]
    two = (Phase("one", data="d", iters=2), Phase("two", data="d", iters=2))
    run = train(data=None, phases=two, **SIX)
    assert [line["micro_batches"] for line in run.curve if "micro_batches" in line] == [2]
    assert run.report["batches"] == 4
