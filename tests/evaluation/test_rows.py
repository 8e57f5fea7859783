"""Rows that are evaluated have the names of columns that the pack was trained with."""

import pytest

from mlx_packs.config.data import DataConfig
from mlx_packs.data.in_memory import source_of
from mlx_packs.evaluation.rows import evaluation_rows
from tests.helpers.errors import raises
from tests.helpers.rows import write_rows

OWN = {
    "prompt_feature": "question",
    "completion_feature": "answer",
    "chat_feature": "turns",
    "text_feature": "body",
}


@pytest.mark.parametrize("place", ["memory", "file", "folder"])
def test_rows_are_those_of_any_place(tmp_path, place):
    row = {"question": "Where?", "answer": "There."}
    folder = write_rows(tmp_path, train=[row] * 2, test=[row] * 2)
    data = {"memory": source_of([row] * 2), "file": str(folder / "test.jsonl"), "folder": folder}
    columns = DataConfig(data=data[place] if place != "folder" else str(folder), **OWN)
    rows = evaluation_rows(columns, "test")
    assert [r.value for r in rows] == [row] * 2
    assert [r.where.rpartition("/")[2] for r in rows][-1] in ("rows[1]", "test.jsonl:2")


@pytest.mark.parametrize("row", [{"q": "a"}, {"prompt": "Where?", "completion": "There."}], ids=str)
def test_rows_with_other_names_are_named_with_the_names_of_the_pack(tmp_path, row):
    folder = write_rows(tmp_path, train=[row] * 2, test=[row])
    with raises("data", None, "train.jsonl:1", "{question, answer}"):
        evaluation_rows(DataConfig(data=str(folder), **OWN), "test")
