"""Trials of a sweep in one batch: what they are alone, also after faults and interruptions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_packs.config.recipe import resolve
from mlx_packs.errors import Interrupted, PackError
from mlx_packs.runtime import mx
from mlx_packs.sweeps import process, trial
from mlx_packs.sweeps.together import MOST, batches_of_trials, described
from mlx_packs.sweeps.trial import LOG, RECIPE, TOO_LARGE, Result, Trial, train_trials, write_result
from mlx_packs.training.unattended import CRASHED
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.variants import nightly_except
from tests.sweeps.test_sweep import leaderboard, run_sweep, write_sweep

RANDOM = {"search": "random", "trials": 4}
PARAMETERS = {
    "learning_rate": {"min": 1e-3, "max": 1e-1, "scale": "log"},
    "rank": [1, 2, 3],
    "seed": [0, 1],
}
BASE = {"model": "base", "optimizer": "sgd"}


@pytest.fixture
def sweep_of(here):
    """Return a function that writes a sweep of a small base, whose folder is the current one."""
    write_checkpoint(here / "base")

    def write(sweep: dict, **settings) -> Path:
        write_sweep(here, sweep, **BASE, **settings)
        return here

    return write


def trials_of(folder: Path, values: list[dict]) -> list[Trial]:
    return [Trial(n, own, folder / f"{n:03d}") for n, own in enumerate(values, 1)]


def recipe_of(values: dict):
    return resolve({"model": "tiny", "data": "tiny", **values})


def numbers(batches) -> list[list[int]]:
    return [[each.number for each in batch] for batch in batches]


def test_trials_share_a_batch_if_all_but_settings_of_their_own_are_equal(here):
    values = [
        {"rank": 4, "batch_size": 1},
        {"rank": 8, "batch_size": 2},
        {"rank": 8, "batch_size": 1, "optimizer": "sgd"},
        {"rank": 2, "batch_size": 2, "dropout": 0.1},
        {"rank": 2, "batch_size": 2, "learning_rate": 0.1},
        {"rank": 2, "batch_size": 3},
    ]
    batches = list(batches_of_trials(trials_of(here, values), recipe_of, 1))
    assert numbers(batches) == [[1, 3], [2, 5], [4], [6]]

    lines = described(batches, recipe_of)
    assert lines[:2] == ["trials 1, 3 together", "trials 2, 5 together"]
    assert lines[2].startswith("trial 4 alone: --dropout 0.1")
    assert lines[3].startswith("trial 6 alone: no other trial")
    assert "what several packs in one batch save" in lines[4]


def test_batches_are_of_similar_size_and_every_worker_gets_one(here):
    trials = trials_of(here, [{"seed": seed} for seed in range(MOST + 1)])
    assert [len(batch) for batch in batches_of_trials(trials, recipe_of, 1)] == [5, 4]
    assert [len(batch) for batch in batches_of_trials(trials, recipe_of, 3)] == [3, 3, 3]
    assert [len(batch) for batch in batches_of_trials(trials[:2], recipe_of, 3)] == [2]


@pytest.mark.parametrize(
    ("sweep", "settings", "text"),
    [
        ({"search": "tpe", "trials": 2}, {}, "--together: with search tpe"),
        ({}, {"dropout": 0.1}, "--dropout 0.1: is not for several packs"),
        ({}, {"patience": 2, "val_batches": 1}, "--patience 2: is not for several packs"),
        ({}, {"time": "1h"}, "--time 1h: is not for several packs"),
        ({"parameters": {"batch_size": [1, 2]}}, {}, "batch_size: differs between all trials"),
        ({"parameters": {"rank": [2]}}, {}, "the sweep has one trial"),
    ],
)
def test_a_sweep_without_two_trials_for_one_batch_is_one_line(sweep_of, sweep, settings, text):
    folder = sweep_of({"parameters": {"rank": [2, 3]}, **sweep}, **settings)
    result = run_sweep("--together")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert text in result.stderr
    assert not (folder / "s").exists()


class Processes(list):
    """Numbers of the trials of each process, and the exit codes by how many trials one has."""

    codes: dict[int, int]


@pytest.fixture
def runs(here, monkeypatch) -> Processes:
    """No process trains; one with exit code 0 writes results."""
    started = Processes()
    started.codes = {}

    def run(trials, rung, until):
        started.append([each.number for each in trials])
        with (trials[0].folder / LOG).open("a") as log:
            log.write("packs: the reason\n")
        code = started.codes.get(len(trials), 0)
        if not code:
            for each in trials:
                write_result(each, rung, Result(1, {"ppl": 1.0}, packs=len(trials)))
        return code

    monkeypatch.setattr(trial, "_run", run)
    return started


def train_four(folder: Path) -> list[Result]:
    trials = trials_of(folder, [{"seed": seed} for seed in range(4)])
    return train_trials(trials, [recipe_of(each.values).to_json() for each in trials], 0, None)


@pytest.mark.parametrize(
    ("codes", "started", "packs"),
    [
        ({}, [[1, 2, 3, 4]], 4),
        ({4: TOO_LARGE}, [[1, 2, 3, 4], [1, 2], [3, 4]], 2),
        ({4: 70}, [[1, 2, 3, 4], [1], [2], [3], [4]], 1),
        ({4: -9}, [[1, 2, 3, 4], [1], [2], [3], [4]], 1),
    ],
)
def test_trials_that_fail_in_one_batch_are_trained_in_smaller_ones(
    here, runs, codes, started, packs
):
    runs.codes |= codes
    results = train_four(here)
    assert runs == started
    assert [result.packs for result in results] == [packs] * 4
    assert not any(result.error for result in results)
    assert "trial 1" in (here / "002" / LOG).read_text()


@pytest.mark.parametrize(("code", "kind"), [(143, Interrupted), (2, PackError)])
def test_what_would_end_all_trials_ends_those_in_one_batch(here, runs, code, kind):
    runs.codes[4] = code
    with pytest.raises(kind):
        train_four(here)
    assert runs == [[1, 2, 3, 4]]


def write_recipes(folder: Path, values: list[dict]) -> list[Trial]:
    """Trials of a small base with their recipes, as `train_trials` writes them."""
    trials = trials_of(folder, values)
    settings = {"model": "base", "data": "rows", "optimizer": "sgd", "iters": 4, "batch_size": 1}
    settings |= {"max_seq_length": 64, "test_batches": 2, "val_batches": 0, "save_every": 1}
    settings |= {"cache_frozen": "off", "share_prefix": "off", "num_layers": 1}
    for each in trials:
        each.folder.mkdir(parents=True)
        recipe = resolve({**settings, **each.values}).to_json()
        (each.folder / RECIPE).write_text(json.dumps(recipe))
    return trials


def difference(ours: Path, theirs: Path) -> float:
    """How far the adapters of two packs are apart, as a share of their length."""
    own = mx.load(str(ours / "adapters.safetensors"))
    other = mx.load(str(theirs / "adapters.safetensors"))
    assert set(own) == set(other)
    apart = sum((own[name] - other[name]).square().sum().item() for name in own)
    return (apart / sum(value.square().sum().item() for value in other.values())) ** 0.5


def test_trials_in_one_batch_are_what_they_are_alone_rung_by_rung(sweep_of):
    folder = sweep_of({})
    values = [
        {"seed": 0, "rank": 2, "learning_rate": 0.1},
        {"seed": 1, "rank": 3, "learning_rate": 0.01, "alpha": 3, "optimizer": "adamw"},
        {"seed": 2, "rank": 1, "learning_rate": 0.1, "max_grad_norm": 0.1, "iters": 3},
    ]
    together = write_recipes(folder / "together", values)
    for until in (2, None):  # the second rung continues from the first
        results = process.train_trials(together, until)

        alone = write_recipes(folder / f"alone-{until}", values)
        for each, ours in zip(alone, results, strict=True):
            (theirs,) = process.train_trials([each], until)
            assert ours.packs == 3 and ours.batches == theirs.batches
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
            pack = together[each.number - 1].pack
            assert difference(pack, each.pack) < (1e-6 if each.number != 2 else 1e-5)


def test_a_trial_that_diverges_leaves_the_others(sweep_of):
    values = [{"seed": 0, "learning_rate": 1e30}, {"seed": 1}]
    trials = write_recipes(sweep_of({}) / "together", values)
    fails, trains = process.train_trials(trials, None)
    assert fails.error and not trains.error
    assert not trials[0].pack.exists() and trials[1].pack.exists()


@pytest.mark.parametrize(
    ("fault", "trials", "code"),
    [
        (PackError("too large", "memory"), 2, TOO_LARGE),
        (PackError("an embedding", "unsupported"), 2, CRASHED),
        (PackError("the disk is full", "unwritable"), 2, 2),
        (ZeroDivisionError(), 2, CRASHED),
        (PackError("too large", "memory"), 1, None),
    ],
)
def test_how_a_process_says_why_trials_failed(here, monkeypatch, fault, trials, code):
    """Of one trial the reason is its result; of a batch the parent has to know what to do next."""

    def train(trials, until):
        raise fault

    monkeypatch.setattr(process, "train_trials", train)
    monkeypatch.setattr(process, "_end_with_parent", lambda: None)
    folders = [str(here / str(number)) for number in range(trials)]
    monkeypatch.setattr(sys, "argv", ["process", *folders, "0", "0"])

    if code is None:
        process.main()
        assert Trial(1, {}, here / "0").result(0).error == "too large"
        return
    with pytest.raises(SystemExit) as ended:
        process.main()
    assert ended.value.code == code
    assert not list(here.rglob("result-0.json"))


def test_a_trial_that_began_alone_continues_alone(here, runs, monkeypatch):
    """Its batches may have shared their prefix, which those of several packs do not."""
    monkeypatch.setattr(Trial, "is_begun", property(lambda self: self.number == 2))
    (here / "002").mkdir()
    (here / "002" / RECIPE).write_text(json.dumps(recipe_of({"seed": 1}).to_json()))
    train_four(here)
    assert runs == [[1, 3, 4], [2]]
    assert json.loads((here / "002" / RECIPE).read_text())["share_prefix"] == "auto"
    assert json.loads((here / "001" / RECIPE).read_text())["share_prefix"] == "off"


def test_a_trial_that_began_with_others_continues_alone_as_it_began(here, runs, monkeypatch):
    monkeypatch.setattr(Trial, "is_begun", property(lambda self: True))
    (here / "001").mkdir()
    (here / "001" / RECIPE).write_text(json.dumps({"share_prefix": "off", "cache_frozen": "off"}))
    (one,) = trials_of(here, [{}])
    trial.train(one, recipe_of({}).to_json(), 0, None)
    assert json.loads((here / "001" / RECIPE).read_text())["share_prefix"] == "off"


def ranking(folder: Path) -> dict[int, float]:
    rows = leaderboard(folder)["rows"]
    assert all(row["status"] == "ok" for row in rows)
    return {row["trial"]: row["ppl"] for row in rows}


# Two sweeps of processes: 20 s
@pytest.mark.parametrize("search", nightly_except(["random", "halving"], "random"))
def test_a_sweep_together_is_the_sweep_without(sweep_of, search):
    folder = sweep_of({**RANDOM, "search": search, "parameters": PARAMETERS})
    assert run_sweep().exit_code == 0
    shutil.move(folder / "s", folder / "alone")
    result = run_sweep("--together")
    assert result.exit_code == 0 and "trials 1, 2, 3, 4 together" in result.stderr

    ours = ranking(folder)
    shutil.move(folder / "s", folder / "together")
    shutil.move(folder / "alone", folder / "s")
    assert list(ours) == list(ranking(folder))  # in the same order
    assert ours == pytest.approx(ranking(folder), rel=1e-5)

    for number in ours:
        pack = Path(f"trials/{number:03d}/pack")
        assert difference(folder / "together" / pack, folder / "s" / pack) < 1e-5
    files = [
        {str(file.relative_to(folder / name)) for file in (folder / name).rglob("*.*")}
        for name in ("together", "s")
    ]
    assert files[0] == files[1]


@pytest.mark.nightly  # five processes: 20 s
@pytest.mark.parametrize("again", [["--together"], []])
def test_a_killed_sweep_together_continues(sweep_of, again):
    folder = sweep_of({**RANDOM, "parameters": PARAMETERS}, iters=20)
    command = [sys.executable, "-m", "mlx_packs", "sweep", "-c", "s.yaml", "--out", "s"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    options = {"cwd": folder, "env": environment}

    begun = [*command, "--together"]
    killed = subprocess.Popen(begun, **options, stderr=subprocess.DEVNULL)
    half = folder / "s/trials/004/pack-run/step-000005"
    end = time.monotonic() + 120
    while not half.exists() and time.monotonic() < end and killed.poll() is None:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert half.exists() and not (folder / "s/trials/004/result-0.json").exists()

    done = subprocess.run([*command, *again], **options, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = (folder / "s/trials/001/train.log").read_text()
    assert log.count("resume ") == 1
    ours = ranking(folder)
    assert len(ours) == 4

    shutil.move(folder / "s", folder / "killed")
    whole = subprocess.run(begun, **options, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    assert ours == pytest.approx(ranking(folder), rel=1e-5)
