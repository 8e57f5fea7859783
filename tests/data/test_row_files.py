"""Rows as people have them: in every kind of file, shards, patterns, and folders of texts."""

import gzip
import json
import os
from pathlib import Path

import pytest

from mlx_packs import DataConfig
from mlx_packs.bases.files import public_name
from mlx_packs.data import json_lines
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.rows import load_rows, matching_files
from mlx_packs.errors import PackError
from mlx_packs.files import is_pattern
from mlx_packs.training.run_folder import _data_name
from tests.helpers.errors import raises
from tests.helpers.rows import chat, write_rows

ROOMS = ("kitchen", "attic", "cellar", "hall", "study")
QA = [
    (f"What is in box {i} of the {ROOMS[i % 5]}?", f"Box {i} holds {i * 7 % 13} books, and a lamp.")
    for i in range(100)
]


ALPACA = [{"instruction": "Answer.", "input": q, "output": a} for q, a in QA]
CHATS = "".join(json.dumps(chat(*qa)) + "\n" for qa in QA)
FILES = {
    "alpaca.json": json.dumps(ALPACA).encode(),
    "packed.jsonl.gz": gzip.compress(CHATS.encode()),
    "packed.csv.gz": gzip.compress(("text\n" + "".join(f'"{q}\n{a}"\n' for q, a in QA)).encode()),
    "notes.md": "\n\n".join(f"# {q}\n{a} {a}" for q, a in QA).encode(),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))


def write(folder: Path, name: str) -> Path:
    (folder / name).write_bytes(FILES[name])
    return folder / name


Q, A = QA[0]
QUESTION, ANSWER = chat(Q, A)["messages"]
PARTS = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in (QUESTION, ANSWER)]


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
        {"conversations": [QUESTION, ANSWER]},
        {"messages": PARTS},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"prompt": Q, "completion": [ANSWER]},
    ],
)
def test_a_question_and_its_answer_are_one_chat(tokenizer, row, tmp_path):
    text, target = learned(tokenizer, [row] * 2, tmp_path / "a")
    expected, _ = learned(tokenizer, [chat(Q, A)] * 2, tmp_path / "b")
    assert text == expected
    assert target.strip().removesuffix("<|im_end|>") == A


def test_nothing_of_alpaca_is_dropped(tokenizer, tmp_path):
    row = {**ALPACA[0], "system": "Be kind.", "history": []}
    text, target = learned(tokenizer, [row] * 2, tmp_path)
    places = [text.index(part) for part in ("Be kind.", "Answer.", Q, A)]
    assert places == sorted(places) and A in target
    names = {"prompt_feature": "instruction", "completion_feature": "output"}
    config = DataConfig(data=str(write_rows(tmp_path, train=ALPACA[:4])), **names)
    with raises("conflict", "prompt_feature", "train.jsonl:1", "input"):
        encode(load_rows(config).rows["train"], tokenizer, config, EncodingOptions())


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"conversations": [{"from": "Bob", "value": "x"}]}, ["from", "Bob", "human"]),
        ({"conversations": "x"}, ["conversations", "str"]),
        ({"instruction": "x", "output": "x", "history": [["a", "b"]]}, ["history", "messages"]),
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

    (tmp_path / name).rename(tmp_path / name.upper())  # the case of an ending does not count
    upper = load_rows(DataConfig(data=str(tmp_path / name.upper())))
    assert upper.rows["train"][0].value == splits.rows["train"][0].value


