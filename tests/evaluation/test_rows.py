"""Rows that are evaluated may have the standard names of columns, or those of the pack."""

import pytest

from mlx_packs.config.data import DataConfig
from mlx_packs.data.encoding import encode
from mlx_packs.data.in_memory import source_of
from mlx_packs.evaluation.rows import evaluation_rows
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.rows import chat, write_rows

OWN = {
    "prompt_feature": "question",
    "completion_feature": "answer",
    "chat_feature": "turns",
    "text_feature": "body",
}
ROWS = {
    "standard": {"prompt": "Where?", "completion": "There."},
    "own": {"question": "Where?", "answer": "There."},
    "one of each": {"question": "Where?", "completion": "There."},
    "both": {"question": "Where?", "answer": "There.", "prompt": "no", "completion": "no"},
}


@pytest.mark.parametrize("place", ["memory", "file", "folder"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_standard_names_are_always_read(tmp_path, row, place):
    folder = write_rows(tmp_path, train=[row] * 2, test=[row] * 2)
    data = {"memory": source_of([row] * 2), "file": str(folder / "test.jsonl"), "folder": folder}
    columns = DataConfig(data=data[place] if place != "folder" else str(folder), **OWN)
    rows = evaluation_rows(columns, "test")
    assert [(r.value["question"], r.value["answer"]) for r in rows] == [("Where?", "There.")] * 2
    assert [r.where.rpartition("/")[2] for r in rows][-1] in ("rows[1]", "test.jsonl:2")


def test_all_formats_have_their_standard_names():
    tokenizer = small_base().tokenizer
    columns = DataConfig(data=source_of([chat("Hi", "Ho")]), **OWN)
    assert encode(evaluation_rows(columns, "test"), tokenizer, columns).format == "chat"
    columns = DataConfig(data=source_of([{"text": "A text."}]), **OWN)
    assert encode(evaluation_rows(columns, "test"), tokenizer, columns).format == "text"


def test_rows_with_neither_are_named_with_the_names_of_the_pack(tmp_path):
    folder = write_rows(tmp_path, train=[{"q": "a"}] * 2, test=[{"q": "a"}])
    with raises("data", None, "train.jsonl:1", "{question, answer}"):
        evaluation_rows(DataConfig(data=str(folder), **OWN), "test")
