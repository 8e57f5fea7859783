"""Observers of a run: what each is told, retention of checkpoints, experiment trackers."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from mlx_lm.tuner import callbacks

from mlx_packs import TrainConfig, train_pack
from mlx_packs.display import QUIET, Display
from mlx_packs.errors import PackError
from mlx_packs.training.observers.observer import Observer
from mlx_packs.training.observers.retention import Retention
from mlx_packs.training.run_folder import checkpoints, latest_checkpoint
from tests.helpers.errors import check, raises
from tests.helpers.observers import observe
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA

SETTINGS = {
    **{"batch_size": 2, "max_seq_length": 64, "matmul_path": "dense", "save_every": 1},
    **{"steps_per_report": 2, "steps_per_eval": 2, "lr_schedule": "constant"},
}


@pytest.fixture
def train_observed(tmp_path):
    """Train for some batches; the run folder."""
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])

    def run(iters: int, resume: bool = False, **settings) -> Path:
        config = TrainConfig(iters=iters, **{**SETTINGS, **settings})
        return train_pack("tiny", data, LORA, config, tmp_path / "p", resume=resume).run

    return run


def names(run: Path) -> list[str]:
    return [folder.name for folder in checkpoints(run)]


def test_keep_last_leaves_the_newest_checkpoints(train_observed, tmp_path):
    run = train_observed(4, keep_last=2)
    assert names(run) == ["step-000003", "step-000004"]
    assert latest_checkpoint(run).name == "step-000004"
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    assert names(train_observed(5, resume=True, keep_last=2)) == ["step-000004", "step-000005"]
    assert names(train_observed(6, resume=True, keep_last=None)) == [
        f"step-{n:06d}" for n in (4, 5, 6)
    ]


def test_all_checkpoints_are_kept_by_default(train_observed):
    assert TrainConfig().keep_last is None
    assert names(train_observed(3)) == ["step-000001", "step-000002", "step-000003"]


def test_keep_last_is_at_least_one(run):
    with raises("invalid", "keep_last", "0"):
        TrainConfig(keep_last=0)
    assert run("train", "--keep-last", 0)[0] == 2
    check(run.error, "invalid", "keep_last")


def test_retention_removes_older_checkpoints_of_the_run_alone(tmp_path):
    batches = (7, 8, 9, 999_999, 1_000_000, 1_000_001)
    folders = {n: tmp_path / f"step-{n:06d}" for n in batches}
    for folder in folders.values():
        folder.mkdir()
    for foreign in ("step-1", "step-by-step", "notes"):
        (tmp_path / foreign).mkdir()
    assert checkpoints(tmp_path) == list(folders.values())
    Retention(tmp_path, 2, Display(QUIET)).on_checkpoint(folders[9])  # the later ones are replaced
    assert checkpoints(tmp_path) == [folders[n] for n in batches[1:]]
    Retention(tmp_path, 1, Display(QUIET)).on_checkpoint(folders[1_000_000])
    assert checkpoints(tmp_path) == [folders[1_000_000], folders[1_000_001]]
    assert {"step-1", "step-by-step", "notes"} <= {path.name for path in tmp_path.iterdir()}


def test_a_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, monkeypatch):
    for n in (1, 2):
        (tmp_path / f"step-{n:06d}").mkdir()
    lines = []
    display = Display(QUIET)
    monkeypatch.setattr(display, "line", lambda label, text: lines.append(text))

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", denied)
        Retention(tmp_path, 1, display).on_checkpoint(tmp_path / "step-000002")
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert len(lines) == 1 and "step-000001" in lines[0]


def test_observers_are_told_of_every_event_in_order(train_observed, monkeypatch):
    events = []

    def record(name):
        def method(*args):
            events.append((name, args[0]["batch"] if args and isinstance(args[0], dict) else None))

        return method

    methods = [name for name in vars(Observer) if name.startswith("on_") and name != "on_end"]
    reports = []
    observe(monkeypatch, on_end=reports.append, **{name: record(name) for name in methods})
    run = train_observed(3)
    assert events == [
        ("on_phase_start", None),
        ("on_step", 1),
        ("on_checkpoint", None),
        ("on_step", 2),
        ("on_report", 2),
        ("on_validation", 2),
        ("on_checkpoint", None),
        ("on_step", 3),
        ("on_report", 3),
        ("on_checkpoint", None),
        ("on_phase_end", None),
    ]
    assert [report["run"] for report in reports] == [str(run)]


def test_the_progress_bar_is_closed_when_a_run_breaks_off(train_observed, monkeypatch):
    ended = []

    def fail(line):
        raise PackError("now")

    observe(monkeypatch, on_step=fail, on_phase_end=lambda: ended.append(True))
    with raises("invalid", None, "now"):
        train_observed(2)
    assert ended == [True]


def test_trackers_get_metrics_under_mlx_lms_names(tmp_path, monkeypatch):
    calls = []

    class Recorder(callbacks.TrainingCallback):
        def __init__(self, project_name, log_dir, config, wrapped_callback=None):
            calls.append(("made", project_name, log_dir, config["rank"]))

        def on_train_loss_report(self, info):
            calls.append(("train", info))

        def on_val_loss_report(self, info):
            calls.append(("valid", info))

    monkeypatch.setitem(callbacks.SUPPORT_CALLBACK, "wandb", Recorder)
    monkeypatch.setattr(callbacks, "wandb", ModuleType("wandb"))
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    config = TrainConfig(iters=4, **SETTINGS)
    run = train_pack("tiny", data, LORA, config, tmp_path / "p", report_to="wandb").run
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result, *events = calls
    assert result == ("made", "p-run", str(run), 2)
    assert [kind for kind, _ in events] == ["train", "valid", "train"]
    for (kind, info), line in zip(events, lines, strict=True):
        if kind == "valid":
            assert info.pop("val_time") > 0
            assert info == {"iteration": 2, "val_loss": line["valid_loss"]}
            continue
        assert info.pop("iterations_per_second") > 0
        assert info == {
            "iteration": line["batch"],
            "train_loss": line["loss"],
            "learning_rate": line["learning_rate"],
            "tokens_per_second": line["tokens_per_s"],
            "trained_tokens": line["trained_tokens"],
            "peak_memory": line["peak_gb"],
        }
