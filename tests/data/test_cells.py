"""Cells are read alike, whatever kind of file they are in; names of labels that data sets store."""

import csv
import io
import json

import numpy as np
import pytest

from mlx_packs.config.data import DataConfig
from mlx_packs.data.encoding import EncodingOptions
from mlx_packs.data.formats import formats_of
from mlx_packs.data.in_memory import source_of
from mlx_packs.data.labels import find_classes, read_label
from mlx_packs.data.pairs import encode_pairs
from mlx_packs.data.preferences import RATED, encode_tokens
from mlx_packs.data.rankings import RerankPrompt, encode_rankings
from mlx_packs.data.row_format import (
    Row,
    as_number,
    as_truth,
    label_names,
    messages_of,
    parquet_features,
    unpacked,
)
from mlx_packs.data.rows import load_rows
from tests.helpers.errors import raises

COLUMNS = DataConfig()
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def as_table(rows: list[dict], delimiter: str = ",") -> str:
    """The rows as pandas writes them, lists as JSON."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = {k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in row.items()}
        writer.writerow(cells)
    return out.getvalue()


WRITERS = {
    "d.jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "d.json": json.dumps,
    "d.csv": as_table,
    "d.tsv": lambda rows: as_table(rows, "\t"),
}


def rows_in(name: str, rows: list[dict], tmp_path, task: str):
    """The rows as a run of the task reads them from a file of this name, or from memory."""
    data = rows
    if name in WRITERS:
        data = tmp_path / name
        data.write_text(WRITERS[name](rows))
    read = load_rows(DataConfig(data=source_of(data), hold_out="last"), formats_of(task))
    return read.rows["train"], read.format


@pytest.mark.parametrize("name", [*WRITERS, "memory"])
def test_every_task_reads_every_kind_of_file(name, tmp_path, tokenizer):
    rated = [{"prompt": f"Name {i}", "completion": "Pear", "label": i % 2 == 1} for i in range(6)]
    rows, row_format = rows_in(name, rated, tmp_path, "kto")
    assert row_format is RATED
    read = encode_tokens(rows, tokenizer, COLUMNS, EncodingOptions(), row_format)
    assert read.labels.tolist() == [0, 1, 0, 1, 0]

    ranked = [{"query": f"q {i}", "documents": ["a", "b"], "labels": [1, 0.5]} for i in range(4)]
    rows, _ = rows_in(name, ranked, tmp_path, "rerank")
    labels = encode_rankings(rows, RerankPrompt(tokenizer, "find", 200)).labels
    assert [each.tolist() for each in labels] == [[1, 0.5]] * 3

    scored = [{"sentence1": "a", "sentence2": f"b {i}", "score": i / 4} for i in range(4)]
    rows, _ = rows_in(name, scored, tmp_path, "embedding")
    assert encode_pairs(rows, tokenizer._tokenizer, 50).labels.tolist() == [0, 0.25, 0.5]

    several = [{"text": f"t {i}", "labels": ["a", "b"][: i % 3]} for i in range(6)]
    rows, _ = rows_in(name, several, tmp_path, "classify")
    assert [read_label(row, "labels") for row in rows][:3] == [(), ("a",), ("a", "b")]

    graded = [{"text": f"t {i}", "score": i / 2} for i in range(6)]
    rows, _ = rows_in(name, graded, tmp_path, "classify")
    assert find_classes(rows, COLUMNS, "d").problem == "regression"

    chats = [{"messages": CHAT, "label": "b"}] * 4
    rows, row_format = rows_in(name, chats, tmp_path, "classify")
    assert row_format.name == "labelled chats"
    assert row_format.texts(rows[0], COLUMNS) == ["Hi", "Ho"]
    rows, row_format = rows_in(name, chats, tmp_path, "lm")
    assert len(encode_tokens(rows, tokenizer, COLUMNS, EncodingOptions(), row_format)) == 3

    sides = [{"chosen": CHAT, "rejected": [CHAT[0], {**CHAT[1], "content": "No"}]}] * 4
    rows, row_format = rows_in(name, sides, tmp_path, "dpo")
    assert len(encode_tokens(rows, tokenizer, COLUMNS, EncodingOptions(), row_format)) == 6


@pytest.mark.parametrize("name", ["d.csv", "d.tsv"])
def test_the_place_of_a_row_is_the_line_that_it_begins_in(name, tmp_path):
    rows = [{"prompt": 'two\n"lines"', "n": i} for i in range(3)]
    rows, _ = rows_in(name, rows, tmp_path, "grpo")
    assert [row.where for row in rows] == [f"{tmp_path / name}:{line}" for line in (2, 4)]


@pytest.mark.parametrize(
    ("value", "truth"),
    [(True, True), ("True", True), (" false", False), (1, True), ("0", False), (0.0, False)]
    + [("YES", True), (np.bool_(True), True), ("good", None), (2, None), (None, None), ("", None)],
)
def test_truth_values(value, truth):
    assert as_truth(value) is truth


@pytest.mark.parametrize(
    ("value", "number"),
    [("0.5", 0.5), (3, 3.0), (np.float32(0.5), 0.5), (True, None), ("nan", None), ("1e999", None)]
    + [("", None), ([1], None), (10**400, None)],
)
def test_numbers(value, number):
    assert as_number(value) == number


def test_a_text_that_is_no_json_of_messages_stays_a_text():
    for text in ('[{"spam": true}]', "[1, 2]", "[x", "[]", '{"role": "user"}', "[" * 5000):
        assert messages_of(text) is text
    assert messages_of(json.dumps(CHAT)) == CHAT
    assert unpacked("[" * 200 + "]" * 200) == "[" * 200 + "]" * 200


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ([1, 0, 0], "a mark for each label"),
        (["a", "b", "a"], "'a' more than once"),
        ("a;b", "as JSON"),
        ({"a": 1}, "must be a list, but is"),
    ],
)
def test_a_list_that_is_no_set_of_labels_is_named(labels, fault):
    with raises("data", None, "f:1", fault):
        read_label(Row("f:1", {"text": "x", "labels": labels}), "labels")
    both = [Row(f"f:{i}", {"text": "x", "labels": [i % 2, 1 - i % 2]}) for i in range(6)]
    with raises("data", "data", "all 2 labels"):  # marks, of which one always applies
        find_classes(both, COLUMNS, "f")


FEATURES = {
    "text": {"dtype": "string", "_type": "Value"},
    "label": {"names": ["cold", "hot"], "_type": "ClassLabel"},
    "labels": {"feature": {"names": ["a", "b"], "_type": "ClassLabel"}, "_type": "List"},
    "old": [{"names": ["a", "b"], "_type": "ClassLabel"}],
}


@pytest.mark.parametrize(
    ("column", "value", "name"),
    [("label", 1, "hot"), ("label", -1, None), ("label", 7, 7), ("label", "hot", "hot")]
    + [("labels", [1, 0], ["b", "a"]), ("old", [1], ["b"]), ("labels", None, None)]
    + [("text", "1", "1"), ("other", 1, 1)],
)
def test_a_data_set_names_its_labels(column, value, name):
    assert label_names(FEATURES)({column: value}) == {column: name}


def test_features_of_a_parquet_file():
    stored = {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}
    assert parquet_features(stored) == FEATURES
    for bad in (None, {}, {b"huggingface": b"[]"}, {b"huggingface": b"{"}):
        assert label_names(parquet_features(bad))({"label": 1}) == {"label": 1}
