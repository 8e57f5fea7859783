"""Run folders: only ours are replaced, a damaged one is a one-line error, and resuming continues."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mlx_packs import Pack, train_pack
from mlx_packs.config.schema import DataConfig
from mlx_packs.files import exclusive_writer
from mlx_packs.reading import sealed, sha256
from mlx_packs.runtime import mx
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
    assert left == {"config.json", "status.json", "step-by-step", "step-1", "step-000009"}
    assert RunFolder(run).is_run()


def test_checkpoints_of_a_run_without_a_pack_are_kept(small, trained_copy):
    shutil.rmtree(trained_copy / "o")
    with raises("exists", None, "-run: ", "--resume", "--overwrite"):
        train_pack(small, "d", LORA, TRAIN, "o")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda s: s.pop("random"), ["random: ", "missing", "(2,)"]),
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


@pytest.mark.parametrize(
    "wrong", [{"more": 1}, {"batches": True}, {"updates": -1}, {"train_s": float("nan")}]
)
def test_a_damaged_training_state_is_rejected(trained_copy, wrong):
    shutil.rmtree("o-run/step-000001")
    state = asdict(TrainingState(batches=2, updates=2)) | wrong
    renew_hashes(Path("o-run/step-000002"), state)
    with raises("unreadable", None, "step-000002", "state.json"):
        RunFolder(Path("o-run")).resume_point()


def test_resume_names_the_file_whose_recipe_is_damaged(trained_copy, run):
    file = trained_copy / "o-run" / "config.json"
    identity = json.loads(file.read_text())
    identity["recipe"]["rank"] = "x"
    file.write_text(json.dumps(sealed(identity)))
    run("train", "--out", "o", "--resume")
    check(run.error, "invalid", "rank", "o-run/config.json: rank: ")


def test_a_run_records_the_matmul_path_that_auto_chose(shared_tiny, trained_copy):
    auto = replace(TRAIN, matmul_path="auto", iters=1)
    report = train_pack(shared_tiny, "d", LORA, auto, "a").report
    assert RunFolder(Path("a-run")).read_identity()["matmul_path"] == report["matmul_path"]


def test_resume_needs_no_other_flag(small, trained_copy, run):
    train_pack(small, "d", LORA, replace(TRAIN, iters=1, max_grad_norm=None), "p")  # None stays
    files = RunFolder(Path("p-run"))
    then = files.read_identity()["recipe"]
    assert run("train", "--out", "p", "--resume", "--iters", 2, "-q")[0] == 0
    assert files.read_identity()["recipe"] == {**then, "iters": 2}
    assert files.latest_checkpoint().name == "step-000002"


def test_resume_flags_and_files_override_what_the_run_was_told(trained_copy, run):
    (trained_copy / "c.yaml").write_text("out: o\nlora_parameters: {rank: 4, scale: 2.0}")
    run("train", "-c", "c.yaml", "--resume")
    check(run.error, "mismatch", "alpha", "None", "8.0")
    run("train", "--out", "o", "--resume", "--learning-rate", "2e-3")
    check(run.error, "mismatch", "learning_rate", "0.001", "0.002")


def test_resume_may_recompute_otherwise_unless_there_is_dropout(small, trained_copy):
    other = replace(LONGER, recompute="block")
    train_pack(small, "d", LORA, other, "o", resume=True)
    dropping = replace(LORA, dropout=0.1)
    train_pack(small, "d", dropping, TRAIN, "p")
    with raises("mismatch", "recompute", "'auto'", "'block'"):
        train_pack(small, "d", dropping, other, "p", resume=True)


def test_peak_of_a_resumed_run_is_that_of_all_its_batches(trained_copy, resumed):
    file = RunFolder(Path("o-run")).latest_checkpoint() / "state.json"
    state = json.loads(file.read_text())
    assert state["peak_gb"] > 0
    file.write_text(json.dumps(sealed(state | {"peak_gb": 5.0})))
    assert resumed().report["peak_gb"] == 5.0


def test_start_from_adapters_is_recorded_and_resumable(small, trained, tmp_path, run):
    start = trained / "o" / "adapters.safetensors"
    arguments = {"resume_adapter_file": str(trained / "o")}  # a pack, or its file
    first = train_pack(small, trained / "d", LORA, TRAIN, tmp_path / "p", **arguments)
    recorded = {"name": "adapters.safetensors", "sha256": sha256(start)}
    assert first.pack.manifest["recipe"]["resume_adapter_file"] == recorded
    earlier = Pack.open(trained / "o").manifest["eval"]["ppl_after"]
    assert first.report["ppl_before"] == pytest.approx(earlier, rel=1e-5)
    with raises("conflict", "resume_adapter_file"):
        train_pack(small, trained / "d", LORA, TRAIN, tmp_path / "p", resume=True, **arguments)
    again = ("train", "--out", tmp_path / "p", "--resume")
    run(*again, "--resume-adapter-file", start)
    check(run.error, "conflict", "resume_adapter_file")
    assert run(*again, "--iters", 3, "-q")[0] == 0
    manifest = json.loads((tmp_path / "p" / "pack.json").read_text())
    assert manifest["recipe"]["resume_adapter_file"] == recorded
    assert manifest["eval"]["ppl_before"] == first.report["ppl_before"]


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
