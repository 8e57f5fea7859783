"""A sweep from the command line: runners, promotion, resuming, gates and the leaderboard."""

import csv
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
from mlx_packs.sweeps import runners, trial
from mlx_packs.sweeps.trial import Result, write_result

RECIPE = {
    "data": "tiny",
    "iters": 9,
    "batch_size": 1,
    "max_seq_length": 64,
    "num_layers": 1,
    "test_batches": 1,
    "val_batches": 0,
    "metric": "none",
    "save_every": 1,
}
RANKS = {"parameters": {"rank": [1, 2, 3]}}


def write_sweep(folder: Path, sweep: dict, **settings) -> None:
    (folder / "s.yaml").write_text(yaml.safe_dump({**RECIPE, **settings, "sweep": sweep}))


def run_sweep(*arguments: str):
    return CliRunner().invoke(packs, ["sweep", "-c", "s.yaml", "--out", "s", *arguments])


def leaderboard(folder: Path) -> dict:
    return json.loads((folder / "s" / "leaderboard.json").read_text())


class Calls(list):
    """(number, rung, batches) of each training of a test, and what some raise.

    With ``gated`` in ``failing``, packs below 2 fail their gate.
    """

    failing: dict


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Calls:
    """Train no trial: its perplexity is its rank, and rank 7 fails."""
    monkeypatch.chdir(tmp_path)
    calls, failing = Calls(), {}
    calls.failing = failing

    def train(trial, rung, until):
        if trial.number in failing:
            raise failing[trial.number]
        calls.append((trial.number, rung, until))
        ppl = float(trial.values["rank"])
        gates = {"max_pack_mb": {"limit": 2, "value": ppl, "passed": ppl >= 2}}
        result = Result(
            until or 9, {"ppl": ppl}, gates if "gated" in failing else {}, 1.0, 2.0, 0.1
        )
        if ppl == 7:
            result = Result(error="memory is exhausted")
        trial.folder.mkdir(parents=True, exist_ok=True)
        write_result(trial, rung, result)
        return result

    monkeypatch.setattr(runners, "train", train)
    return calls


