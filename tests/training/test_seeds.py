"""Packs of several seeds: each is what it is by itself, resumes to the bit, and has a part in a mean."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs import LoRAConfig, Pack, train_pack, train_seeds
from mlx_packs.cli.main import main
from mlx_packs.config.data import DataConfig
from mlx_packs.config.recipe import Recipe
from mlx_packs.display import QUIET, Display
from mlx_packs.errors import RunStopped
from mlx_packs.packs.base import load_base
from mlx_packs.training import seeds as training
from mlx_packs.training.run import train_request
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.seeds import statistics, train_with_seeds
from mlx_packs.training.settings import Request
from tests.helpers import runs
from tests.helpers.errors import raises
from tests.helpers.observers import observe
from tests.helpers.rows import write_rows
from tests.helpers.runs import Lines
from tests.training.conftest import ROWS

TRAIN = replace(runs.TRAIN, iters=3, steps_per_eval=1, optimizer="sgd", learning_rate=0.1)


@pytest.fixture
def rows(here) -> Path:
    """A folder with chats, which is the current one."""
    write_rows(here / "chats", train=ROWS, valid=ROWS[:1])
    return here


@pytest.fixture
def request_of(small):
    """Return a request for packs ``out`` of `small`, with settings besides `TRAIN`."""

    def request(out, **settings) -> Request:
        options = {"model": "small", "out": str(out), "seeds": 2}
        options |= {"resume": settings.pop("resume", False)}
        train, data = replace(TRAIN, **settings), DataConfig(data="chats")
        recipe = Recipe(LoRAConfig(rank=2), train, data, run=options, names_data=True)
        return Request(recipe, small, Display(QUIET))

    return request


def adapters(run: str, batch: int = 3) -> bytes:
    return Path(f"{run}-run/step-{batch:06d}/adapters.safetensors").read_bytes()


def test_python_trains_seeds_on_one_base_and_examples_in_memory(here, small_folder, monkeypatch):
    loaded, display = [], Lines()

    def load(*args, **options):
        loaded.append(load_base(*args, **options))
        return loaded[-1]

    monkeypatch.setattr(training, "load_base", load)
    data = {"train": iter(ROWS), "valid": ROWS[:1]}
    lora, train = LoRAConfig(rank=2), replace(TRAIN, seed=3)
    found = train_seeds(str(small_folder), data, lora, train, "out", seeds=2, progress=display)
    assert len(loaded) == 1
    assert [line for line in display.lines if line.startswith("seeds 2 packs")]

    assert list(found.runs) == [3, 4]
    assert [pack.path for pack in found.packs] == [Path("out/seed-3"), Path("out/seed-4")]
    losses = [Pack.open(f"out/seed-{seed}").manifest["eval"]["ppl_after"] for seed in (3, 4)]
    assert found.mean["ppl_after"] == pytest.approx(sum(losses) / 2)
    error = abs(losses[0] - losses[1]) / 2
    assert found.standard_error["ppl_after"] == pytest.approx(error)
    assert repr(found).startswith("SeedRuns(2 seeds, ppl ") and "±" in repr(found)
    assert str(found).startswith("mean    ppl ")
    stored = json.loads(Path("out/seeds.json").read_text())
    assert stored == json.loads(json.dumps(found.to_json())) and stored["seeds"] == [3, 4]
    recipe = Pack.open("out/seed-4").manifest["recipe"]
    assert recipe["seed"] == 4 and "seeds" not in recipe

    data, train = {"train": ROWS, "valid": ROWS[:1]}, replace(TRAIN, seed=4)
    single = train_pack(loaded[0], data, lora, train, "single", progress=False)
    assert adapters("out/seed-4") == adapters("single")
    assert found.runs[4].report["ppl_after"] == single.report["ppl_after"]


def test_python_says_what_seeds_need(here, small):
    for seeds in (1, 65):
        with raises("invalid", "seeds", "[2, 64]", str(seeds)):
            train_seeds(small, ROWS, out="out", seeds=seeds)
    assert not Path("out").exists()
    with raises("conflict", "out"):
        train_seeds(small, ROWS)
    with raises("unknown", "seed", "train=mp.TrainConfig(seed=...)"):
        train_seeds(small, ROWS, out="out", seed=1)


def test_mean_and_standard_error_are_of_numbers_that_all_have():
    reports = [
        {"loss": 1.0, "held_out": {"rows": 3}, "own": 1, "name": "a", "gates": True},
        {"loss": 2.0, "held_out": {"rows": 3}, "name": "b", "gates": True},
        {"loss": 6.0, "held_out": {"rows": 3}, "name": "c", "gates": True},
    ]
    found = statistics(reports)
    assert found["mean"] == {"loss": 3.0, "held_out.rows": 3.0}
    assert found["standard_error"] == pytest.approx(
        {"loss": (14 / 2 / 3) ** 0.5, "held_out.rows": 0}
    )


@pytest.mark.slow
def test_after_a_signal_resuming_changes_no_bit(rows, request_of, monkeypatch):
    train_with_seeds(request_of("whole"))
    steps = []

    def interrupt(line):
        steps.append(line)
        if len(steps) == 5:  # the second of seed 1
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        observe(patch, on_step=interrupt)
        with pytest.raises(RunStopped) as stopped:
            train_with_seeds(request_of("out"))
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert RunFolder(Path("out/seed-1-run")).checkpoints()[-1].name == "step-000002"

    train_with_seeds(request_of("out", resume=True))
    for each in (0, 1):
        assert adapters(f"out/seed-{each}") == adapters(f"whole/seed-{each}")

    again = train_with_seeds(request_of("out", resume=True))  # which takes no step
    assert [run.report["batches"] for run in again.runs.values()] == [3, 3]


def test_folders_are_checked_before_the_first_pack_is_trained(rows, request_of):
    train_request(request_of("pack"))
    with raises("exists", "out", "pack"):
        train_with_seeds(request_of("pack"))
    Path("out/seed-1").mkdir(parents=True)
    Path("out/seed-1/mine").touch()
    with raises("exists", "out", "seed-1"):
        train_with_seeds(request_of("out"))
    assert [path.name for path in Path("out").iterdir()] == ["seed-1"]


def test_the_command_prints_the_mean(rows, small_folder, capsys):
    arguments = f"train --model {small_folder} --data chats --seeds 2 --out out --iters 2 --rank 2"
    arguments += " --batch-size 2 --max-seq-length 64 --matmul-path dense"
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mean ") and "±" in lines[0] and "2 seeds" in lines[0]
    assert [line.split()[0] for line in lines[1:5]] == ["loss", "speed", "seed-0", "seed-1"]

    with pytest.raises(SystemExit) as ended:
        main([*arguments.replace("--seeds 2", "--seeds 300").split(), "--overwrite"])
    assert ended.value.code == 2
    assert "--seeds: must be in [2, 64], but is 300" in capsys.readouterr().err


def test_packs_of_another_task_have_a_mean(here, small):
    rows = [{"text": f"row {n}", "label": f"{n % 2}"} for n in range(8)]
    write_rows(here / "data", train=rows, valid=rows, test=rows)
    train = replace(TRAIN, task="classify", iters=1, steps_per_eval=10)
    found = train_seeds(small, "data", None, train, "out", seeds=2, progress=False)
    assert "tok/s" in str(found).splitlines()[2]
