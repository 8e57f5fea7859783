"""Held-out rows: drawn at random, near-copies on one side, and warnings where they are not."""

import random

import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data import near_copies
from mlx_packs.data import rows as rows_module
from mlx_packs.data.formats import FORMATS
from mlx_packs.data.near_copies import NearCopies, row_notes, words_of
from mlx_packs.data.rows import load_rows
from mlx_packs.data.sources import Row, as_rows
from tests.helpers.rows import chat, write_rows

COLUMNS = DataConfig()
TEXT = next(f for f in FORMATS if f.name == "text")
SYSTEM = "You are a helpful assistant who answers each question with one short and friendly line."


def sentence(seed: int, words: int = 20) -> str:
    """A sentence of random words."""
    return " ".join(random.Random(seed).choices([f"w{i}" for i in range(500)], k=words))


def texts(count: int, start: int = 0) -> list[dict]:
    return [{"text": sentence(seed)} for seed in range(start, start + count)]


def with_system(row: dict) -> dict:
    return {"messages": [{"role": "system", "content": SYSTEM}, *row["messages"]]}


def splits_of(tmp_path, rows, **settings):
    write_rows(tmp_path, only=rows)
    return load_rows(DataConfig(data=str(tmp_path / "only.jsonl"), **settings))


def values(rows) -> list:
    return [row.value for row in rows]


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (40, 2), (200, 7)])
def test_a_sample_is_held_out_the_same_each_time(tmp_path, count, held_out, monkeypatch):
    monkeypatch.setattr(rows_module, "_HELD_OUT_MOST", 7)
    splits = splits_of(tmp_path, texts(count))
    again = load_rows(DataConfig(data=splits.source))
    train, valid = values(splits.rows["train"]), values(splits.rows["valid"])
    assert (len(train), len(valid)) == (count - held_out, held_out)
    assert values(again.rows["valid"]) == valid
    assert sorted(map(str, train + valid)) == sorted(map(str, texts(count)))
    assert str(held_out) in splits.notes[0]
    places = [int(row.where.rpartition(":")[2]) for row in splits.rows["valid"]]
    assert places == sorted(places)
    if count > 2:  # not the end of the file, whose rows may be sorted
        assert places[0] < 0.7 * count
        assert splits.rows["train"].where(places[0] - 1).endswith(f":{places[0] + 1}")


