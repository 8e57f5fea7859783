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
