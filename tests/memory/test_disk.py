"""Disk space of runs: what a plan says, what is there, and what is rejected at the start."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs import LoRAConfig, Phase, TrainConfig, train_pack
from mlx_packs.errors import CRASHED
from mlx_packs.memory import estimate as estimates
from mlx_packs.memory.estimate import estimate, plan_disk
from mlx_packs.memory.read import read_headers
from mlx_packs.training.observers.run_files import Retention
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.errors import check, raises
from tests.helpers.headers import dense_headers, write_headers
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN, Lines

PAIRS = [{"sentence1": "a b", "sentence2": "b a", "score": n / 4} for n in range(4)]
SETTINGS = replace(TRAIN, iters=4, steps_per_eval=1, keep_last=1, steps_per_report=4)


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.fixture
def counts(monkeypatch) -> list[int]:
    """How many checkpoints there are each time before old ones are removed."""
    counted, remove = [], Retention.on_checkpoint

    def on_checkpoint(self, folder):
        counted.append(len(RunFolder(folder.parent).checkpoints()))
        remove(self, folder)

    monkeypatch.setattr(Retention, "on_checkpoint", on_checkpoint)
    return counted


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"optimizer": "adamw_8bit", "pack_dtype": "bfloat16"}, CHATS),
        ({"method": "full"}, CHATS),
        ({"task": "embedding"}, PAIRS),
    ],
    ids=["lora", "full", "encoder"],
)
def test_the_plan_is_within_a_few_percent_of_the_files(changes, rows, encoder, tmp_path, counts):
    base = encoder if rows is PAIRS else write_checkpoint(tmp_path / "base")
    data = write_rows(tmp_path / "d", train=rows, valid=rows[:2])
    display = Lines()
    train = replace(SETTINGS, **changes)
    run = train_pack(base, data, LoRAConfig(), train, tmp_path / "p", progress=display)
    plan = run.report["plan_disk"]

    for folder in RunFolder(run.run).checkpoints():
        assert plan["checkpoint_bytes"] == pytest.approx(bytes_of(folder), rel=0.03)
    assert plan["pack_bytes"] == pytest.approx(bytes_of(run.pack.path), rel=0.03)
    assert max(counts) <= plan["checkpoints"] <= max(counts) + 1

    total = plan["checkpoints"] * plan["checkpoint_bytes"] + plan["pack_bytes"]
    assert plan["total_gb"] == total / 1e9

    (line,) = [line for line in display.lines if line.startswith("plan ")]
    assert line.endswith(f"disk {total / 1e6:.1f} MB")


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 5),  # three, the best, and the one that is written
        ({"val_batches": 0}, 4),
        ({"steps_per_eval": 600}, 4),
        ({"keep_last": 1}, 3),
        ({"keep_last": -1}, 6),
        ({"iters": 101}, 2),
        ({"iters": 50}, 1),
        ({"phases": (Phase(iters=150), Phase(iters=50))}, 3),
    ],
)
def test_the_number_of_checkpoints_at_a_time(changes, count):
    headers = read_headers("tiny")
    plan = estimate(headers, LORA, TrainConfig())
    assert plan_disk(plan, TrainConfig(**changes)).checkpoints == count


def test_a_run_that_the_disk_cannot_hold_is_rejected(here, monkeypatch, nothing_is_loaded, run):
    monkeypatch.setattr(estimates, "free_bytes", lambda _: 1_000_000)
    arguments = ["train", "--data", "tiny", "--out", "p", "--iters", 2, "--save-every", 1]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and "packs: " in err.splitlines()[-1]
    check(run.error, "unwritable", "out", "p-run", "1.0 MB", "--keep-last", "--force")
    assert not list(here.iterdir())
    code, _, err = run(*arguments, "--force")
    assert code == CRASHED and "weights were loaded" in err


def test_checkpoints_that_are_replaced_count_as_free(trained_copy, monkeypatch, nothing_is_loaded):
    needed = plan_disk(estimate(read_headers("tiny"), LORA, TRAIN), TRAIN).total_bytes
    present = sum(bytes_of(folder) for folder in RunFolder(Path("o-run")).checkpoints())
    monkeypatch.setattr(estimates, "free_bytes", lambda _: needed - present + 50)
    with pytest.raises(AssertionError, match="weights were loaded"):
        train_pack("tiny", "d", LORA, TRAIN, "o", overwrite=True)
    monkeypatch.setattr(estimates, "free_bytes", lambda _: needed - present - 50)
    with raises("unwritable", "out"):
        train_pack("tiny", "d", LORA, TRAIN, "o", overwrite=True)


def test_packs_plan_has_the_disk_space(tmp_path, run):
    base = write_headers(tmp_path / "base", dense_headers("llama-3-8b"))
    arguments = ["plan", "--model", base, "--memory", 64, "--rank", 16, "--keep-last", 1]
    code, out, _ = run(*arguments, "--json")
    best = json.loads(out)["options"][0]

    weights = best["adapter_weights"]
    assert code == 0 and best["disk"]["checkpoint_bytes"] == pytest.approx(12 * weights, rel=0.01)
    assert best["disk"]["checkpoints"] == 3
    assert best["disk"]["pack_bytes"] == pytest.approx(4 * weights, rel=0.01)
    assert "--keep-last 1" in best["command"]

    text = run(*arguments)[1]
    assert "disk    " in text and "3 checkpoints of" in text