def test_near_copies_stand_on_one_side(tmp_path):
    """Each text four times, twice with changed words: groups of four, all or none held out."""
    rows = []
    for row in texts(60):
        words = row["text"].split()
        changed = [{"text": " ".join([*words[:k], "new", *words[k + 1 :]])} for k in (3, 17)]
        rows += [row, *changed, {"text": row["text"].upper()}]
    splits = splits_of(tmp_path, rows)
    held_out = {i // 4 for i, row in enumerate(rows) if row in values(splits.rows["valid"])}
    assert len(splits.rows["valid"]) == 4 * len(held_out) == 12
    assert "9 of them near-duplicates" in splits.notes[0]
    assert row_notes(splits.rows, splits.format, COLUMNS) == []
    splits = splits_of(tmp_path, [{"text": "the same words in each and every row"}] * 40)
    assert len(splits.rows["valid"]) == 2
    (note,) = row_notes(splits.rows, splits.format, COLUMNS)
    assert note.startswith("2 of 2 valid examples nearly repeat training examples (")


def test_a_leak_between_splits_is_said_with_its_first_places(tmp_path):
    train = [with_system(chat(sentence(i), sentence(-i - 1))) for i in range(30)]
    valid = [with_system(chat(sentence(i), sentence(-i - 1))) for i in range(100, 120)]
    words = sentence(7).split()
    valid[4] = with_system(chat(" ".join(["please", *words[2:]]), sentence(-8)))
    write_rows(tmp_path, train=train, valid=valid, test=train[:3])
    splits = load_rows(DataConfig(data=str(tmp_path)))
    of_valid, of_test = row_notes(splits.rows, splits.format, COLUMNS)
    assert "1 of 20 valid examples" in of_valid
    assert "valid.jsonl:5 is " in of_valid and "train.jsonl:8)" in of_valid
    assert "3 of 3 test examples" in of_test

    short = [with_system(chat(sentence(i, 8), sentence(-i - 1, 4))) for i in range(60)]
    write_rows(tmp_path / "s", train=short[:40], valid=short[40:])  # the system prompt is no leak
    splits = load_rows(DataConfig(data=str(tmp_path / "s")))
    assert row_notes(splits.rows, splits.format, COLUMNS) == []


def test_scripts_without_spaces_are_compared_by_letters_and_bad_rows_not_at_all():
    for row, other, expected in (
        ({"text": "東京は日本の首都であり"}, {"text": "東京は日本の首都である。"}, {0}),
        ({"text": "東京は日本の首都であり"}, {"text": "大阪は西日本の中心となる"}, set()),
        ({"text": 5}, {"text": 5}, set()),
        ({"text": ""}, {"text": ""}, set()),
        (None, None, set()),
    ):
        copies = NearCopies({0: Row("a", row)}, TEXT, COLUMNS)
        assert copies.repeated_by(words_of(Row("b", other), TEXT, COLUMNS), "") == expected


def test_of_very_many_rows_some_blocks_are_compared(monkeypatch):
    monkeypatch.setattr(near_copies, "MOST_COMPARED", 100)
    rows = as_rows([Row(f"r:{i}", {"text": str(i)}) for i in range(1000)])
    indices = [i for i, row in near_copies.compared(rows) if row.value["text"] == str(i)]
    assert len(indices) == 100 and indices[0] == 0 and indices[-1] == 999


def test_empty_answers_are_said(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    called = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    answers = ["yes"] * 3 + ["", "yes", "", called, "yes"]
    rows = [{"prompt": sentence(i, 4), "completion": a} for i, a in enumerate(answers)]
    write_rows(tmp_path, train=rows, test=[{"prompt": "new", "completion": ""}])
    splits = load_rows(DataConfig(data=str(tmp_path)))
    note, of_test = row_notes(splits.rows, splits.format, COLUMNS)
    assert note.startswith("2 training examples have an empty answer (")
    assert "train.jsonl:4)" in note
    assert of_test.startswith("1 test example has an empty answer (") and "test.jsonl:1)" in of_test


@pytest.mark.parametrize("column", ["image", "images", "part", "bytes"])
def test_the_same_question_on_another_image_is_no_copy(tmp_path, column):
    """And questions on one image are as near as their words are."""

    def row(image: str, question: str = SYSTEM) -> dict:
        about = chat(question, "It is a seven.")
        if column == "part":
            url = {"type": "image_url", "image_url": {"url": image}}
            about["messages"][0]["content"] = [url, {"type": "text", "text": question}]
        else:
            forms = {"image": image, "images": [image], "bytes": {"bytes": image.encode()}}
            about[column.replace("bytes", "image")] = forms[column]
        return about

    rows = [*map(row, ("a.png", "b.png", "a.png")), row("a.png", sentence(1))]
    rows.append(chat(SYSTEM, "It is a seven."))
    numbered = {i: Row(f"a:{i}", each) for i, each in enumerate(rows)}
    copies = NearCopies(numbered, FORMATS[1], COLUMNS)
    found = [
        copies.repeated_by(words_of(each, FORMATS[1], COLUMNS), near_copies.images_key(each))
        for each in numbered.values()
    ]
    assert found == [{0, 2}, {1}, {0, 2}, {3}, {4}]

    if column != "bytes":
        splits = splits_of(tmp_path, [row(f"{i}.png") for i in range(200)])
        assert len(splits.rows["valid"]) == 10 and "near-duplicates" not in splits.notes[-1]
