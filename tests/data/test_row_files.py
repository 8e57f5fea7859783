"""Rows as people have them: Alpaca, ShareGPT, parts, tables, packed files, texts, names of splits."""

import gzip
import json
import os
from pathlib import Path

import pytest

from mlx_packs import DataConfig, TrainConfig, train_pack
from mlx_packs.cli.main import packs
from mlx_packs.data import converted
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.rows import load_rows
from mlx_packs.errors import PackError
from tests.helpers.errors import raises
from tests.helpers.row_files import FILES, QA, write
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import LORA

Q, A = QA[0]
ALPACA = {"instruction": "Answer.", "input": Q, "output": A}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))


def learned(tokenizer, rows: list, folder: Path) -> tuple[str, str]:
    """The text of the first row, and what of it is supervised."""
    splits = load_rows(DataConfig(data=str(write_rows(folder, train=rows, valid=rows))))
    example = encode(splits.rows["train"], tokenizer, DataConfig(), EncodingOptions()).items[0]
    decode = tokenizer.decode
    return decode(example.tokens.tolist()), decode(example.tokens[example.target].tolist())


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": Q, "input": "", "output": A},
        {"instruction": Q, "output": A},
        {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]},
        {"conversations": chat(Q, A)["messages"]},
        {
            "messages": [
                {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]}
                for m in chat(Q, A)["messages"]
            ]
        },
        {"prompt": chat(Q, A)["messages"][:1], "completion": chat(Q, A)["messages"][1:]},
        {"prompt": Q, "completion": chat(Q, A)["messages"][1:]},
    ],
)
def test_a_question_and_its_answer_are_one_chat(tokenizer, row, tmp_path):
    text, target = learned(tokenizer, [row] * 2, tmp_path / "a")
    expected, _ = learned(tokenizer, [chat(Q, A)] * 2, tmp_path / "b")
    assert text == expected
    assert target.strip().removesuffix("<|im_end|>") == A


def test_nothing_of_alpaca_is_dropped(tokenizer, tmp_path):
    row = {**ALPACA, "system": "Be kind.", "history": [["Hello?", "Yes."]]}
    text, target = learned(tokenizer, [row] * 2, tmp_path)
    places = [text.index(part) for part in ("Be kind.", "Hello?", "Yes.", "Answer.", Q, A)]
    assert places == sorted(places) and A in target and "Yes." not in target