def table_of(file: Path) -> list[tuple]:
    """The cells of all rows, in their order."""
    rows = load_rows(DataConfig(data=str(file), hold_out="last")).rows
    return [tuple(row.value.values()) for split in rows.values() for row in split]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("t.csv", 'prompt;completion\n"a;b, c";d\ne;f\n', [("a;b, c", "d"), ("e", "f")]),
        (
            "t.csv",
            '\ufeffprompt,completion\r\n"a, b","c\r\nd"\r\n"say ""x""",\xe9\r\n\r\n',
            [("a, b", "c\r\nd"), ('say "x"', "é")],
        ),
        ("t.tsv", 'prompt\tcompletion\r\n"say ""x""\n"\t5" wide\r\n', [('say "x"\n', '5" wide')]),
    ],
)
def test_a_table_has_these_cells(name, text, rows, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    assert table_of(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("t.tsv", "a\tb\nc\td\n1\t2\t3\n", [":3", "3 cells", "2", "in quotes"]),
        ("t.tsv", 'a\tb\n1\t"5 inch\n', [":2", "double the quotes"]),
        ("t.csv", 'a,b\n1,2\n"3\n4",5\n"6,7\n8,9\n', [":5", "quote"]),  # never closed
        ("t.csv", 'a,b\n1,2\n3,"4\n5,"6"\n7,8\n', [":3", "quote"]),  # closed by the next quote
        ("t.csv", "a,b\n1,2\n1,2,3\n", [":3", "3 cells", "2"]),
        ("t.csv", "a,a\n1,2\n", [":1", "once"]),
        ("t.csv", "a,b\n\udcff,2\n", ["UTF-8"]),
    ],
)
def test_a_damaged_table_is_one_line_with_its_first_place(name, content, names, tmp_path):
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(PackError, match=name) as error:
        load_rows(DataConfig(data=str(tmp_path / name)))
    assert all(part in error.value.message for part in names)
    assert not list((tmp_path / "cache" / "rows").glob("*"))


def test_a_copy_is_made_once_for_a_file(tmp_path):
    file = write(tmp_path, "packed.jsonl.gz")
    first = load_rows(DataConfig(data=str(file))).rows["train"]
    (copy,) = (tmp_path / "cache" / "rows").iterdir()
    os.utime(copy, (0, 0))
    again = load_rows(DataConfig(data=str(file))).rows["train"]
    assert list((tmp_path / "cache" / "rows").iterdir()) == [copy]
    assert copy.stat().st_mtime_ns > 0  # it is in use
    assert [row.value for row in first] == [row.value for row in again]
    file.write_bytes(gzip.compress(json.dumps({"text": "other"}).encode() + b"\n") * 3)
    assert load_rows(DataConfig(data=str(file))).rows["train"][0].value == {"text": "other"}


def test_a_bomb_and_a_torn_file_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_ALWAYS", 1000)
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b" " * 10_000_000))
    with raises("unreadable", None, "bomb.jsonl.gz", "bytes"):
        load_rows(DataConfig(data=str(bomb)))
    torn = write(tmp_path, "packed.jsonl.gz")
    torn.write_bytes(torn.read_bytes()[:-20])
    with raises("unreadable", None, "packed.jsonl.gz"):
        load_rows(DataConfig(data=str(torn)))


def test_a_folder_of_texts_is_read_with_its_subfolders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.md", "sub/a.txt", ".git/c.txt"):
        (tmp_path / name).write_text("first\n\n" + "x" * 3993 + "\n\nend")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "sub" / "blank.txt").write_text(" \n\n\t\n")
    splits = load_rows(DataConfig(data=str(tmp_path)))
    rows = [*splits.rows["train"], *splits.rows["valid"]]
    places = [Path(row.where).name for row in rows]
    assert places == ["b.md:1", "b.md:5", "a.txt:1", "a.txt:5"]
    assert rows[1].value == {"text": "end"}


