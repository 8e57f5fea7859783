"""What a notebook shows of a run and its pack."""

from tests.training.conftest import ROWS


def test_a_run_is_shown_in_one_line_and_its_report_begins_with_the_result(train):
    run = train(test_batches=1)
    assert len(repr(run)) < 300 and "PPL" in repr(run) and "2 updates" in repr(run)
    assert repr(run.pack) in repr(run)
    assert run.report["sample"]["wanted"] == ROWS[0]["messages"][1]["content"]

    keys = list(run.to_json())
    assert keys[:2] == ["pack", "run"] and keys[-1] == "versions"
    first = ["steps", "batches", "first_loss", "last_loss", "ppl_before", "ppl_after"]
    assert [key for key in keys if key in first] == first
    losses = [line["loss"] for line in run.curve if "loss" in line]
    assert [run.report["first_loss"], run.report["last_loss"]] == losses
    assert run.report["versions"] == run.pack.manifest["versions"]
    assert {"mlx", "device"} <= set(run.report["versions"])


def test_a_run_from_python_shows_its_progress_unless_told_otherwise(train, capsys):
    train("silent", progress=False)
    assert capsys.readouterr() == ("", "")
    train(progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "plan " in shown.err and "data " in shown.err
