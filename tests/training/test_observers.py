"""Observers of a run: what each is told, retention of checkpoints, experiment trackers."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from mlx_lm.tuner import callbacks

from mlx_packs import TrainConfig, train_pack
from mlx_packs.display import QUIET, Display
from mlx_packs.errors import PackError
from mlx_packs.training.observer import Observer
from mlx_packs.training.observers import trackers
from mlx_packs.training.observers.run_files import Retention
from mlx_packs.training.observers.trackers import check_report_to
from mlx_packs.training.run_folder import (
    best_checkpoint,
    checkpoints,
    latest_checkpoint,
    logged_metrics,
)
from mlx_packs.training.state import TrainingState
from tests.helpers.errors import raises
from tests.helpers.observers import observe
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA

SETTINGS = {
    **{"batch_size": 2, "max_seq_length": 64, "matmul_path": "dense", "save_every": 1},
    **{"steps_per_report": 2, "steps_per_eval": 2, "lr_schedule": "constant"},
    "test_batches": 1,
}


@pytest.fixture
def train_observed(small, tmp_path):
    """Train for some batches; the run folder."""
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:1])

    def run(iters: int, resume: bool = False, report_to: str | None = None, **settings) -> Path:
        options = {"resume": resume, "report_to": report_to}
        config = TrainConfig(iters=iters, **{**SETTINGS, **settings})
        return train_pack(small, data, LORA, config, tmp_path / "p", **options).run

    return run


def names(run: Path) -> list[str]:
    return [folder.name for folder in checkpoints(run)]


def test_keep_last_leaves_the_newest_checkpoints_and_the_best(train_observed, tmp_path):
    run = train_observed(5, keep_last=2, steps_per_eval=2)
    best = best_checkpoint(run)
    assert best.name in ("step-000002", "step-000004")
    assert names(run) == sorted({best.name, "step-000004", "step-000005"})
    assert latest_checkpoint(run).name == "step-000005"
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    resumed = names(train_observed(7, resume=True, keep_last=1, steps_per_eval=2))
    assert resumed == sorted({best_checkpoint(run).name, "step-000007"})
    all_kept = names(train_observed(8, resume=True, keep_last=-1, steps_per_eval=2))
    assert all_kept == [*resumed, "step-000008"]


def test_three_checkpoints_are_kept_by_default(train_observed):
    run = train_observed(5, val_batches=0)
    assert names(run) == ["step-000003", "step-000004", "step-000005"]
    assert best_checkpoint(run) is None


@pytest.mark.parametrize("keep_last", [0, -2])
def test_keep_last_is_at_least_one_or_all(keep_last):
    with raises("invalid", "keep_last", str(keep_last)):
        TrainConfig(keep_last=keep_last)


def write_states(folder: Path, losses: dict[int, float | None]) -> dict[int, Path]:
    """Write checkpoints that have a state alone, with these validation losses."""
    folders = {}
    for batches, loss in losses.items():
        folders[batches] = folder / f"step-{batches:06d}"
        folders[batches].mkdir()
        state = TrainingState(batches, train_s=1.0, valid_loss=loss)
        (folders[batches] / "state.json").write_text(json.dumps(asdict(state)))
    return folders


def test_retention_removes_checkpoints_of_the_run_alone(tmp_path):
    batches = (7, 8, 9, 999_999, 1_000_000, 1_000_001)
    folders = write_states(tmp_path, dict.fromkeys(batches))
    for foreign in ("step-1", "step-by-step", "notes"):
        (tmp_path / foreign).mkdir()
    assert checkpoints(tmp_path) == list(folders.values())
    Retention(tmp_path, 2, Display(QUIET)).on_checkpoint(folders[1_000_000])
    assert checkpoints(tmp_path) == [folders[999_999], folders[1_000_000]]
    assert {"step-1", "step-by-step", "notes"} <= {path.name for path in tmp_path.iterdir()}


def test_a_resumed_run_removes_what_a_killed_one_left(tmp_path):
    folders = write_states(tmp_path, dict.fromkeys((2, 4, 6, 8)))
    (folders[8] / "state.json").write_text("{}")  # damaged: the run continues at 6
    retention = Retention(tmp_path, 2, Display(QUIET), resumed=folders[6])
    retention.on_phase_start(10, 6)
    assert checkpoints(tmp_path) == [folders[4], folders[6], folders[8]]
    retention.on_phase_start(10, 0)  # of the next phase
    assert checkpoints(tmp_path) == [folders[4], folders[6], folders[8]]


def test_the_best_checkpoint_is_of_the_phase(tmp_path):
    losses = {2: 1.0, 3: None, 4: 3.0, 6: 2.0, 8: 2.0, 9: 2.5}
    folders = write_states(tmp_path, losses)
    assert best_checkpoint(tmp_path) == folders[2]
    assert best_checkpoint(tmp_path, after=3) == folders[6]  # the earlier of two
    assert best_checkpoint(tmp_path, after=9) is None
    (folders[2] / "state.json").write_text("{}")
    assert best_checkpoint(tmp_path) == folders[6]
    retention = Retention(tmp_path, 1, Display(QUIET), starts=(0, 7))
    retention.on_checkpoint(folders[9])
    assert checkpoints(tmp_path) == [folders[8], folders[9]]


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


def test_trackers_get_metrics_under_mlx_lms_names(train_observed, monkeypatch):
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
    run = train_observed(4, report_to="wandb")
    lines = logged_metrics(run)
    result, *events = calls
    assert result == ("made", "p-run", str(run), 2)
    assert [kind for kind, _ in events] == ["train", "valid", "train"]
    for (kind, info), line in zip(events, lines, strict=True):
        if kind == "valid":
            assert info.pop("val_time") > 0
            measured = ("loss", "ppl", "accuracy")
            scores = {f"val_{name}": line[f"valid_{name}"] for name in measured}
            assert info == {"iteration": 2, **scores}
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


class Writer:
    """tensorboardX's writer, which keeps what it is told."""

    made: list["Writer"] = []

    def __init__(self, folder):
        self.folder, self.scalars, self.closed = folder, {}, False
        Writer.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def flush(self):
        assert not self.closed

    def close(self):
        self.closed = True


