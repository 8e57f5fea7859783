"""What a notebook shows of a run and its pack."""

from dataclasses import replace

import pytest

from mlx_packs import Observer, train_pack
from mlx_packs.training import fit
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN, Lines


class Losses(Observer):
    """The loss of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, line: dict) -> None:
        self.seen.append(line["loss"])


def test_a_run_is_shown_in_one_line_and_its_report_begins_with_the_result(small, tmp_path):
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    run = train_pack(small, data, LORA, TRAIN, tmp_path / "p", progress=False)
    assert len(repr(run)) < 300 and "PPL" in repr(run) and "2 updates" in repr(run)
    assert repr(run.pack) in repr(run)
    assert run.report["sample"]["wanted"] == CHATS[0]["messages"][1]["content"]

    losses = [line["loss"] for line in run.curve if "loss" in line]
    keys = list(run.to_json())
    assert keys[:2] == ["pack", "run"] and keys[-1] == "versions"
    first = ["steps", "batches", "first_loss", "last_loss", "ppl_before", "ppl_after"]
    assert [key for key in keys if key in first] == first
    assert len(losses) == 2
    assert [run.report["first_loss"], run.report["last_loss"]] == losses
    assert run.report["versions"] == run.pack.manifest["versions"]
    assert {"mlx", "device"} <= set(run.report["versions"])


def test_a_run_from_python_shows_its_progress_unless_told_otherwise(small, tmp_path, capsys):
    train_pack(small, CHATS, LORA, TRAIN, tmp_path / "silent", progress=False)
    assert capsys.readouterr() == ("", "")
    train_pack(small, CHATS, LORA, TRAIN, tmp_path / "p")
    shown = capsys.readouterr()
    assert shown.out == "" and "plan " in shown.err and "data " in shown.err


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_first_loss_of_a_slow_base_is_shown_before_its_gradient(
    small, tmp_path, monkeypatch, accumulated
):
    monkeypatch.setattr(fit, "_LONG_S", 0)
    display, losses = Lines(), Losses()
    config = replace(TRAIN, grad_accumulation_steps=accumulated)
    train_pack(small, CHATS, LORA, config, tmp_path / "p", display=display, callbacks=[losses])
    shown = [line for line in display.lines if line.startswith("train first loss")]
    assert shown == [f"train first loss {losses.seen[0]:.3f}"]


def test_the_first_loss_of_a_fast_base_has_no_line_of_its_own(small, tmp_path):
    display = Lines()
    train_pack(small, CHATS, LORA, TRAIN, tmp_path / "pack", display=display)
    assert not [line for line in display.lines if "first loss" in line]
