"""JSONL files read row by row, and hostile ones."""

import json
import os

import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data import json_lines
from mlx_packs.data.rows import load_rows, read_rows
from tests.helpers.errors import raises

LINES = ['{"text": "a"}', "", " \t\r", '{"text": "é\u2028\x85b"}', "\r", '{"text": "c"} ']


@pytest.fixture
def file(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize("block", [1, 16, 1 << 20])
@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n\r\n"], ids=["none", "one", "two"])
def test_rows_are_lines_that_are_not_blank(file, monkeypatch, block, ending):
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(LINES).encode() + ending)
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", block)
    rows = read_rows(file)
    assert [row.value["text"] for row in rows] == ["a", "é\u2028\x85b", "c"]
    assert [row.where for row in rows] == [f"{file}:{n}" for n in (1, 4, 6)]
    assert [rows.where(i) for i in range(3)] == [row.where for row in rows]
    assert rows[-1].value == {"text": "c"} and rows[1:][0].where == f"{file}:4"


@pytest.mark.parametrize(
    ("line", "reason", "names"),
    [
        (b'{"text": ', "not JSON", ["column"]),
        (b'\xef\xbb\xbf{"text": "a"}', "not JSON", ["BOM"]),
        (b'{"text": "\xff"}', "not UTF-8", ["byte 11"]),
        (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "too deep", ["100"]),
        (b"[" * 10**5 + b"]" * 10**5, "too deep", ["100"]),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "integer too long", ["4300"]),
    ],
)
def test_hostile_line_is_one_line_with_its_place(file, line, reason, names):
    file.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    rows = read_rows(file)
    assert rows[0].value == {"text": "a"}
    with raises("unreadable", None, "rows.jsonl:3", *names) as caught:
        _ = rows[1].value
    assert caught.value.reason == reason and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"text": "a", "text": "b"}', {"text": "b"}),
        (b'{"text": "a", "n": -Infinity}', {"text": "a", "n": -float("inf")}),
        (b'{"text": "\\u0000\\u001b[31m"}', {"text": "\0\x1b[31m"}),
        (b'{"text": "' + b"[{" * 200 + b'"}', {"text": "[{" * 200}),
        (b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}", None),
    ],
)
def test_odd_line_reads_as_python_reads_it(file, line, value):
    file.write_bytes(line)
    assert read_rows(file)[0].value == (value or json.loads(line))


def test_line_that_is_too_long_is_not_read_whole(file, monkeypatch):
    monkeypatch.setattr(json_lines, "MOST_LINE_BYTES", 1 << 20)
    with file.open("wb") as f:
        f.write(b'{"text": "a"}\n{"text": "')
        f.truncate(20_000_000)  # zeros that take no room
        f.seek(0, os.SEEK_END)
        f.write(b'"}\n{"text": "b"}\n')
    rows = read_rows(file)
    assert [len(row.read.args[1]) <= (1 << 20) + 1 for row in rows] == [True] * 3
    with raises("data", None, "rows.jsonl:2", "1 MiB", "Split it"):
        _ = rows[1].value
    assert rows[2].value == {"text": "b"} and rows[2].where.endswith(":3")


def test_file_that_changes_while_it_is_read_is_an_error(file):
    file.write_bytes(b'{"text": "a"}\n' * 3)
    rows = read_rows(file)
    file.write_bytes(b'{"text": "b"}\n' * 4)
    with raises("unreadable", None, "rows.jsonl", "changed"):
        _ = rows[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_pipe_or_folder_in_place_of_a_file_is_named(tmp_path, suffix):
    pipe, folder = tmp_path / f"pipe{suffix}", tmp_path / "d" / f"train{suffix}"
    os.mkfifo(pipe)
    folder.mkdir(parents=True)
    for data, kind in ((pipe, "pipe"), (folder.parent, "folder")):
        with raises("unreadable", "data", suffix, kind):
            load_rows(DataConfig(data=str(data)))


@pytest.mark.parametrize("text", ["[" * 10**5, '[{"n": ' + "9" * 5000 + "}]", '[{"a": 1},\n{]'])
def test_hostile_json_list_is_one_line(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with raises("unreadable", None, "rows.json"):
        read_rows(tmp_path / "rows.json")
