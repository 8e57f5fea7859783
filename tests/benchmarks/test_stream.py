"""Shards streamed through kills: every row once, in the same order."""

import pytest

from benchmarks import stream
from mlx_packs.data.rows import read_rows


def test_shards_have_about_so_many_tokens(tmp_path):
    stream.write_shards(tmp_path, 3000, 3, "chats")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"train-0000{i}-of-00003.jsonl" for i in range(3)]
    assert len({str(row.value) for file in files for row in read_rows(file)}) > 15  # no two alike


@pytest.mark.nightly  # 40 s: two processes that tokenize have two parts of 4 MB each
def test_every_row_is_seen_once_in_the_same_order_after_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    stream.write_shards(tmp_path / "shards", 6e6, 4, "chats")
    result = stream.check(tmp_path, tmp_path / "shards", 2)
    assert result["kills"] == 3 and result["peak_rss_mb"] < result["rss_before_mb"] + 120
