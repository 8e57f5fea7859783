"""Run folders: only ours are replaced, a damaged one is a one-line error, and resuming continues."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlx_packs import Pack, train_pack
from mlx_packs.cli.train import train as train_command
from mlx_packs.config.schema import DataConfig
from mlx_packs.errors import PackError
from mlx_packs.files import exclusive_writer
from mlx_packs.reading import sealed, sha256
from mlx_packs.runtime import mx
from mlx_packs.training import planning
from mlx_packs.training.run_folder import RunFolder, output_folders
from mlx_packs.training.state import TrainingState
from tests.helpers.damage import renew_hashes
from tests.helpers.errors import check, raises
from tests.helpers.runs import LORA, TRAIN

LONGER = replace(TRAIN, iters=3)


@pytest.fixture
def resumed(small, trained_copy):
    """Resume the copied run to its third batch."""
    return lambda: train_pack(small, "d", LORA, LONGER, "o", resume=True)


def packs_train(*args):
    """`packs train ARGS`; what it raised, or None."""
    return (
        CliRunner().invoke(train_command, [str(a) for a in args], standalone_mode=False).exception
    )


@pytest.mark.parametrize(
    "config",
    ['{"model_type": "qwen3"}', "", '{"recipe": {}, "base": "x", "data": {}}'],
)
def test_foreign_folder_with_a_config_is_never_taken_for_a_run(small, trained, tmp_path, config):
    theirs = tmp_path / "p-run"
    (theirs / "step-by-step").mkdir(parents=True)
    (theirs / "config.json").write_text(config)
    for overwrite in (False, True):
        with raises("exists", None, "p-run: "):
            train_pack(small, trained / "d", LORA, TRAIN, tmp_path / "p", overwrite=overwrite)
    assert (theirs / "config.json").read_text() == config


def test_clear_run_takes_checkpoints_only(trained_copy):
    run = trained_copy / "o-run"
    (run / "step-by-step").mkdir()
    (run / "step-1").mkdir()
    (run / "step-000009").write_text("a file")
    (run / "not_finite.jsonl").touch()
    RunFolder(run).clear()
    left = {path.name for path in run.iterdir()}
    assert left == {"config.json", "step-by-step", "step-1", "step-000009"}
    assert RunFolder(run).is_run()


def test_checkpoints_of_a_run_without_a_pack_are_kept(small, trained_copy):
    shutil.rmtree(trained_copy / "o")
    with raises("exists", None, "-run: ", "--resume", "--overwrite"):
        train_pack(small, "d", LORA, TRAIN, "o")


@pytest.mark.parametrize("config", ["[]", "{", '{"format": "mlx_packs run 1"}'])
def test_resume_refuses_a_damaged_configuration(trained_copy, resumed, config):
    (trained_copy / "o-run" / "config.json").write_text(config)
    with raises("unreadable", None, "o-run/config.json"):
        resumed()


STATE = asdict(TrainingState(batches=2, updates=2, trained_tokens=9, train_s=0.5))


def test_a_damaged_training_state_is_rejected(trained_copy):
    shutil.rmtree("o-run/step-000001")
    wrong = {"more": 1}, {"batches": True}, {"updates": -1}, {"train_s": float("nan")}
    for state in ({"batches": 2}, *(STATE | each for each in wrong)):
        renew_hashes(Path("o-run/step-000002"), state)
        with raises("unreadable", None, "step-000002", "state.json"):
            RunFolder(Path("o-run")).resume_point()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda s: s.pop("random"), ["random: ", "missing", "(2,)"]),
        (lambda s: s.update(more=mx.zeros(2)), ["more: ", "(2,)", "absent"]),
        (lambda s: s.update(random=mx.zeros(2)), ["random: ", "mlx.core.float32"]),
        (lambda s: s.update(random=mx.zeros(3)), ["random: ", "(3,)", "(2,)"]),
    ],
)
def test_resume_rejects_a_damaged_optimizer(trained_copy, resumed, change, names):
    file = trained_copy / "o-run" / "step-000002" / "optimizer.safetensors"
    state = mx.load(str(file))
    mx.eval(state)
    change(state)
    mx.save_safetensors(str(file), state)
    renew_hashes(file.parent)
    with raises("mismatch", None, "optimizer.safetensors", *names):
        resumed()


@pytest.mark.parametrize("out", [".", "/", "nope", "o-run/config.json/x"])
def test_resume_of_no_run_is_refused(trained_copy, out):
    assert isinstance(packs_train("--out", out, "--resume"), PackError)


def test_resume_takes_the_matmul_path_that_auto_chose(shared_tiny, trained_copy, monkeypatch):
    auto = replace(TRAIN, matmul_path="auto", iters=1)
    report = train_pack(shared_tiny, "d", LORA, auto, "a").report
    config = trained_copy / "a-run" / "config.json"
    identity = json.loads(config.read_text())
    assert identity["matmul_path"] == report["matmul_path"]
    identity["matmul_path"] = "transient"
    config.write_text(json.dumps(sealed(identity)))
    monkeypatch.setattr(planning, "choose_matmul_path", None)  # by which it would choose again
    report = train_pack(shared_tiny, "d", LORA, replace(auto, iters=2), "a", resume=True).report
    assert report["matmul_path"] == json.loads(config.read_text())["matmul_path"] == "transient"


def test_resume_needs_no_other_flag(small, trained_copy):
    train_pack(small, "d", LORA, replace(TRAIN, iters=1, max_grad_norm=None), "p")  # None stays
    run = RunFolder(Path("p-run"))
    then = run.read_identity()["recipe"]
    assert packs_train("--out", "p", "--resume", "--iters", "2", "-q") is None
    assert run.read_identity()["recipe"] == {**then, "iters": 2}
    assert run.latest_checkpoint().name == "step-000002"


def test_resume_flags_and_files_override_what_the_run_was_told(trained_copy):
    (trained_copy / "c.yaml").write_text("out: o\nlora_parameters: {rank: 4, scale: 2.0}")
    check(packs_train("-c", "c.yaml", "--resume"), "mismatch", "alpha", "None", "8.0")
    error = packs_train("--out", "o", "--resume", "--learning-rate", "2e-3")
    check(error, "mismatch", "learning_rate", "0.001", "0.002")


def test_resume_may_recompute_otherwise_unless_there_is_dropout(small, trained_copy):
    other = replace(LONGER, recompute="block")
    train_pack(small, "d", LORA, other, "o", resume=True)
    dropping = replace(LORA, dropout=0.1)
    train_pack(small, "d", dropping, TRAIN, "p")
    with raises("mismatch", "recompute", "'auto'", "'block'"):
        train_pack(small, "d", dropping, other, "p", resume=True)


def test_resume_names_the_file_whose_recipe_is_damaged(trained_copy):
    file = trained_copy / "o-run" / "config.json"
    identity = json.loads(file.read_text())
    identity["recipe"]["rank"] = "x"
    file.write_text(json.dumps(sealed(identity)))
    error = packs_train("--out", "o", "--resume")
    check(error, "invalid", "rank", "o-run/config.json: rank: ")


def test_peak_of_a_resumed_run_is_that_of_all_its_batches(trained_copy, resumed):
    file = RunFolder(Path("o-run")).latest_checkpoint() / "state.json"
    state = json.loads(file.read_text())
    assert state["peak_gb"] > 0
    file.write_text(json.dumps(sealed(state | {"peak_gb": 5.0})))
    assert resumed().report["peak_gb"] == 5.0


def test_read_metrics_keeps_what_happened(tmp_path):
    lines = [
        {"batch": 1, "loss": 2.0},
        {"batch": 2, "micro_batches": 2, "memory_pressure": "macOS: memory pressure"},
        {"batch": 3, "fault": "loss nan", "action": "skip", "in_a_row": 1, "rows": ["a:1", "a:2"]},
    ]
    damaged = ['{"batch": 2, "loss": "2', '{"batch": 3, "loss": "x"}', '["batch"]']
    text = "\n".join([*map(json.dumps, lines), *damaged])
    (tmp_path / "metrics.jsonl").write_text(text)
    assert RunFolder(tmp_path).metrics_until(3) == lines
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == list(map(json.dumps, lines))


def test_start_from_adapters_is_recorded_and_resumable(small, trained, tmp_path):
    start = trained / "o" / "adapters.safetensors"
    arguments = {"resume_adapter_file": str(trained / "o")}  # a pack, or its file
    run = train_pack(small, trained / "d", LORA, TRAIN, tmp_path / "p", **arguments)
    recorded = {"name": "adapters.safetensors", "sha256": sha256(start)}
    assert run.pack.manifest["recipe"]["resume_adapter_file"] == recorded
    earlier = Pack.open(trained / "o").manifest["eval"]["ppl_after"]
    assert run.report["ppl_before"] == pytest.approx(earlier, rel=1e-5)
    with raises("conflict", "resume_adapter_file"):
        train_pack(small, trained / "d", LORA, TRAIN, tmp_path / "p", resume=True, **arguments)
    error = packs_train("--out", tmp_path / "p", "--resume", "--resume-adapter-file", start)
    check(error, "conflict", "resume_adapter_file")
    assert packs_train("--out", tmp_path / "p", "--resume", "--iters", "3", "-q") is None
    manifest = json.loads((tmp_path / "p" / "pack.json").read_text())
    assert manifest["recipe"]["resume_adapter_file"] == recorded
    assert manifest["eval"]["ppl_before"] == run.report["ppl_before"]


def test_concurrent_runs_take_different_names(here):
    args = None, DataConfig(), False, False
    with output_folders(*args) as first, output_folders(*args) as second:
        assert [folder.name for folder, _ in (first, second)] == ["tiny", "tiny-2"]
        assert first[1].is_dir() and second[1].is_dir()
    with pytest.raises(KeyboardInterrupt), output_folders("a/b/c", *args[1:]):
        raise KeyboardInterrupt
    assert not list(here.iterdir())


@pytest.mark.parametrize("flags", ["--resume", "--overwrite"])
def test_a_run_that_another_process_is_at_is_refused(trained_copy, trained, flags, run):
    kept = sorted((trained_copy / "o-run").iterdir())
    with exclusive_writer(Path("o-run")):
        code, _, err = run("train", "-q", "--out", "o", "--iters", "4", flags)
    assert code == 2 and len(err.splitlines()) == 1
    check(run.error, "busy", None, "o-run: ")
    assert sorted((trained_copy / "o-run").iterdir()) == kept


def test_a_run_that_is_saving_its_first_checkpoint_is_busy(trained_copy, rejected):
    RunFolder(Path("o-run")).clear()
    with exclusive_writer(Path("o-run")):
        check(rejected("train", "--out", "o", "--resume"), "busy", "resume", "o-run", "Wait")
    error = rejected("train", "--out", "o", "--resume")
    check(error, "not-found", "resume", "o-run", "--overwrite")