def test_tensorboard_and_trackio_get_every_report(train_observed, monkeypatch):
    calls = []
    trackio = ModuleType("trackio")
    trackio.init = lambda **settings: print("init") or calls.append(settings)
    trackio.log = lambda values, step: calls.append((step, values))
    trackio.finish = lambda: calls.append("finished")
    board = ModuleType("tensorboardX")
    board.SummaryWriter = Writer
    for module in (trackio, board):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(trackers, "_is_installed", lambda name: True)
    monkeypatch.setattr(Writer, "made", [])
    run = train_observed(4, report_to="TensorBoard, trackio")
    lines = logged_metrics(run)
    (writer,) = Writer.made
    assert writer.folder == str(run / "tensorboard") and writer.closed
    assert writer.scalars["valid/val_loss", 2] == lines[1]["valid_loss"]
    assert writer.scalars["train/train_loss", 4] == lines[2]["loss"]
    begun, first, valid, last, end = calls
    assert (begun["project"], begun["name"], begun["config"]["rank"]) == ("p-run", "p-run", 2)
    assert [step for step, _ in (first, valid, last)] == [2, 2, 4] and end == "finished"
    assert last[1]["train_loss"] == lines[2]["loss"] and "iteration" not in last[1]


@pytest.mark.parametrize("name", trackers.PACKAGES)
def test_a_tracker_that_is_absent_is_named_with_its_command(name, monkeypatch):
    monkeypatch.setattr(trackers, "_is_installed", lambda asked: asked != name)
    with raises("dependency", "report_to", f"`pip install {trackers.PACKAGES[name]}`"):
        check_report_to(",".join(trackers.PACKAGES), None)


@pytest.mark.interop
def test_tensorboard_reads_what_a_run_wrote(train_observed):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    run = train_observed(4, report_to="tensorboard")
    (file,) = (run / "tensorboard").iterdir()
    content, values = file.read_bytes(), {}
    while content:  # length, its checksum, an event, its checksum
        size = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + size])
        values |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        content = content[16 + size :]
    lines = logged_metrics(run)
    assert values["train/train_loss", 4] == pytest.approx(lines[2]["loss"])
    assert values["valid/val_loss", 2] == pytest.approx(lines[1]["valid_loss"])
