"""What a notebook shows of a run and its pack."""

from mlx_packs import train_pack
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN


def test_a_pack_and_a_run_are_shown_in_one_line(tmp_path):
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    run = train_pack("tiny", data, LORA, TRAIN, tmp_path / "p")
    assert len(repr(run)) < 300 and "PPL" in repr(run) and "2 updates" in repr(run)
    assert repr(run.pack) in repr(run)
    assert run.report["sample"]["wanted"] == CHATS[0]["messages"][1]["content"]


def test_a_run_from_python_shows_its_progress_unless_told_otherwise(tmp_path, capsys):
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    train_pack("tiny", data, LORA, TRAIN, tmp_path / "silent", progress=False)
    assert capsys.readouterr() == ("", "")
    train_pack("tiny", data, LORA, TRAIN, tmp_path / "p")
    shown = capsys.readouterr()
    assert shown.out == "" and "plan " in shown.err and "data " in shown.err


def test_a_report_begins_with_the_result_and_has_losses_and_versions(tmp_path):
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:2])
    run = train_pack("tiny", data, LORA, TRAIN, tmp_path / "p", progress=False)
    losses = [line["loss"] for line in run.curve if "loss" in line]
    keys = list(run.to_json())
    assert keys[:2] == ["pack", "run"] and keys[-1] == "versions"
    first = ["steps", "batches", "first_loss", "last_loss", "ppl_before", "ppl_after"]
    assert [key for key in keys if key in first] == first
    assert len(losses) == 2
    assert [run.report["first_loss"], run.report["last_loss"]] == losses
    assert run.report["versions"] == run.pack.manifest["versions"]
    assert {"mlx", "device"} <= set(run.report["versions"])
