"""A sweep from the command line: trials, resuming, gates and the leaderboard."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from mlx_packs.cli.main import packs
from mlx_packs.errors import Interrupted, PackError
from mlx_packs.sweeps import trial
from mlx_packs.sweeps.trial import Result, write_result
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.rows import CHATS, write_rows

RECIPE = {
    **{
        "model": "tiny",
        "data": "rows",
        "iters": 9,
        "batch_size": 1,
        "max_seq_length": 64,
        "num_layers": 1,
    },
    **{"test_batches": 1, "val_batches": 0, "metric": "none", "save_every": 1},
}
RANKS = {"parameters": {"rank": [1, 2, 3]}}


def write_sweep(folder: Path, sweep: dict, **settings) -> None:
    write_rows(folder / "rows", train=CHATS, valid=CHATS[:2], test=CHATS[:2])
    (folder / "s.yaml").write_text(yaml.safe_dump({**RECIPE, **settings, "sweep": sweep}))


def run_sweep(*arguments: str):
    return CliRunner().invoke(packs, ["sweep", "-c", "s.yaml", "--out", "s", *arguments])


def leaderboard(folder: Path) -> dict:
    return json.loads((folder / "s" / "leaderboard.json").read_text())


class Calls(list):
    """The number of each trial that a test trains, and what some raise (``failing``)."""


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Calls:
    """Train no trial: its perplexity is its rank, and rank 7 fails; with ``gated``, 1 fails a gate."""
    monkeypatch.chdir(tmp_path)
    calls = Calls()
    failing = calls.failing = {}

    def train(trial, recipe):
        assert recipe["rank"] == trial.values["rank"]
        if trial.number in failing:
            raise failing[trial.number]
        calls.append(trial.number)
        ppl = float(trial.values["rank"])
        gates = {"max_pack_mb": {"limit": 2, "value": ppl, "passed": ppl >= 2}}
        result = Result(9, {"ppl": ppl}, gates if "gated" in failing else {}, 1.0, 2.0, 0.1)
        if ppl == 7:
            result = Result(error="memory is exhausted")
        return write_result(trial, result)

    monkeypatch.setattr("mlx_packs.sweeps.sweep.train", train)
    return calls


def test_the_best_is_named_last_and_written_to_every_file(trained, tmp_path):
    write_sweep(tmp_path, RANKS)
    result = run_sweep()
    assert result.exit_code == 0, result.output
    assert trained == [1, 2, 3]
    assert result.stdout.splitlines()[-1] == "best    s/trials/001/pack"

    content = leaderboard(tmp_path)
    assert content["best"] == "s/trials/001/pack" and content["lower_is_better"]
    assert [row["ppl"] for row in content["rows"]] == [1.0, 2.0, 3.0]

    assert json.loads(run_sweep("--json").stdout) == content and len(trained) == 3


def test_a_trial_that_fails_is_a_line_and_not_the_end(trained, tmp_path):
    write_sweep(tmp_path, {"parameters": {"rank": [7, 8]}})
    assert run_sweep().exit_code == 0
    rows = leaderboard(tmp_path)["rows"]
    assert [row["trial"] for row in rows] == [2, 1]
    assert rows[1]["status"] == "failed: memory is exhausted" and rows[1]["pack"] is None
    assert run_sweep().exit_code == 0 and len(trained) == 2
    assert leaderboard(tmp_path)["rows"] == rows


def test_the_best_must_pass_the_gates(trained, tmp_path):
    trained.failing["gated"] = None
    write_sweep(tmp_path, RANKS)
    assert run_sweep().exit_code == 0
    content = leaderboard(tmp_path)
    assert content["best"] == "s/trials/002/pack"
    assert [row["status"] for row in content["rows"]] == ["ok", "ok", "gate failed: MB"]
    write_sweep(tmp_path, {"parameters": {"rank": [1]}})
    result = CliRunner().invoke(packs, ["sweep", "-c", "s.yaml", "--out", "t"])
    assert result.exit_code == 1 and "no trial passes the gates" in result.stderr
    assert json.loads((tmp_path / "t" / "leaderboard.json").read_text())["best"] is None


@pytest.mark.parametrize(
    "code, raised",
    [(143, Interrupted), (-15, Interrupted), (2, PackError), (-9, None), (70, None), (-11, None)],
)
def test_how_the_process_of_a_trial_ended(tmp_path, monkeypatch, code, raised):
    def run(one):
        (one.folder / trial.LOG).write_text("first\npacks: the disk is full\n\n")
        return code

    monkeypatch.setattr(trial, "_run", run)
    own = trial.Trial(3, {}, tmp_path / "003")
    if raised:
        with pytest.raises(raised) as error:
            trial.train(own, {})
        assert type(error.value) is raised and "trial 3" in error.value.message
        assert own.result is None
        return
    result = trial.train(own, {})
    assert result == own.result and result.error and not result.passed


def test_an_interrupted_sweep_continues_with_the_same_trials(trained, tmp_path):
    drawn = {"search": "random", "trials": 6, "parameters": {"rank": {"min": 1, "max": 99}}}
    write_sweep(tmp_path, drawn)
    for number in (2, 5):
        trained.failing[number] = Interrupted("interrupted", signal.SIGTERM)
        assert run_sweep().exit_code == 128 + signal.SIGTERM
        trained.failing.clear()
    assert run_sweep().exit_code == 0
    assert trained == [1, 2, 3, 4, 5, 6] and len(leaderboard(tmp_path)["rows"]) == 6


def test_the_flag_search_overrides_the_file(trained, tmp_path):
    write_sweep(tmp_path, {**RANKS, "trials": 3})
    assert run_sweep("--search", "random").exit_code == 0
    assert leaderboard(tmp_path)["search"] == "random"
    result = run_sweep("--search", "tpe")
    assert result.exit_code == 2
    assert "must be one of grid, random, but is 'tpe'. Use random." in result.stderr


def test_a_recipe_of_another_version_continues_if_it_means_the_same(trained, tmp_path):
    write_sweep(tmp_path, RANKS)
    assert run_sweep().exit_code == 0
    file = tmp_path / "s" / "sweep.json"
    content = json.loads(file.read_text())
    for changes, code in (
        ({"packing": None}, 0),
        ({"packing": True}, 2),
        ({"for_merge": "none"}, 0),  # a setting that was removed, and was not used
        ({"for_merge": "affine4"}, 2),
    ):
        recipe = {**content["recipe"], **changes}
        recipe = {key: value for key, value in recipe.items() if value is not None}
        file.write_text(json.dumps({**content, "recipe": recipe}))
        assert run_sweep().exit_code == code, changes


def test_another_sweep_in_the_folder_is_one_line(trained, tmp_path):
    searched = {"search": "random", "trials": 3, **RANKS}
    write_sweep(tmp_path, searched)
    assert run_sweep().exit_code == 0
    trained.clear()
    for sweep, settings, key in (
        ({}, {"iters": 8}, "recipe differs"),
        ({"trials": 2}, {}, "trials differ"),
        ({"seed": 4}, {}, "seed differs"),
        ({"parameters": {"rank": [1, 3, 4]}}, {}, "parameters differ"),
    ):
        write_sweep(tmp_path, {**searched, **sweep}, **settings)
        result = run_sweep()
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"whose {key}" in result.stderr and "Choose another --out" in result.stderr
    assert trained == []


def test_a_report_of_a_sweep_names_its_packs(trained, tmp_path):
    write_sweep(tmp_path, RANKS)
    assert run_sweep().exit_code == 0
    result = CliRunner().invoke(packs, ["report", "s"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "leaderboard.json" in result.stderr and "s/trials/001/pack" in result.stderr


@pytest.mark.slow
def test_a_killed_sweep_trains_each_trial_exactly_once(tmp_path):
    """Killed while it trains the second of three."""
    write_checkpoint(tmp_path / "base")
    rates = {"min": 1e-5, "max": 1e-2, "scale": "log"}
    parameters = {"learning_rate": rates, "rank": [1, 2, 64]}
    random = {"search": "random", "trials": 3, "parameters": parameters}
    write_sweep(tmp_path, random, model="base", max_pack_mb=0.1)

    command = [sys.executable, "-m", "mlx_packs", "sweep", "-c", "s.yaml", "--out", "s"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)

    end = time.monotonic() + 300
    half = tmp_path / "s/trials/002/pack-run/step-000002"
    while not half.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert half.exists() and not (tmp_path / "s/trials/002/result-0.json").exists()

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "continues, 1 have results" in done.stderr
    rows = leaderboard(tmp_path)["rows"]
    assert sorted(row["trial"] for row in rows) == [1, 2, 3]
    assert all(row["status"] in ("ok", "gate failed: MB") and row["batches"] == 9 for row in rows)
    for number in range(1, 4):
        lines = (tmp_path / f"s/trials/{number:03d}/train.log").read_text().splitlines()
        starts = sum(line.startswith("base ") for line in lines)
        resumes = sum(line.startswith("resume ") for line in lines)
        assert (starts, resumes) == ((2, 1) if number == 2 else (1, 0)), number
