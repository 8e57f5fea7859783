"""Runs with the base on disk end with the packs of runs with the base in memory, to the byte."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from mlx_packs import LoRAConfig, TrainConfig, runtime, train_pack
from mlx_packs.errors import RunStopped
from mlx_packs.memory.estimate import least
from mlx_packs.memory.plan import ERROR
from mlx_packs.memory.read import read_headers
from mlx_packs.offload import placing
from mlx_packs.packs.base import load_base
from mlx_packs.reading import sha256
from mlx_packs.runtime import mx
from mlx_packs.training.step import StartedStep
from tests.helpers.checkpoints import write_dense, write_quantized, write_stored
from tests.helpers.documents import ROOT
from tests.helpers.errors import raises
from tests.helpers.gguf_base import write_gguf
from tests.helpers.observers import Observer
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import write_rows
from tests.helpers.variants import nightly_except, slow_except

LORA = LoRAConfig(rank=2)
RUN = TrainConfig(
    iters=3,
    batch_size=2,
    max_seq_length=64,
    matmul_path="transient",
    recompute="block",
    cache_frozen="off",
    save_every=1,
    lr_schedule="constant",
    learning_rate=1e-3,
    val_batches=1,
    test_batches=1,
)
TWENTY = replace(RUN, iters=20, save_every=10)  # adapters are compared after twenty updates


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_stored(tmp_path_factory.mktemp("base") / "b", bits=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [preference(i) for i in range(12)]
    prompts = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in rows]
    chats = [{"prompt": p["prompt"], "completion": p["completion"] + " ."} for p in prompts]
    marked = [rated(i) for i in range(12)]
    folder = tmp_path_factory.mktemp("data")
    return {
        "chats": write_rows(folder / "c", train=chats[:8], valid=chats[8:10], test=chats[10:]),
        "pairs": write_rows(folder / "p", train=rows[:8], valid=rows[8:10], test=rows[10:]),
        "rated": write_rows(folder / "r", train=marked[:8], valid=marked[8:]),
        "prompts": write_rows(folder / "q", train=prompts[:8], valid=prompts[8:]),
    }


def run_of(base, data, train, out, lora=LORA, **options):
    return train_pack(str(base), data, lora, train, out, progress=False, **options)


def hash_of_pack(*args, **options) -> str:
    return sha256(run_of(*args, **options).pack.path / "adapters.safetensors")


def check_same_packs(base, data, train, out, **options) -> None:
    """Compare the packs of a run with the base on disk and of one with the base in memory."""
    hashes = {
        hash_of_pack(base, data, replace(train, offload_base=how), out / how, **options)
        for how in ("on", "off")
    }
    assert len(hashes) == 1


def shorter(completions, **_):
    return [-len(text) / 20 for text in completions]


GRPO = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
RUNS = {
    "lm": ("chats", {}, {}),
    "packed": ("chats", {"packing": True}, {}),
    "accumulated": ("chats", {"grad_accumulation_steps": 2, "iters": 40}, {}),
    "three": ("chats", {"grad_accumulation_steps": 3, "iters": 61, "micro_batches": 2}, {}),
    "skipped": ("chats", {"grad_accumulation_steps": 2, "iters": 40, "on_nan": "skip"}, {}),
    "shared": ("pairs", {"task": "dpo", "share_prefix": "on"}, {}),
    "dpo": ("pairs", {"task": "dpo", "share_prefix": "off"}, {}),
    "dora": ("chats", {"method": "dora"}, {}),
    "kto": ("rated", {"task": "kto"}, {}),
    "validated": ("chats", {"steps_per_eval": 1, "load_best": True}, {}),
    "grpo": ("prompts", {"task": "grpo", **GRPO}, {"reward": shorter}),
}
OFTEN = ("lm", "packed", "accumulated", "dpo", "grpo")


@pytest.mark.parametrize(
    "name",
    [
        *slow_except(OFTEN, "lm"),
        *nightly_except([name for name in RUNS if name not in OFTEN], seconds=6),
    ],
)
def test_packs_are_the_same_to_the_byte(base, data, tmp_path, name):
    rows, changes, options = RUNS[name]
    check_same_packs(base, data[rows], replace(TWENTY, **changes), tmp_path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "gguf"])
def test_packs_on_other_formats_are_the_same_to_the_byte(kind, data, tmp_path):
    dense = write_dense(tmp_path / "dense", vocab_size=4096, eos_token_id=0)
    if kind == "gguf":
        base = write_gguf(dense, tmp_path / "base.gguf")
    else:
        base = write_quantized(tmp_path / "base", dense, mode=kind)
    check_same_packs(base, data["chats"], TWENTY, tmp_path)


ACCUMULATED = replace(RUN, grad_accumulation_steps=4, iters=4, offload_base="on")


@pytest.mark.slow
def test_an_update_reads_blocks_once_where_the_plan_has_room(base, data, tmp_path, monkeypatch):
    # the first run of a process reads more
    run_of(base, data["chats"], ACCUMULATED, tmp_path / "first")
    shared = run_of(base, data["chats"], ACCUMULATED, tmp_path / "shared").report
    limit = int(1e9 * shared["plan_peak_gb"] * (1 + ERROR)) - 1000
    monkeypatch.setattr(runtime, "total_memory", lambda: limit)
    reads = run_of(base, data["chats"], ACCUMULATED, tmp_path / "reads").report

    more = 1e9 * (reads["offload"]["read_gb"] - shared["offload"]["read_gb"])
    blocks = load_base(base, offload=True).blocks_on_disk
    assert more == pytest.approx(3 * 2 * blocks.on_disk * blocks.stored_block_bytes, rel=1e-3)
    hashes = [sha256(tmp_path / name / "adapters.safetensors") for name in ("shared", "reads")]
    assert hashes[0] == hashes[1]


KILLED = """
import json, os, sys
from tests.offload.test_runs import *
base, data, out, changes = sys.argv[1:]
reports = []
def kill_after_two():
    reports.append(1)
    if len(reports) == 2:
        os.kill(os.getpid(), 9)
