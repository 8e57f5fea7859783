"""Damaged run folders: the newest checkpoint that is not damaged is taken, and the log says which."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs import train_pack
from mlx_packs.reading import sha256, without_seal
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.state import read_training_state
from tests.helpers.damage import flip_bit
from tests.helpers.errors import raises
from tests.helpers.runs import LORA, TRAIN, Lines

RUN = Path("o-run")
LONGER = replace(TRAIN, iters=3)
FILES = ("adapters.safetensors", "optimizer.safetensors", "state.json")


def hashes(out: Path) -> list[str]:
    """Of the pack's adapters and of the last optimizer."""
    last = out.with_name(f"{out.name}-run") / "step-000003"
    return [sha256(file) for file in (out / FILES[0], last / FILES[1])]


@pytest.fixture(scope="module")
def uninterrupted(small, trained, tmp_path_factory) -> list[str]:
    """Hashes after three batches in one go."""
    out = tmp_path_factory.mktemp("uninterrupted") / "o"
    train_pack(small, trained / "d", LORA, LONGER, out)
    return hashes(out)


@pytest.fixture
def resumed(small, trained_copy):
    """Resume the copied run to its third batch; its lines on the terminal, and its pack."""

    def resume():
        display = Lines()
        train_pack(small, "d", LORA, LONGER, "o", resume=True, progress=display)
        return [line for line in display.lines if line.startswith(("resume", "note"))]

    return resume


def flip_last(file: Path) -> None:
    flip_bit(file, 8 * (file.stat().st_size - 3))


def test_a_kill_after_the_first_checkpoint_can_be_resumed(trained_copy, resumed, uninterrupted):
    shutil.rmtree(RUN / "step-000002")  # nothing else names a checkpoint
    files = "config.json metrics.jsonl report.html report.json status.json"
    names = {"step-000001", *files.split()}
    assert {path.name for path in RUN.iterdir()} == names
    assert "step-000001, the newest checkpoint" in resumed()[0]
    assert hashes(Path("o")) == uninterrupted


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_last, Path.unlink, lambda file: os.truncate(file, 9)])
def test_a_damaged_newest_checkpoint_is_passed_over(trained_copy, name, damage):
    damage(RUN / "step-000002" / name)
    point = RunFolder(RUN).resume_point()
    assert point.folder.name == "step-000001"
    (fault,) = point.damaged
    assert fault.startswith(f"{RUN / 'step-000002'}") and name in fault and "\n" not in fault


def test_a_run_resumes_from_before_a_damaged_checkpoint(resumed, uninterrupted):
    flip_last(RUN / "step-000002" / "adapters.safetensors")
    note, line = resumed()
    assert note.startswith("note o-run/step-000002: ") and "adapters.safetensors" in note
    assert line == "resume o-run: batch 1 of 3 (step-000001, the newest that is not damaged)"
    assert hashes(Path("o")) == uninterrupted


def test_a_changed_counter_is_noticed(trained_copy):
    file = RUN / "step-000002" / "state.json"
    state = json.loads(file.read_text())
    for key, value in (("updates", 3), ("batches", 9), ("trained_tokens", 1)):
        file.write_text(json.dumps({**state, key: value}))
        assert RunFolder(RUN).latest_checkpoint().name == "step-000001"
    file.write_text(json.dumps(state))  # another layout is harmless
    assert RunFolder(RUN).latest_checkpoint().name == "step-000002"


def test_a_checkpoint_under_another_name_or_without_hashes_is_not_taken(trained_copy):
    shutil.copytree(RUN / "step-000001", RUN / "step-000007")
    assert RunFolder(RUN).resume_point().folder.name == "step-000002"
    file = RUN / "step-000002" / "state.json"
    file.write_text(json.dumps(without_seal(json.loads(file.read_text()))))
    assert RunFolder(RUN).resume_point().folder.name == "step-000001"


def test_all_checkpoints_damaged_is_one_error(trained_copy, resumed):
    for folder in RunFolder(RUN).checkpoints():
        flip_last(folder / "adapters.safetensors")
    with raises("unreadable", "resume", "step-000002", "adapters.safetensors", "--overwrite"):
        resumed()


def test_a_damaged_later_checkpoint_confuses_no_later_resume(trained_copy, resumed, uninterrupted):
    shutil.copytree(RUN / "step-000002", RUN / "step-000008")
    assert "step-000008" in resumed()[0]
    names = [folder.name for folder in RunFolder(RUN).checkpoints()]
    assert names == ["step-000001", "step-000002", "step-000003"]
    assert RunFolder(RUN).resume_point().folder.name == names[-1]
    assert hashes(Path("o")) == uninterrupted


def test_a_damaged_identity_is_one_line_that_saves_the_adapters(trained_copy, resumed):
    file = RUN / "config.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with raises("unreadable", None, "config.json", "--resume-adapter-file o-run/step-000002/"):
        resumed()
    assert RunFolder(RUN).is_run()  # so that --overwrite may replace it


DAMAGED_LINES = [
    '{"batch": "1", "loss": 2.0}',
    '{"batch": 1, "loss": "high"}',
    '{"batch": 1, "held_out": {"": {"nll": "x"}}}',
    '{"batch": 1, "held_out": 3}',
    "[" * 100_000,
    '"batch"',
    "\x00\x85",
    '{"batch": 3, "loss": 9.0}',  # beyond the checkpoint
    '{"batch": 4, "lo',
]


def test_damaged_metrics_are_harmless(trained_copy, resumed, uninterrupted):
    with (RUN / "metrics.jsonl").open("a") as f:
        f.writelines(line + "\n" for line in DAMAGED_LINES)
    resumed()
    assert hashes(Path("o")) == uninterrupted
    lines = [json.loads(text) for text in (RUN / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == [1, 2, 3] and lines[-1]["loss"] != 9.0


def test_the_validation_loss_is_that_of_these_weights(small, trained, tmp_path):
    train = replace(TRAIN, iters=4, steps_per_eval=2, keep_last=-1)
    run = train_pack(small, trained / "d", LORA, train, tmp_path / "p").run
    losses = [read_training_state(folder).valid_loss for folder in RunFolder(run).checkpoints()]
    (valid,) = [line["valid_loss"] for line in RunFolder(run).metrics() if "valid_loss" in line]
    assert losses == [None, valid, None, None]
