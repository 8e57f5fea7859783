"""Observers of a run: what each is told, retention of checkpoints, experiment trackers."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

from mlx_lm.tuner import callbacks

from mlx_packs import TrainConfig
from mlx_packs.display import QUIET, Display
from mlx_packs.reading import sealed
from mlx_packs.training.observer import Observer
from mlx_packs.training.observers import trackers
from mlx_packs.training.observers.run_files import Retention
from mlx_packs.training.observers.trackers import check_report_to
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.state import ADAPTERS, OPTIMIZER, TrainingState
from tests.helpers.errors import raises
from tests.helpers.observers import observe
from tests.helpers.runs import Lines

EVERY_SECOND = {"steps_per_report": 2, "steps_per_eval": 2, "test_batches": 1}


def names(run: Path) -> list[str]:
    return [folder.name for folder in RunFolder(run).checkpoints()]


def test_keep_last_leaves_the_newest_checkpoints_and_the_best(train):
    run = train(iters=5, keep_last=2, steps_per_eval=2).run
    best = RunFolder(run).best_checkpoint().name
    assert best in ("step-000002", "step-000004")
    assert names(run) == sorted({best, "step-000004", "step-000005"})
    assert TrainConfig().keep_last == 3
    for wrong in (0, -2):
        with raises("invalid", "keep_last", str(wrong)):
            TrainConfig(keep_last=wrong)
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    resumed = names(train(iters=7, resume=True, keep_last=1, steps_per_eval=2).run)
    assert resumed == sorted({RunFolder(run).best_checkpoint().name, "step-000007"})
    all_kept = names(train(iters=8, resume=True, keep_last=-1, steps_per_eval=2).run)
    assert all_kept == [*resumed, "step-000008"]


def write_states(folder: Path, losses: dict[int, float | None]) -> dict[int, Path]:
    """Write checkpoints that have a state alone, with these validation losses."""
    folders = {}
    for batches, loss in losses.items():
        folders[batches] = folder / f"step-{batches:06d}"
        folders[batches].mkdir()
        state = asdict(TrainingState(batches, train_s=1.0, valid_loss=loss))
        facts = {name: {"bytes": 0, "sha256": ""} for name in (ADAPTERS, OPTIMIZER)}
        (folders[batches] / "state.json").write_text(json.dumps(sealed({**state, "files": facts})))
    return folders


def test_retention_removes_checkpoints_of_the_run_alone(tmp_path):
    batches = (7, 8, 9, 999_999, 1_000_000, 1_000_001)
    folders = write_states(tmp_path, dict.fromkeys(batches))
    for foreign in ("step-1", "step-by-step", "notes"):
        (tmp_path / foreign).mkdir()
    assert RunFolder(tmp_path).checkpoints() == list(folders.values())
    Retention(tmp_path, 2, Display(QUIET)).on_checkpoint(folders[1_000_000])
    assert RunFolder(tmp_path).checkpoints() == [folders[999_999], folders[1_000_000]]
    assert {"step-1", "step-by-step", "notes"} <= {path.name for path in tmp_path.iterdir()}


def test_the_best_checkpoint_is_of_the_phase(tmp_path):
    losses = {2: 1.0, 3: None, 4: 3.0, 6: 2.0, 8: 2.0, 9: 2.5}
    folders = write_states(tmp_path, losses)
    assert RunFolder(tmp_path).best_checkpoint() == folders[2]
    assert RunFolder(tmp_path).best_checkpoint(after=3) == folders[6]  # the earlier of two
    assert RunFolder(tmp_path).best_checkpoint(after=9) is None
    (folders[2] / "state.json").write_text("{}")
    assert RunFolder(tmp_path).best_checkpoint() == folders[6]
    retention = Retention(tmp_path, 1, Display(QUIET), starts=(0, 7))
    retention.on_checkpoint(folders[9])
    assert RunFolder(tmp_path).checkpoints() == [folders[8], folders[9]]


def test_a_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, monkeypatch):
    for n in (1, 2):
        (tmp_path / f"step-{n:06d}").mkdir()
    display = Lines()

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", denied)
        Retention(tmp_path, 1, display).on_checkpoint(tmp_path / "step-000002")
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert len(display.lines) == 1 and "step-000001" in display.lines[0]


def test_observers_are_told_of_every_event_in_order(train, monkeypatch):
    events = []

    def record(name):
        def method(*args):
            events.append((name, args[0]["batch"] if args and isinstance(args[0], dict) else None))

        return method

    methods = [name for name in vars(Observer) if name.startswith("on_") and name != "on_end"]
    reports = []
    observe(monkeypatch, on_end=reports.append, **{name: record(name) for name in methods})
    run = train(iters=3, **EVERY_SECOND).run
    first = [("on_phase_start", None), ("on_step", 1), ("on_checkpoint", None)]
    second = [("on_step", 2), ("on_report", 2), ("on_validation", 2), ("on_checkpoint", None)]
    third = [("on_step", 3), ("on_report", 3), ("on_checkpoint", None), ("on_phase_end", None)]
    assert events == [*first, *second, *third]
    assert [report["run"] for report in reports] == [str(run)]


def test_trackers_get_every_report_under_mlx_lms_names(train, monkeypatch):
    made, board = Mock(), Mock()
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    monkeypatch.setattr(trackers, "_is_installed", lambda name: True)
    monkeypatch.setitem(callbacks.SUPPORT_CALLBACK, "wandb", made)
    monkeypatch.setattr(callbacks, "wandb", ModuleType("wandb"))
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    run = train(iters=4, report_to="wandb,TensorBoard", **EVERY_SECOND).run
    first, valid, last = RunFolder(run).metrics()

    arguments = made.call_args.kwargs
    assert (arguments["project_name"], arguments["log_dir"]) == ("p-run", str(run))
    assert arguments["config"]["rank"] == 2
    callback = made.return_value
    for call, line in zip(callback.on_train_loss_report.mock_calls, (first, last), strict=True):
        (info,) = call.args
        assert info.pop("iterations_per_second") > 0
        assert info == {
            "iteration": line["batch"],
            "train_loss": line["loss"],
            "learning_rate": line["learning_rate"],
            "tokens_per_second": line["tokens_per_s"],
            "trained_tokens": line["trained_tokens"],
            "peak_memory": line["peak_gb"],
        }
    ((info,),) = (call.args for call in callback.on_val_loss_report.mock_calls)
    assert info.pop("val_time") > 0
    scores = {f"val_{name}": valid[f"valid_{name}"] for name in ("loss", "ppl", "accuracy")}
    assert info == {"iteration": 2, **scores}

    board.SummaryWriter.assert_called_once_with(str(run / "tensorboard"))
    writer = board.SummaryWriter.return_value
    writer.add_scalar.assert_any_call("valid/val_loss", valid["valid_loss"], 2)
    writer.add_scalar.assert_any_call("train/train_loss", last["loss"], 4)
    writer.close.assert_called_once_with()


def test_a_tracker_that_is_absent_is_named_with_its_command(monkeypatch):
    for name, package in trackers.PACKAGES.items():
        monkeypatch.setattr(trackers, "_is_installed", lambda asked, name=name: asked != name)
        with raises("dependency", "report_to", f"`pip install {package}`"):
            check_report_to(",".join(trackers.PACKAGES), None)