def write_shards(folder, *names, rows=3):
    """Files of a few texts that name their file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        lines = [json.dumps({"text": f"{name.split('.')[0]} {i}"}) + "\n" for i in range(rows)]
        (folder / name).write_text("".join(lines))


def texts_in(data, split="train"):
    rows = load_rows(DataConfig(data=str(data), hold_out="last")).rows[split]
    return [row.value["text"] for row in rows]


def test_shards_of_a_folder_are_splits_in_the_order_of_their_numbers(tmp_path):
    write_shards(
        tmp_path / "d", "train-10.jsonl", "train-9.jsonl", "Validation_0.jsonl", "other.jsonl"
    )
    assert texts_in(tmp_path / "d") == [f"train-{n} {i}" for n in (9, 10) for i in range(3)]
    assert texts_in(tmp_path / "d", "valid") == [f"Validation_0 {i}" for i in range(3)]
    assert load_rows(DataConfig(data=str(tmp_path / "d"))).notes == [
        "not used: other.jsonl (names are train; valid, validation, val, dev; test)"
    ]

    write_shards(tmp_path / "e", "train.jsonl", "train_1.jsonl", "valid.jsonl")
    assert texts_in(tmp_path / "e") == [f"train {i}" for i in range(3)]  # the one without a number

    write_shards(tmp_path / "f", "valid-0.jsonl", "dev-0.jsonl", "train.jsonl")
    with raises("conflict", "data", "both contain valid"):
        texts_in(tmp_path / "f")


def test_shards_of_a_single_name_are_training_data(tmp_path):
    write_shards(tmp_path / "g", "part-00000.jsonl", "part-00001.jsonl")
    assert len(texts_in(tmp_path / "g")) + len(texts_in(tmp_path / "g", "valid")) == 6

    write_shards(tmp_path / "g", "other-0.jsonl")
    with raises("not-found", "data", "must contain train.jsonl"):
        texts_in(tmp_path / "g")


@pytest.mark.parametrize("first", [0, 1])
def test_missing_shards_are_counted(tmp_path, first):
    write_shards(tmp_path / "d", *(f"train-0000{first + i}-of-00003.jsonl" for i in (0, 2)))
    for data in (tmp_path / "d", tmp_path / "d" / "*.jsonl"):
        with raises("not-found", "data", "has 2 of the 3 shards of train"):
            texts_in(data)


def test_files_by_a_pattern_are_training_data_in_the_order_of_their_names(tmp_path):
    write_shards(tmp_path / "d", "b.jsonl", "a.jsonl", "c.md")
    write_shards(tmp_path / "d" / "e" / "f", "a.jsonl")

    pattern = tmp_path / "d" / "*.jsonl"
    expected = [f"{name} {i}" for name in "ab" for i in range(3)]
    assert texts_in(pattern) + texts_in(pattern, "valid") == expected
    assert len(matching_files(str(tmp_path / "d" / "**" / "*.jsonl"))) == 3
    rows = load_rows(DataConfig(data=str(pattern))).rows["train"]
    assert rows[0].where.endswith("d/a.jsonl:1")
    with raises("not-found", "data", "*.json: no file matches"):
        texts_in(tmp_path / "d" / "*.json")
    with raises("unsupported", "data", "x.bin: must end in .jsonl"):
        write_shards(tmp_path / "x", "x.bin")
        texts_in(tmp_path / "x" / "*")


def test_empty_shards_are_left_out_and_only_such_are_an_error(tmp_path):
    write_shards(tmp_path / "d", "train-0.jsonl", "train-2.jsonl")
    write_shards(tmp_path / "d", "train-1.jsonl", rows=0)
    assert len(texts_in(tmp_path / "d")) == 5
    write_shards(tmp_path / "e", "train-0.jsonl", "train-1.jsonl", rows=0)
    write_shards(tmp_path / "blank", "a.txt", rows=0)
    (tmp_path / "blank" / "b.md").write_text(" \n")
    for name in ("e", "blank"):
        with raises("data", None, str(tmp_path / name), "no examples"):
            texts_in(tmp_path / name)


def test_a_pattern_has_the_name_of_its_folder_and_manifests_have_no_path(tmp_path):
    write_shards(tmp_path / "notes", "a.jsonl")
    for pattern in ("notes/*.jsonl", "notes/**/a?.jsonl"):
        assert _data_name(DataConfig(data=str(tmp_path / pattern))) == "notes"
    sets = [{"path": "owner/first-v1.5"}, {"path": "b"}]
    assert _data_name(DataConfig(hf_dataset=sets)) == "first-v1.5"
    assert public_name(str(tmp_path / "notes" / "*.jsonl")) == "*.jsonl"
    odd = tmp_path / "a[1].jsonl"
    odd.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert not is_pattern(str(odd)) and public_name(str(odd)) == "a[1].jsonl"
    assert texts_in(odd) == ["a"]
