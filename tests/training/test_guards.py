"""Run folders that vanish, disks that fill up, memory that gets short, clocks that are set back."""

import errno
import json
import math
import os
import shutil
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import Phase, TrainConfig, train_pack
from mlx_packs.errors import PackError, RunStopped
from mlx_packs.files import remove_unused
from mlx_packs.memory.pressure import CRITICAL, LOW, NONE, Pressure
from mlx_packs.packs.pack import Pack
from mlx_packs.reading import sha256
from mlx_packs.runtime import mx
from mlx_packs.training import checkpoint as checkpoint_module
from mlx_packs.training import guards
from mlx_packs.training.run_folder import check_resumable, checkpoints, latest_checkpoint
from tests.helpers.encoders import all_scored, write_pairs
from tests.helpers.errors import check, raises
from tests.helpers.interpreter import run_python
from tests.helpers.observers import observe
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import LORA, TRAIN, Lines

WORDS = "one two six ten red sun".split()
ROWS = [chat(f"Say {w}.", f"Yes, I say {w} to you.") for w in WORDS]
SETTINGS = replace(TRAIN, iters=6, save_every=2, max_seq_length=32, val_batches=0, test_batches=1)


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows", train=ROWS, valid=ROWS[:1])


def files_of(run: Path) -> dict[str, str]:
    return {f.name: sha256(f) for f in latest_checkpoint(run).glob("*.safetensors")}


# --- the run folder


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> dict[str, str]:
    """Hashes of the last checkpoint of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    rows = write_rows(folder / "rows", train=ROWS, valid=ROWS[:1])
    return files_of(train_pack(small, rows, LORA, SETTINGS, folder / "p").run)


@pytest.mark.parametrize(
    ("how", "at"),
    [("removed", 3), ("removed", 2), ("moved", 1), ("with its parent", 6)],
    ids=["between checkpoints", "at one", "before the first", "at the end"],
)
def test_a_folder_that_vanishes_is_written_again(
    small, rows, tmp_path, monkeypatch, whole, at, how
):
    out = tmp_path / "packs" / "p"
    folder = out.with_name("p-run")

    def vanish(line):
        if line["batch"] != at:
            return
        if how == "moved":
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder if how == "removed" else folder.parent)

    display = Lines()
    observe(monkeypatch, on_step=vanish)
    run = train_pack(small, rows, LORA, SETTINGS, out, display=display)
    assert any("was removed or moved" in line for line in display.lines)
    check_resumable(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == run.curve and [line["batch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert files_of(folder) == whole


def test_a_folder_that_vanishes_while_a_checkpoint_is_written(small, rows, tmp_path, monkeypatch):
    write, folder = checkpoint_module.save_tensors, tmp_path / "p-run"
    left = [1]

    def write_and_vanish(file, tensors, *args):
        write(file, tensors, *args)
        if left and file.name == "optimizer.safetensors":
            left.pop()
            shutil.rmtree(folder)

    monkeypatch.setattr(checkpoint_module, "save_tensors", write_and_vanish)
    train_pack(small, rows, LORA, SETTINGS, tmp_path / "p")
    assert not left
    check_resumable(folder)
    assert [path.name[-1] for path in checkpoints(folder)] == ["2", "4", "6"]


def test_a_folder_that_vanishes_after_the_last_checkpoint_is_reported(
    small, rows, tmp_path, monkeypatch
):
    save = Pack.save

    def vanish(pack, *args, **options):
        shutil.rmtree(tmp_path / "p-run")
        return save(pack, *args, **options)

    monkeypatch.setattr(Pack, "save", vanish)
    with raises("not-found", None, "p-run", "is complete", "cannot be resumed"):
        train_pack(small, rows, LORA, SETTINGS, tmp_path / "p")
    Pack.open(tmp_path / "p")


def test_a_file_in_the_place_of_the_folder_is_an_error(small, rows, tmp_path, monkeypatch):
    def replaced(line):
        if line["batch"] == 3:
            shutil.rmtree(tmp_path / "p-run")
            (tmp_path / "p-run").write_text("a file")

    observe(monkeypatch, on_step=replaced)
    with raises("unwritable", None, "p-run"):
        train_pack(small, rows, LORA, SETTINGS, tmp_path / "p")
    assert not (tmp_path / "p").exists()


# --- the disk

Usage = namedtuple("Usage", "total used free")


def free_space(monkeypatch, free) -> None:
    monkeypatch.setattr(guards.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free()))


@pytest.mark.page
def test_too_little_space_ends_a_run_before_the_checkpoint(small, rows, tmp_path, monkeypatch):
    full = []
    free_space(monkeypatch, lambda: 1000 if full else 1 << 40)
    with monkeypatch.context() as patch:
        observe(patch, on_step=lambda line: line["batch"] == 3 and full.append(1))
        with pytest.raises(RunStopped) as stopped:
            train_pack(small, rows, LORA, SETTINGS, tmp_path / "p")
    check(stopped.value, "unwritable", None, "p-run", "step-000002")
    assert stopped.value.exit_code == 2
    names = sorted(path.name for path in (tmp_path / "p-run").iterdir())
    assert names == ["config.json", "metrics.jsonl", "report.html", "step-000002"]
    full.clear()
    train_pack(small, rows, LORA, SETTINGS, tmp_path / "p", resume=True)


def test_without_any_checkpoint_the_error_says_so(small, rows, tmp_path, monkeypatch):
    free_space(monkeypatch, lambda: 1000)
    with raises("unwritable", None, "p-run", "0.0 MB are free"):
        train_pack(small, rows, LORA, SETTINGS, tmp_path / "p")


@pytest.mark.parametrize("keep_last", [-1, 4])
def test_old_checkpoints_make_room_if_any_may_go(small, rows, tmp_path, monkeypatch, keep_last):
    """There is space for three checkpoints."""
    folder = tmp_path / "p-run"
    free_space(monkeypatch, lambda: (1 << 40) if len(checkpoints(folder)) < 3 else 0)
    train = replace(SETTINGS, iters=5, save_every=1, keep_last=keep_last)
    if keep_last == -1:  # the user wants to have all of them
        with pytest.raises(RunStopped):
            train_pack(small, rows, LORA, train, tmp_path / "p")
        assert [path.name[-1] for path in checkpoints(folder)] == ["1", "2", "3"]
    else:
        train_pack(small, rows, LORA, train, tmp_path / "p")
        assert [path.name[-1] for path in checkpoints(folder)] == ["3", "4", "5"]


@pytest.mark.parametrize(
    ("code", "file"), [(errno.ENOSPC, "adapters.safetensors"), (errno.EDQUOT, "state.json")]
)
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(
    small, rows, tmp_path, monkeypatch, whole, code, file
):
    """Where the system says so; MLX does not, and writes a file that is too short."""
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
        with pytest.raises(PackError) as stopped:
            train_pack(small, rows, LORA, SETTINGS, tmp_path / "p")
    assert isinstance(stopped.value, RunStopped) and stopped.value.exit_code == 2
    check(stopped.value, "unwritable", None, "p-run")
    run = tmp_path / "p-run"
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]
    assert not (tmp_path / "p").exists()
    full.clear()
    train_pack(small, rows, LORA, SETTINGS, tmp_path / "p", resume=True)
    assert files_of(run) == whole


# --- memory


@pytest.fixture
def short_memory(monkeypatch):
    """Memory is as short as the list says, look by look; then it is not."""
    levels: list[int] = []
    monkeypatch.setattr(guards, "_EVERY", 0.0)
    monkeypatch.setattr(guards, "_WORTHWHILE", math.inf)
    monkeypatch.setattr(
        guards,
        "memory_pressure",
        lambda: Pressure(level := levels.pop(0) if levels else NONE, "it is short" * bool(level)),
    )
    return levels


def differences(one: Path, other: Path) -> float:
    """The largest relative difference of two packs' tensors."""
    first, second = (Pack.open(path).load_tensors() for path in (one, other))
    assert set(first) == set(second)
    return max(
        (mx.linalg.norm(first[n] - second[n]) / (mx.linalg.norm(first[n]) + 1e-12)).item()
        for n in first
    )


