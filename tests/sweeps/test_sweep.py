"""A sweep from the command line: trials, resuming, gates and the leaderboard."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml
from click.testing import CliRunner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from mlx_packs.cli.main import packs
from mlx_packs.config.recipe import resolve
from mlx_packs.errors import Interrupted, PackError
from mlx_packs.sweeps import trial
from mlx_packs.sweeps.sweep import Sweep
from mlx_packs.sweeps.trial import Result, write_result
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.rows import CHATS, write_rows

RECIPE = {
    **{"data": "rows", "iters": 9, "batch_size": 1, "max_seq_length": 64, "num_layers": 1},
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

    page = (tmp_path / "s" / "leaderboard.html").read_text()
    assert page.count("<circle") == 3
    assert "<script" not in page and "http" not in page.split("</style>")[1]

    assert json.loads(run_sweep("--json").stdout) == content and len(trained) == 3


def test_a_trial_that_fails_is_a_line_and_not_the_end(trained, tmp_path):
    write_sweep(tmp_path, {"parameters": {"rank": [7, 8]}})
    assert run_sweep().exit_code == 0
    rows = leaderboard(tmp_path)["rows"]
    assert [row["trial"] for row in rows] == [2, 1]
    assert rows[1]["status"] == "failed: memory is exhausted" and rows[1]["pack"] is None
    study = tmp_path / "s" / "study.jsonl"
    trials = study_of(study).trials
    assert {t.params["rank"]: t.state.name for t in trials} == {7: "FAIL", 8: "COMPLETE"}
    study.write_bytes(study.read_bytes() * 2)  # copied twice: each trial counts once
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


TPE = {"search": "tpe", "trials": 14, "parameters": {"rank": {"min": 1, "max": 99}}}


def ranks_of(folder: Path) -> list[int]:
    """The ranks of the trials in their order."""
    rows = sorted(leaderboard(folder)["rows"], key=lambda row: row["trial"])
    return [row["values"]["rank"] for row in rows]


def test_tpe_learns_and_an_interrupted_sweep_has_the_same_trials(trained, tmp_path):
    write_sweep(tmp_path, TPE)
    result = run_sweep()
    assert result.exit_code == 0 and result.stderr.count("\n") == 15
    ranks = ranks_of(tmp_path)
    assert len(set(ranks)) == 14 and min(ranks[10:]) < min(ranks[:10])

    shutil.move(tmp_path / "s", tmp_path / "whole")
    for number in (5, 12):
        trained.failing[number] = Interrupted("interrupted", signal.SIGTERM)
        assert run_sweep().exit_code == 128 + signal.SIGTERM
        trained.failing.clear()
    assert run_sweep().exit_code == 0
    assert ranks_of(tmp_path) == ranks


def test_the_flag_search_overrides_the_file(trained, tmp_path):
    write_sweep(tmp_path, {**TPE, "search": "random", "trials": 2})
    assert run_sweep("--search", "tpe").exit_code == 0
    assert leaderboard(tmp_path)["search"] == "tpe"
    assert run_sweep("--search", "random").exit_code == 2  # the folder has another sweep


def test_a_trial_of_tpe_is_checked_before_it_starts(trained, tmp_path, monkeypatch):
    from mlx_packs.cli import sweep

    def recipe_of(flags, files):
        ((_, settings),) = files
        if 1 < settings["rank"] < 99:
            raise PackError("s.yaml: rank: is not for this base.")
        return resolve(settings)

    monkeypatch.setattr(sweep, "recipe_of", recipe_of)
    write_sweep(tmp_path, {**TPE, "trials": 3})
    result = run_sweep()
    assert result.exit_code == 1
    statuses = {row["status"] for row in leaderboard(tmp_path)["rows"]}
    assert len(statuses) == 3 and all("is not for this base" in status for status in statuses)
    assert "every trial failed" in result.stderr and trained == []


def test_without_optuna_one_line_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    write_sweep(tmp_path, RANKS)
    result = run_sweep()
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "pip install 'mlx-packs[sweep]'" in result.stderr
    assert not (tmp_path / "s").exists()


def test_a_report_and_a_trial_need_no_optuna():
    code = (
        "import sys; sys.modules['optuna'] = None\n"
        "import mlx_packs.sweeps.leaderboard, mlx_packs.sweeps.trial"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


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


def test_report_writes_the_page_of_a_sweep(trained, tmp_path):
    write_sweep(tmp_path, RANKS)
    assert run_sweep().exit_code == 0
    folder = tmp_path / "s"
    written = (folder / "leaderboard.html").read_bytes()
    (folder / "leaderboard.html").unlink()
    assert CliRunner().invoke(packs, ["report", "s"]).exit_code == 0
    assert (folder / "leaderboard.html").read_bytes() == written
    (folder / "leaderboard.json").write_text('{"rows": 3}')
    result = CliRunner().invoke(packs, ["report", "s"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.filterwarnings("ignore:Choices for a categorical")
def test_a_study_continues_after_a_kill_while_it_is_written(trained, tmp_path):
    write_sweep(tmp_path, {"parameters": {"rank": [1, 2], "target_modules": [["q_proj"], []]}})
    trained.failing[3] = Interrupted("interrupted in trial 3", signal.SIGTERM)
    assert run_sweep().exit_code == 128 + signal.SIGTERM
    assert len(leaderboard(tmp_path)["rows"]) == 2

    study = tmp_path / "s" / "study.jsonl"
    lines = study.read_bytes().splitlines(keepends=True)
    os.symlink(study, f"{study}.lock")
    trained.failing.clear()

    for lost in (1, 2, len(lines)):
        study.write_bytes(b"".join(lines[:-lost]) + lines[-lost][:20])
        assert run_sweep().exit_code == 0

    assert trained == [1, 2, 3, 4]
    rows = leaderboard(tmp_path)["rows"]
    assert [row["values"]["target_modules"] for row in rows] == [["q_proj"], []] * 2
    states = [trial.state.name for trial in study_of(study).trials]
    assert states == ["COMPLETE"] * 4


def study_of(file: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(file)))
    return optuna.load_study(study_name="sweep", storage=storage)


def test_a_damaged_study_is_one_line(trained, tmp_path):
    write_sweep(tmp_path, RANKS)
    assert run_sweep().exit_code == 0
    study = tmp_path / "s" / "study.jsonl"
    study.write_bytes(b"{}\n[3]\n" + study.read_bytes())
    result = run_sweep()
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "study.jsonl" in result.stderr and "Remove it" in result.stderr
    study.unlink()
    assert run_sweep().exit_code == 0 and len(trained) == 3


@pytest.mark.slow
def test_a_killed_sweep_trains_each_trial_exactly_once(tmp_path):
    """Killed while it trains the third of four."""
    write_checkpoint(tmp_path / "base")
    rates = {"min": 1e-5, "max": 1e-2, "scale": "log"}
    parameters = {"learning_rate": rates, "rank": [1, 2, 64]}
    random = {"search": "random", "trials": 4, "parameters": parameters}
    write_sweep(tmp_path, random, model="base", max_pack_mb=0.1)

    command = [sys.executable, "-m", "mlx_packs", "sweep", "-c", "s.yaml", "--out", "s"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)

    end = time.monotonic() + 300
    half = tmp_path / "s/trials/003/pack-run/step-000002"
    while not half.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert half.exists() and not (tmp_path / "s/trials/003/result-0.json").exists()

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "continues, 2 have results" in done.stderr
    rows = leaderboard(tmp_path)["rows"]
    assert sorted(row["trial"] for row in rows) == [1, 2, 3, 4]
    assert all(row["status"] in ("ok", "gate failed: MB") and row["batches"] == 9 for row in rows)
    for number in range(1, 5):
        lines = (tmp_path / f"s/trials/{number:03d}/train.log").read_text().splitlines()
        starts = sum(line.startswith("base ") for line in lines)
        resumes = sum(line.startswith("resume ") for line in lines)
        assert (starts, resumes) == ((2, 1) if number == 3 else (1, 0)), number


def test_a_sweep_that_runs_out_of_values_says_so(trained, tmp_path, monkeypatch):
    write_sweep(tmp_path, TPE)
    monkeypatch.setattr(Sweep, "_draw", lambda _: None)
    ended = run_sweep()
    assert " of 14 trials: no new values were found" in ended.stderr