train = replace(RUN, offload_base="on", steps_per_report=1, **json.loads(changes))
hash_of_pack(base, data, train, out, callbacks=[Stops(kill_after_two)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    nightly_except([{"iters": 20}, {"grad_accumulation_steps": 2, "iters": 40}], {"iters": 20}),
)
def test_a_run_that_is_killed_can_be_resumed(base, data, tmp_path, changes):
    train = replace(RUN, **changes)
    whole = hash_of_pack(base, data["chats"], train, tmp_path / "whole")
    out = tmp_path / "o"
    arguments = [str(base), str(data["chats"]), str(out), json.dumps(changes)]
    command = [sys.executable, "-c", KILLED, *arguments]
    assert subprocess.run(command, cwd=ROOT).returncode == -9
    train = replace(train, offload_base="on", steps_per_report=1)
    assert hash_of_pack(base, data["chats"], train, out, resume=True) == whole


class Stops(Observer):
    """Does something after the first report."""

    def __init__(self, action):
        self.action = action

    def on_report(self, line, batches_per_s):
        self.action()


def test_a_run_reads_no_more_than_its_plan_has_room_for(base, data, tmp_path, sample_text):
    limits = []

    def note():
        limits.append(mx.set_memory_limit(1 << 40))
        mx.set_memory_limit(limits[-1])

    outside = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(outside)
    train = replace(RUN, iters=1, offload_base="on", steps_per_report=1)
    run = run_of(base, data["chats"], train, tmp_path / "o", callbacks=[Stops(note)])

    assert run.report["sample"]["after"] is None  # each token would read the base
    assert limits == [int(1e9 * run.report["plan_peak_gb"] * (1 + ERROR))]
    note()
    assert limits[1] == outside


@pytest.mark.slow
def test_a_run_whose_base_vanishes_is_saved_and_can_be_resumed(base, data, tmp_path):
    whole = hash_of_pack(base, data["chats"], replace(RUN, offload_base="on"), tmp_path / "whole")
    mine = shutil.copytree(base, tmp_path / "mine")
    file = mine / "model.safetensors"
    train = replace(RUN, offload_base="on", steps_per_report=1, save_every=100)
    gone = [Stops(lambda: file.exists() and os.rename(file, tmp_path / "gone"))]

    with pytest.raises(RunStopped, match="cannot be read any more"):
        hash_of_pack(mine, data["chats"], train, tmp_path / "o", callbacks=gone)

    os.rename(tmp_path / "gone", file)
    assert hash_of_pack(mine, data["chats"], train, tmp_path / "o", resume=True) == whole


def test_a_step_during_which_a_file_changes_is_lost(base, data, tmp_path, monkeypatch):
    mine = shutil.copytree(base, tmp_path / "mine")
    steps = itertools.count(1)
    read = StartedStep.read

    def change_in_the_third(step):
        if next(steps) == 3:
            os.utime(mine / "model.safetensors", (0, 0))
        return read(step)

    monkeypatch.setattr(StartedStep, "read", change_in_the_third)
    train = replace(RUN, offload_base="on", save_every=2)
    with pytest.raises(RunStopped, match="changed during a step") as stopped:
        hash_of_pack(mine, data["chats"], train, tmp_path / "o")
    assert stopped.value.checkpoint.name == "step-000002"


@pytest.mark.parametrize(
    "changes, flag",
    [
        ({"method": "full"}, "method"),
        ({"method": "pissa"}, "method"),
        ({"recompute": "none"}, "recompute"),
        ({"cache_frozen": "on"}, "cache_frozen"),
        ({"quantize": "nf4"}, "quantize"),
    ],
)
def test_settings_that_need_the_base_in_memory_are_rejected(changes, flag):
    with raises("conflict", flag):
        TrainConfig(offload_base="on", **changes)


@pytest.mark.parametrize(
    ("lora", "changes", "flag"),
    [
        (LoRAConfig(rank=2, modules_to_save=("input_layernorm",)), {}, "modules_to_save"),
        (LORA, {"matmul_path": "dense"}, "matmul_path"),
    ],
)
def test_modules_in_full_inside_blocks_and_the_dense_path_are_rejected(
    base, data, tmp_path, lora, changes, flag
):
    train = replace(RUN, offload_base="on", **changes)
    with raises("conflict", flag):
        run_of(base, data["chats"], train, tmp_path / "o", lora)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_room_for_two_blocks_says_what_would_do(base, data, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "total_memory", lambda: 10_000)
    with raises("memory") as caught:
        run_of(base, data["chats"], replace(RUN, offload_base="on"), tmp_path / "o")
    assert re.search(r"would take at least [\d.]+ MB", caught.value.message)
    assert "--offload-base on" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_auto_keeps_as_many_blocks_in_memory_as_fit(data, tmp_path, monkeypatch):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24}
    base = write_stored(tmp_path / "base", bits=8, **sizes)
    room = (plan_of(base, "off") + 2 * plan_of(base, "on")) // 3
    monkeypatch.setattr(runtime, "total_memory", lambda: room)

    train = replace(RUN, batch_size=1, iters=1)
    run = run_of(base, data["chats"], train, tmp_path / "o")
    assert 0 < run.report["offload"]["blocks_on_disk"] < 24
    with raises("memory"):
        run_of(base, data["chats"], replace(train, offload_base="off"), tmp_path / "p")


def plan_of(base, how: str) -> int:
    return least(read_headers(base), LORA, replace(RUN, offload_base=how)).peak_bytes


def test_weights_that_the_files_do_not_have_are_written_once(tmp_path, monkeypatch):
    folder = write_stored(tmp_path / "base")
    monkeypatch.setattr(placing, "_stored_name", lambda name, _: f"other.{name}")
    expected = load_base(folder)
    base = load_base(folder, offload=True)
    tokens = placing.mx.array([[1, 2, 3]])
    assert placing.mx.array_equal(base.model(tokens), expected.model(tokens)).item()
    monkeypatch.setattr(placing, "save_tensors", None)
    load_base(folder, offload=True)
