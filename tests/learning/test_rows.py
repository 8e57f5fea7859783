"""Rows of rated answers: durable lines, torn ones, and which are held out."""

import json

import pytest

from mlx_packs.errors import PackError
from mlx_packs.learning.rows import (
    Answer,
    is_held_out,
    key_of,
    read_rows,
    rows_of,
    write_rows,
)

ABOUT = {"model": "notes", "version": 0, "pack": None}


def answer_to(question: str, text: str = "No.", **more) -> Answer:
    message = {"role": "assistant", "content": text, **more}
    return Answer([{"role": "user", "content": question}], message, {}, ABOUT)


def add(folder, questions, **said) -> None:
    for question in questions:
        answer = answer_to(question)
        write_rows(folder, rows_of(answer, f"id of {question}", **said))


def test_a_prompt_stays_held_out_whatever_else_is_rated(tmp_path):
    add(tmp_path, map(str, range(400)), rating="down")
    first = read_rows(tmp_path, "kto")
    assert first.count == 400 and 50 < len(first.held_out) < 110
    assert all(is_held_out(row["prompt"]) for row in first.held_out)
    assert {"prompt", "completion", "label"} == set(first.train[0])

    add(tmp_path, map(str, range(400, 500)), rating="down")
    later = read_rows(tmp_path, "kto")
    assert [row for row in later.held_out if row in first.held_out] == list(first.held_out)


def test_a_prompt_is_held_out_as_a_text_and_as_a_message(tmp_path):
    questions = [f"Question {number}" for number in range(60)]
    add(tmp_path, questions, rating="down")
    with (tmp_path / "kto.jsonl").open("a") as file:
        for question in questions:  # by hand
            file.write(json.dumps({"prompt": question, "completion": "x", "label": True}) + "\n")

    split = read_rows(tmp_path, "kto")
    train, held_out = (
        {key_of(row["prompt"]) for row in rows} for rows in (split.train, split.held_out)
    )
    assert len(train) + len(held_out) == 60 and not train & held_out and held_out


def test_an_empty_answer_has_no_rows_that_cannot_be_trained_on():
    rows = rows_of(answer_to("a", " "), "1", correction="Yes.")
    assert set(rows) == {"chat.jsonl"}
    call = answer_to("a", "", tool_calls=[{"function": {"name": "f", "arguments": {}}}])
    assert set(rows_of(call, "1", correction="Yes.")) == {"chat.jsonl", "dpo.jsonl"}


def test_a_line_that_a_crash_cut_off_is_removed_and_a_complete_one_stays(tmp_path):
    add(tmp_path, "ab", rating="down")
    file = tmp_path / "kto.jsonl"
    lines = file.read_text().splitlines()
    file.write_text(lines[0] + "\n" + lines[1][:30])
    assert read_rows(tmp_path, "kto").count == 1
    add(tmp_path, "c", rating="down")
    identities = [json.loads(line)["id"] for line in file.read_text().splitlines()]
    assert identities == ["id of a", "id of c"]

    file.write_text(json.dumps({"prompt": "by hand", "completion": "x", "label": True}))
    add(tmp_path, "d", rating="down")
    assert read_rows(tmp_path, "kto").count == 2

    for last in (json.dumps({"prompt": "by hand", "completion": "y", "label": True}), '{"torn'):
        with file.open("a") as opened:
            opened.write(last)  # a second feedback on d
        rows = rows_of(answer_to("d"), "id of d", "down")
        write_rows(tmp_path, rows, replaced="id of d")
        assert read_rows(tmp_path, "kto").count == 3


def test_a_damaged_line_is_named(tmp_path):
    add(tmp_path, "a", rating="down")
    for line, fault in (("{oops", "not valid JSON"), ('"text"', "an object with a prompt")):
        (tmp_path / "kto.jsonl").write_text(line + "\n")
        with pytest.raises(PackError, match=rf"kto.jsonl:1: .*{fault}"):
            read_rows(tmp_path, "kto")