def test_named_columns_that_drop_the_input_are_rejected(tokenizer, tmp_path):
    data = write_rows(tmp_path, train=[ALPACA] * 4)
    names = {"prompt_feature": "instruction", "completion_feature": "output"}
    config = DataConfig(data=str(data), **names)
    rows = load_rows(config).rows["train"]
    with raises("conflict", "prompt_feature", "train.jsonl:1", "input"):
        encode(rows, tokenizer, config, EncodingOptions())


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"conversations": []}, ["conversations"]),
        ({"conversations": [{"from": "Bob", "value": "x"}]}, ["from", "Bob", "human"]),
        ({"conversations": [{"from": "human", "value": 3}]}, ["value"]),
        ({"conversations": "x"}, ["conversations", "str"]),
        ({"instruction": 3, "output": "x"}, ["instruction"]),
        ({"instruction": "x", "input": 3, "output": "x"}, ["input"]),
        ({"instruction": "x", "output": "x", "history": [["a"]]}, ["history"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["content"]),
    ],
)
def test_what_is_none_of_these_names_its_row(tokenizer, row, names, tmp_path):
    with raises("data", None, "train.jsonl:1", *names):
        learned(tokenizer, [row] * 2, tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_its_hundred_rows(tokenizer, name, tmp_path):
    splits = load_rows(DataConfig(data=str(write(tmp_path, name))))
    rows = [*splits.rows["train"], *splits.rows["valid"]]
    assert len(rows) == (100 if name != "notes.md" else 3)
    texts = "\n".join(text for row in rows for text in splits.format.texts(row, DataConfig()))
    assert all(question in texts and answer in texts for question, answer in QA)
    assert rows[0].where.startswith(str(tmp_path / name))
    encode(rows, tokenizer, DataConfig(), EncodingOptions())


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_file_trains_a_pack(name, tmp_path, monkeypatch):
    file = write(tmp_path / "d", name)
    train = TrainConfig(iters=2, batch_size=2, matmul_path="dense", test_batches=1, val_batches=1)
    run = train_pack("tiny", str(file), LORA, train, tmp_path / "p")
    assert run.pack.manifest["data"]["rows"]["train"] >= 2
    flags = ["--iters", "2", "--batch-size", "2", "--matmul-path", "dense", "--test-batches", "1"]
    flags += ["--rank", "2", "--num-layers", "1", "--val-batches", "1"]
    command = ["train", "--data", str(file), *flags, "--out", str(tmp_path / "q")]
    packs(command, standalone_mode=False)
    assert (tmp_path / "q" / "pack.json").exists()


def test_a_spreadsheet_may_part_its_columns_by_semicolons(tmp_path):
    for number, mark in enumerate(";\t,"):
        file = tmp_path / f"{number}.csv"
        file.write_text(f'prompt{mark}completion\n"a{mark}b, c"{mark}d\ne{mark}f\n')
        splits = load_rows(DataConfig(data=str(file))).rows
        rows = [row.value for split in splits.values() for row in split]
        assert rows == [
            {"prompt": f"a{mark}b, c", "completion": "d"},
            {"prompt": "e", "completion": "f"},
        ]


def test_a_table_may_have_commas_breaks_and_quotes_in_cells(tmp_path):
    cells = 'prompt,completion\r\n"a, b","c\r\nd"\r\n"say ""x""",\xe9\r\n\r\n'
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xef\xbb\xbf" + cells.encode())
    rows = load_rows(DataConfig(data=str(file))).rows
    values = [row.value for split in rows.values() for row in split]
    assert values == [
        {"prompt": "a, b", "completion": "c\r\nd"},
        {"prompt": 'say "x"', "completion": "é"},
    ]


TSV = """prompt\tcompletion\r
"What is ""this""?"\tA "thing".\r
"He said\t5" wide\r
plain\t"Stop," she said, "now"\r
\r
""\t"\r
"""


def test_a_cell_of_a_tsv_ends_with_its_line(tmp_path):
    file = tmp_path / "t.tsv"
    file.write_bytes(TSV.encode())
    rows = load_rows(DataConfig(data=str(file), hold_out="last")).rows
    values = [(row.value["prompt"], row.value["completion"]) for s in rows.values() for row in s]
    assert values == [
        ('What is "this"?', 'A "thing".'),
        ('"He said', '5" wide'),
        ("plain", '"Stop," she said, "now"'),
        ("", '"'),
    ]


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        ('"a\nb"\tc\n', [("a\nb", "c")]),
        ('a\t"b\nc"\nx\ty\n', [("a", "b\nc"), ("x", "y")]),
        ('"a\r\n\r\nb ""c"""\t"d\ne"\r\nx\ty\r\n', [('a\r\n\r\nb "c"', "d\ne"), ("x", "y")]),
        ('"a\tb"\tc\n', [("a\tb", "c")]),
        ('a\t"b\n\nc"', [("a", "b\n\nc")]),  # the last line has no end
        ('a\t"5 inch\nb\t6"\n', [("a", '"5 inch'), ("b", '6"')]),  # two rows: quotes are text
        ('a\t"b\nx\ty\n', [("a", '"b'), ("x", "y")]),  # never closed
    ],
)
def test_a_quoted_cell_of_a_tsv_may_have_tabs_and_line_breaks(lines, rows, tmp_path):
    file = tmp_path / "t.tsv"
    file.write_bytes(f"prompt\tcompletion\n{lines}".encode())
    loaded = load_rows(DataConfig(data=str(file), hold_out="last")).rows
    values = [(row.value["prompt"], row.value["completion"]) for s in loaded.values() for row in s]
    assert values == rows


def test_a_tsv_of_one_column_reads_quoted_line_breaks(tmp_path):
    file = tmp_path / "t.tsv"
    file.write_text('text\n"one\ntwo"\n"three" and more\nfour\n')
    loaded = load_rows(DataConfig(data=str(file), hold_out="last")).rows
    texts = [row.value["text"] for s in loaded.values() for row in s]
    assert texts == ["one\ntwo", '"three" and more', "four"]


def test_a_row_of_a_tsv_with_other_cells_is_named_by_its_line(tmp_path):
    for line in ('"a\nb"\tc\td', '"a\nb', "a\tb\tc"):
        (tmp_path / "t.tsv").write_text(f'prompt\tcompletion\n"x\nz"\ty\n{line}\n')
        with raises("data", None, "t.tsv:4", "cells", "quotes"):
            load_rows(DataConfig(data=str(tmp_path / "t.tsv")))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('a,b\n1,2\n"3\n4",5\n"6,7\n8,9\n', 5),  # never closed
        ('a,b\n1,2\n3,"4\n5,"6"\n7,8\n', 3),  # closed by the next quote
        ("a,b\n1,2\n" + '3,"x\ny",z\n', 3),  # a cell too many
    ],
)
def test_a_row_that_goes_on_is_named_by_its_first_line(content, line, tmp_path):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(PackError, match=rf"t\.csv:{line}: .*quote"):
        load_rows(DataConfig(data=str(tmp_path / "t.csv")))


@pytest.mark.parametrize("name", FILES)
def test_the_case_of_an_ending_does_not_count(name, tmp_path):
    file = write(tmp_path, name)
    upper = file.rename(file.with_name(file.name.upper()))
    splits = load_rows(DataConfig(data=str(upper)))
    assert splits.rows["train"][0].where.startswith(str(upper))
    assert splits.format.texts(splits.rows["train"][0], DataConfig())
    assert load_rows(DataConfig(data=str(tmp_path))).rows["train"][0] == splits.rows["train"][0]