def test_the_best_is_named_last_and_written_to_every_file(trained, tmp_path):
    write_sweep(tmp_path, RANKS)
    result = run_sweep()
    assert result.exit_code == 0, result.output
    assert trained == [(1, 0, None), (2, 0, None), (3, 0, None)]
    assert result.stdout.splitlines()[-1] == "best    s/trials/001/pack"
    content = leaderboard(tmp_path)
    assert content["best"] == "s/trials/001/pack" and content["lower_is_better"]
    with (tmp_path / "s" / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ppl"] for row in rows] == ["1.0", "2.0", "3.0"]
    page = (tmp_path / "s" / "leaderboard.html").read_text()
    assert (
        page.count("<circle") == 3
        and "<script" not in page
        and "http" not in page.split("</style>")[1]
    )


def test_json_is_one_object(trained, tmp_path):
    write_sweep(tmp_path, RANKS)
    assert json.loads(run_sweep("--json").stdout) == leaderboard(tmp_path)


def test_halving_promotes_the_best_third_by_the_metric(trained, tmp_path):
    ranks = {"rank": list(range(10, 19))}
    write_sweep(tmp_path, {"search": "halving", "trials": 9, "parameters": ranks})
    assert run_sweep().exit_code == 0
    drawn = {row["trial"]: row["values"]["rank"] for row in leaderboard(tmp_path)["rows"]}
    assert [(n, until) for n, rung, until in trained if rung == 0] == [(n, 1) for n in range(1, 10)]
    assert [(drawn[n], until) for n, rung, until in trained if rung == 1] == [
        (10, 3),
        (11, 3),
        (12, 3),
    ]
    assert [(drawn[n], until) for n, rung, until in trained if rung == 2] == [(10, None)]


def test_an_interrupted_sweep_repeats_nothing(trained, tmp_path):
    write_sweep(tmp_path, RANKS)
    trained.failing[2] = Interrupted("interrupted in trial 2", signal.SIGTERM)
    assert run_sweep().exit_code == 128 + signal.SIGTERM
    assert len(leaderboard(tmp_path)["rows"]) == 1
    trained.failing.clear()
    assert run_sweep().exit_code == 0
    assert run_sweep().exit_code == 0
    assert [number for number, *_ in trained] == [1, 2, 3]


def test_a_trial_that_fails_is_a_line_and_not_the_end(trained, tmp_path):
    write_sweep(tmp_path, {"parameters": {"rank": [7, 8]}})
    result = run_sweep()
    assert result.exit_code == 0
    rows = leaderboard(tmp_path)["rows"]
    assert [row["trial"] for row in rows] == [2, 1]
    assert rows[1]["status"] == "failed: memory is exhausted" and rows[1]["pack"] is None
    assert run_sweep().exit_code == 0 and len(trained) == 2
    write_sweep(tmp_path, {"parameters": {"rank": [7]}})
    assert run_sweep().exit_code == 2  # the folder has another sweep
    result = CliRunner().invoke(packs, ["sweep", "-c", "s.yaml", "--out", "t"])
    assert result.exit_code == 1 and "memory is exhausted" in result.stderr


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
    def run(own, arguments):
        (own.folder / trial.LOG).write_text("first\npacks: the disk is full\n\n")
        return code

    monkeypatch.setattr(trial, "_run", run)
    own = trial.Trial(3, {}, {}, tmp_path / "003")
    if raised:
        with pytest.raises(raised) as error:
            trial.train(own, 0, None)
        assert type(error.value) is raised and "trial 3" in error.value.message
        assert own.result(0) is None
        return
    result = trial.train(own, 0, None)
    assert result == own.result(0) and result.error and not result.passed
    assert trial.train(own, 0, None) == result


def test_trials_take_values_of_json_files_too(trained, tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({**RECIPE, "out": "here", "sweep": RANKS}))
    assert CliRunner().invoke(packs, ["sweep", "-c", "s.json"]).exit_code == 0
    recipes = [
        json.loads((tmp_path / "here/sweep.json").read_text())["trials"][i] for i in range(3)
    ]
    assert [each["recipe"]["rank"] for each in recipes] == [1, 2, 3]


@pytest.mark.slow
def test_a_killed_sweep_of_12_trials_trains_each_exactly_once(tmp_path):
    write_sweep(
        tmp_path,
        {
            "search": "random",
            "trials": 12,
            "parameters": {
                "learning_rate": {"min": 1e-5, "max": 1e-2, "scale": "log"},
                "rank": [1, 2, 64],
            },
        },
        max_pack_mb=1,
    )
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
    assert sorted(row["trial"] for row in rows) == list(range(1, 13))
    assert all(row["status"] in ("ok", "gate failed: MB") and row["batches"] == 9 for row in rows)
    for number in range(1, 13):
        lines = (tmp_path / f"s/trials/{number:03d}/train.log").read_text().splitlines()
        starts = sum(line.startswith("base ") for line in lines)
        resumes = sum(line.startswith("resume ") for line in lines)
        assert (starts, resumes) == ((2, 1) if number == 3 else (1, 0)), number


@pytest.mark.slow
def test_the_last_rung_is_the_run_in_one_piece(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks = {"rank": {"min": 1, "max": 4}}
    write_sweep(tmp_path, {"search": "halving", "trials": 3, "parameters": ranks})
    assert run_sweep().exit_code == 0
    row = next(row for row in leaderboard(tmp_path)["rows"] if row["batches"] == 9)
    settings = json.loads((tmp_path / row["pack"]).with_name("recipe.json").read_text())
    whole = CliRunner().invoke(
        packs, ["train", "-c", str(Path(row["pack"]).with_name("recipe.json")), "--out", "whole"]
    )
    assert whole.exit_code == 0 and settings["rank"] == row["values"]["rank"]
    name = "adapters.safetensors"
    assert (tmp_path / row["pack"] / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.interop
def test_ray_tune_trains_on_two_workers(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from mlx_packs.sweeps import ray_tune

    monkeypatch.chdir(tmp_path)
    halving = {"search": "halving", "trials": 2, "reduction_factor": 2}
    write_sweep(tmp_path, {**halving, "parameters": {"rank": [1, 2]}}, iters=2)
    worker = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=worker)
    try:
        cluster.add_node(**worker)
        ray.init(address=cluster.address, log_to_driver=False)
        assert sum(node["Alive"] for node in ray.nodes()) == 2 and ray_tune._cpus() == 1
        result = run_sweep("--runner", "ray")
        assert result.exit_code == 0, result.output
        rows = leaderboard(tmp_path)["rows"]
        assert sorted(row["trial"] for row in rows) == [1, 2]
        assert {row["batches"] for row in rows} <= {1, 2}
        assert any(row["batches"] == 2 for row in rows)
        assert result.stdout.splitlines()[-1] == f"best    {rows[0]['pack']}"
        assert result.stderr.count("rung 1/2") == 2
    finally:
        ray.shutdown()
        cluster.shutdown()