def losses_of(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize(
    "settings",
    [{}, {"grad_accumulation_steps": 2}, {"packing": True, "max_seq_length": 64}],
    ids=["plain", "accumulated", "packed"],
)
def test_smaller_micro_batches_are_the_same_update(small, rows, tmp_path, short_memory, settings):
    train = replace(SETTINGS, batch_size=4, **settings)
    train_pack(small, rows, LORA, train, tmp_path / "whole")
    short_memory += [NONE, LOW, NONE, LOW]
    display = Lines()
    run = train_pack(small, rows, LORA, train, tmp_path / "parts", display=display)
    events = [line for line in run.curve if "micro_batches" in line]
    split = [event["micro_batches"] for event in events]
    assert split == [2, 4] and [event["batch"] for event in events] == [2, 4]
    assert sum("micro-batches" in line for line in display.lines) == 2
    assert run.report["steps"] == 6 // train.grad_accumulation_steps
    assert 0 < differences(tmp_path / "whole", tmp_path / "parts") < 2e-3
    whole, parts = (losses_of(tmp_path / f"{name}-run") for name in ("whole", "parts"))
    assert np.allclose(whole, parts, rtol=1e-4)


def test_pieces_persist_through_phases(small, rows, tmp_path, short_memory):
    short_memory += [LOW]
    two = (Phase("one", data=str(rows), iters=2), Phase("two", data=str(rows), iters=2))
    run = train_pack(small, None, LORA, replace(SETTINGS, phases=two), tmp_path / "p")
    assert [line["micro_batches"] for line in run.curve if "micro_batches" in line] == [2]
    assert run.report["batches"] == 4


def test_one_row_and_critical_memory_end_the_run_saved(small, rows, tmp_path, short_memory):
    short_memory += [LOW, LOW, LOW, CRITICAL]  # 2 rows; 1 row; nothing smaller; the end
    train = replace(SETTINGS, grad_accumulation_steps=3)
    with pytest.raises(RunStopped) as stopped:
        train_pack(small, rows, LORA, train, tmp_path / "p")
    check(stopped.value, "memory", None, "it is short", "step-000006", "--resume")
    assert stopped.value.exit_code == 2 and "resume=True" in str(stopped.value)
    run = train_pack(small, rows, LORA, train, tmp_path / "p", resume=True)
    assert run.report["batches"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "splits"), [("cosine", True), ("cosent", False)])