def test_the_case_of_names_in_a_folder_does_not_count(tmp_path):
    for name, split in (("TRAIN.TSV", "train"), ("Valid.tsv", "valid")):
        (tmp_path / name).write_text(f"text\n{split} words\n")
    rows = load_rows(DataConfig(data=str(tmp_path))).rows
    assert [rows[s][0].value["text"] for s in ("train", "valid")] == ["train words", "valid words"]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"a,b\n1,2\n1,2,3\n", [":3", "3 cells", "2"]),
        (b"a,a\n1,2\n", [":1", "once"]),
        (b'a,b\n"1,2\n', ["t.csv:"]),
        (b"a,b\n\xff,2\n", ["UTF-8"]),
    ],
)
def test_a_damaged_table_is_one_line(content, names, tmp_path):
    file = tmp_path / "t.csv"
    file.write_bytes(content)
    with pytest.raises(Exception, match="t.csv") as error:
        load_rows(DataConfig(data=str(file)))
    assert error.type.__name__ == "PackError" and all(n in str(error.value) for n in names)
    assert not list((tmp_path / "cache" / "rows").glob("*"))


def test_a_copy_is_made_once_for_a_file(tmp_path):
    file = write(tmp_path, "packed.jsonl.gz")
    load_rows(DataConfig(data=str(file)))
    (copy,) = (tmp_path / "cache" / "rows").iterdir()
    before = copy.stat().st_mtime_ns
    os.utime(copy, (0, 0))
    load_rows(DataConfig(data=str(file)))
    assert list((tmp_path / "cache" / "rows").iterdir()) == [copy]
    assert copy.stat().st_mtime_ns >= before
    file.write_bytes(gzip.compress(json.dumps({"text": "other"}).encode() + b"\n") * 3)
    assert load_rows(DataConfig(data=str(file))).rows["train"][0].value == {"text": "other"}


@pytest.mark.parametrize("name", ["packed.jsonl.gz", "table.csv"])
def test_a_copy_that_is_used_again_is_read_on(name, tmp_path):
    file = write(tmp_path, name)
    first = load_rows(DataConfig(data=str(file))).rows["train"]
    (copy,) = (tmp_path / "cache" / "rows").iterdir()
    os.utime(copy, (0, 0))
    again = load_rows(DataConfig(data=str(file))).rows["train"]
    assert [row.value for row in first] == [row.value for row in again]


def test_a_bomb_and_a_torn_file_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "_ALWAYS", 1000)
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b" " * 10_000_000))
    with raises("unreadable", None, "bomb.jsonl.gz", "bytes"):
        load_rows(DataConfig(data=str(bomb)))
    torn = write(tmp_path, "packed.jsonl.gz")
    torn.write_bytes(torn.read_bytes()[:-20])
    with raises("unreadable", None, "packed.jsonl.gz"):
        load_rows(DataConfig(data=str(torn)))


@pytest.mark.parametrize("name", ["valid", "validation", "val", "dev"])
def test_validation_rows_have_several_names(name, tmp_path):
    write_rows(tmp_path, train=[chat("a", "b")] * 3, **{name: [chat("c", "d")]})
    splits = load_rows(DataConfig(data=str(tmp_path)))
    assert (len(splits.rows["train"]), len(splits.rows["valid"])) == (3, 1)
    assert not splits.notes


def test_two_files_of_one_split_are_rejected(tmp_path):
    rows = [chat("a", "b")] * 3
    write_rows(tmp_path, train=rows, valid=rows, dev=rows)
    with raises("conflict", "data", "dev.jsonl", "valid.jsonl"):
        load_rows(DataConfig(data=str(tmp_path)))


def test_what_is_not_used_is_said(tmp_path):
    rows = [chat("a", "b")] * 3
    write_rows(tmp_path, train=rows, holdout=rows, test=rows)
    (note,) = load_rows(DataConfig(data=str(tmp_path))).notes
    assert "holdout.jsonl" in note and "validation" in note


def test_one_file_of_rows_in_a_folder_is_the_training_data(tmp_path):
    write_rows(tmp_path, my_chats=[chat("a", "b")] * 3)
    assert len(load_rows(DataConfig(data=str(tmp_path))).rows["train"]) == 2


def test_a_folder_of_texts_is_read_with_its_subfolders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.md", "sub/a.txt", ".git/c.txt"):
        (tmp_path / name).write_text("first\n\n" + "x" * 3993 + "\n\nend")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "sub" / "blank.txt").write_text(" \n\n\t\n")
    splits = load_rows(DataConfig(data=str(tmp_path)))
    rows = [*splits.rows["train"], *splits.rows["valid"]]
    places = [
        (Path(row.where.rpartition(":")[0]).name, row.where.rpartition(":")[2]) for row in rows
    ]
    assert places == [("b.md", "1"), ("b.md", "5"), ("a.txt", "1"), ("a.txt", "5")]
    assert rows[1].value == {"text": "end"}
    assert splits.notes[0] == "not used: 2 blank texts (empty.txt, sub/blank.txt)"


def test_a_folder_of_blank_texts_has_no_examples(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.md").write_text(" \n")
    with raises("data", "data", str(tmp_path), "blank"):
        load_rows(DataConfig(data=str(tmp_path)))