def test_pairs_that_are_compared_stay_together(encoder, tmp_path, short_memory, loss, splits):
    data = str(write_pairs(tmp_path / "d", all_scored()))
    train = TrainConfig(task="embedding", batch_size=8, iters=2, loss=loss, steps_per_report=1)
    train_pack(encoder, data, LORA, train, tmp_path / "whole")
    short_memory += [LOW]
    run = train_pack(encoder, data, LORA, train, tmp_path / "parts")
    assert any("micro_batches" in line for line in run.curve) == splits
    assert differences(tmp_path / "whole", tmp_path / "parts") < 2e-3


def test_freed_buffers_are_given_back_first(small, rows, tmp_path, short_memory, monkeypatch):
    monkeypatch.setattr(guards, "_WORTHWHILE", 0)
    short_memory += [LOW, NONE, LOW, NONE]  # before and after
    run = train_pack(small, rows, LORA, SETTINGS, tmp_path / "p")
    assert not any("micro_batches" in line for line in run.curve) and not short_memory


def test_the_system_is_asked_once_a_second(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(guards.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        guards, "memory_pressure", lambda: (asked.append(now[0]), Pressure(NONE))[1]
    )
    guard = guards.Memory(None)
    for now[0] in (0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1, 2.4, 2.7):
        assert guard.between_batches(None, None, 1) is None
    assert asked == [1.2, 2.4]


@pytest.mark.slow
def test_a_real_limit_ends_a_run_saved(rows, tmp_path):
    """The address space of the process is limited to little more than it has."""
    code = f"""
import json, resource, sys
from pathlib import Path
from mlx_packs.cli.main import main
from mlx_packs.runtime import mx
from mlx_packs.training import guards
from mlx_packs.training.observer import Observer
from mlx_packs.training.observers.registry import OBSERVERS
guards._EVERY = 0
class Limit(Observer):
    def on_step(self, line):
        if line["batch"] == 2:
            mx.clear_cache()
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = int(1.01 * pages * resource.getpagesize())
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
OBSERVERS["test"] = lambda run: Limit()
sys.argv = ["packs"]
try:
    main(["train", "-q", "--data", {str(rows)!r}, "--iters", "40", "--batch-size", "4", "--out",
          {str(tmp_path / "p")!r}])
except SystemExit as end:
    print(end.code)
"""
    assert run_python(code).splitlines()[-1] == "2"
    folder = tmp_path / "p-run"
    check_resumable(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["micro_batches"] for line in lines if "micro_batches" in line] == [2, 4]
    assert 4 <= int(latest_checkpoint(folder).name[-6:]) < 40


# --- the clock


def test_a_clock_that_is_set_back_changes_no_throughput(small, rows, tmp_path, monkeypatch):
    clock = [time.time()]

    def back() -> float:
        clock[0] -= 3600
        return clock[0]

    monkeypatch.setattr(time, "time", back)
    run = train_pack(small, rows, LORA, SETTINGS, tmp_path / "p")
    assert all(line["tokens_per_s"] > 0 for line in run.curve if "loss" in line)
    assert 0 < run.report["train_s"] < 3600 and run.report["tokens_per_s"] > 0


def test_a_clock_that_is_set_back_removes_no_cached_file(tmp_path, monkeypatch):
    for name in ("used", "older"):
        (tmp_path / name).write_text("")
    day = 24 * 3600
    now = time.time()
    os.utime(tmp_path / "older", (now - 40 * day, now - 40 * day))
    monkeypatch.setattr(time, "time", lambda: now - 365 * day)
    remove_unused(tmp_path, "*", 30)
    assert (tmp_path / "used").exists() and (tmp_path / "older").exists()
    monkeypatch.setattr(time, "time", lambda: now)
    remove_unused(tmp_path, "*", 30)
    assert (tmp_path / "used").exists() and not (tmp_path / "older").exists()
