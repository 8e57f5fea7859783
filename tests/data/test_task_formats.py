"""Rows as each task trains on them: formats and cells, whatever kind of file they are in."""

import csv
import io
import json

import numpy as np
import pytest

from mlx_packs.config.choices import TASKS, TaskFacts
from mlx_packs.config.data import DataConfig
from mlx_packs.data.encoding import EncodingOptions
from mlx_packs.data.formats import formats_of
from mlx_packs.data.in_memory import source_of
from mlx_packs.data.labels import find_classes, read_label
from mlx_packs.data.left_out import template_notes
from mlx_packs.data.pairs import PairCollate, encode_pairs
from mlx_packs.data.preferences import RATED, encode_tokens
from mlx_packs.data.rankings import RerankPrompt, encode_rankings
from mlx_packs.data.row_format import (
    Row,
    RowFormat,
    as_number,
    as_truth,
    label_names,
    messages_of,
    parquet_features,
    unpacked,
)
from mlx_packs.data.rows import load_rows
from mlx_packs.data.texts import TextGroups
from tests.helpers.errors import raises
from tests.helpers.rows import chat

SUMS = (RowFormat("sums", ("text", "other")),)  # which also match the format of texts
COLUMNS = DataConfig()


def test_rows_of_a_task_of_a_package_have_its_format_first(monkeypatch):
    facts = TaskFacts("a:Task", "decoder", formats=f"{__name__}:SUMS")
    monkeypatch.setitem(TASKS, "sum", facts)
    data = source_of([{"text": "1", "other": "2"}] * 4)
    assert load_rows(DataConfig(data=data), formats_of("sum")).format is SUMS[0]
    assert load_rows(DataConfig(data=data)).format.name == "text"


def rows_of(values: list[dict]) -> list[Row]:
    return [Row(f"f:{i + 1}", value) for i, value in enumerate(values)]


def pairs_of(tokenizer, *values: dict) -> tuple[TextGroups, list[list[str]]]:
    pairs = encode_pairs(rows_of(list(values)), tokenizer._tokenizer, 50)
    return pairs, [
        [tokenizer.decode(text, skip_special_tokens=True) for text in pairs.tokens(i)]
        for i in range(len(pairs))
    ]


def rankings_of(tokenizer, *values: dict) -> TextGroups:
    return encode_rankings(rows_of(list(values)), RerankPrompt(tokenizer, "find", 200))


FORMS = {
    "numbered columns": {"anchor": "a", "positive": "p", "negative_1": "n", "negative_2": "m"},
    "a list": {"anchor": "a", "positive": "p", "negative": ["n", "m"]},
    "a list as JSON": {"anchor": "a", "positive": "p", "negatives": '["n", "m"]'},
    "FlagEmbedding": {"query": "a", "pos": ["p"], "neg": ["n", "m"]},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_all_negatives_of_an_anchor_are_read(tokenizer, row):
    pairs, texts = pairs_of(tokenizer, row)
    assert texts == [["a", "p", "n", "m"]] and pairs.format.name == "triplets"
    assert template_notes(rows_of([row]), pairs.format, COLUMNS, tokenizer) == []

    rankings = rankings_of(tokenizer, row)
    assert rankings.labels[0].tolist() == [1, 0, 0] and len(rankings.tokens(0)) == 3


@pytest.mark.parametrize("name", ["document", "documents", "pos", "positive"])
def test_a_query_and_what_answers_it_are_a_pair(tokenizer, name):
    pairs, texts = pairs_of(
        tokenizer, {"query": "a", name: ["p"]}, {"query": "b", name: ["q", "r"]}
    )
    assert pairs.format.name == "pairs"
    assert texts == [["a", "p"], ["b", "q"], ["b", "r"]]  # a pair for each positive
    assert pairs.where_of([0, 1, 2]) == ["f:1", "f:2", "f:2"]


def test_fewer_negatives_are_repeated_and_a_batch_has_an_array_for_each_text(tokenizer):
    pairs, texts = pairs_of(
        tokenizer,
        {"anchor": "a", "positive": "p", "negative": ["n", "m", "o"]},
        {"anchor": "b", "positive": "q", "negative": "x"},
        {"anchor": "c", "positive": "r", "negative": ["y", "z"]},
    )
    assert [each[2:] for each in texts] == [["n", "m", "o"], ["x", "x", "x"], ["y", "z", "y"]]
    names = {"first", "second", "third", "text_4", "text_5", "lengths", "weights"}
    inputs = PairCollate(2, 50)(pairs, [0, 1]).inputs
    assert inputs.keys() == names and inputs["lengths"].shape == (2, 5)


def test_documents_of_a_query_are_one_row(tokenizer):
    with raises("data", None, "f:1", "{query, documents, labels}"):
        rankings_of(tokenizer, {"query": "a", "document": "x", "label": 1})


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"anchor": "a", "positive": "p", "negative": []}, "'negative' is empty"),
        ({"anchor": "a", "positive": "p", "negative_1": 3}, "'negative_1' must be a text or"),
        ({"anchor": "a", "positive": "p", "negative": ["n"] * 40}, "has 40 negatives"),
        ({"anchor": ["a"], "positive": "p"}, "'anchor' must be a text"),
        ({"query": "a", "document": "p", "label": 1}, "--task rerank"),
    ],
)
def test_what_is_no_pair_is_named(tokenizer, row, fault):
    with raises("data", None, "f:1", fault):
        pairs_of(tokenizer, row)


CHAT = chat("Hi", "Ho")["messages"]


def as_table(rows: list[dict], delimiter: str = ",") -> str:
    """The rows as pandas writes them, lists as JSON."""
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        cells = row.values()
        writer.writerow(json.dumps(v) if isinstance(v, (list, dict)) else v for v in cells)
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


def test_truth_values_and_numbers():
    assert all(as_truth(value) is True for value in (True, "True", "YES", 1, np.bool_(True)))
    assert all(as_truth(value) is False for value in (" false", "0", 0.0))
    assert all(as_truth(value) is None for value in ("good", 2, None, ""))
    assert [as_number(value) for value in ("0.5", 3, np.float32(0.5))] == [0.5, 3.0, 0.5]
    for value in (True, "nan", "1e999", "", [1], 10**400):
        assert as_number(value) is None


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


def test_labels_are_in_the_order_of_their_numbers_unless_one_is_too_long_for_one():
    for others, ordered in ((["10"], ["2", "10"]), (["1" * 5000], ["1" * 5000, "2"])):
        rows = [
            Row(f"f:{i}", {"text": "x", "label": each}) for i, each in enumerate(["2", *others])
        ]
        assert find_classes(rows, COLUMNS, "f").labels == tuple(ordered)


FEATURES = {
    "text": {"dtype": "string", "_type": "Value"},
    "label": {"names": ["cold", "hot"], "_type": "ClassLabel"},
    "labels": {"feature": {"names": ["a", "b"], "_type": "ClassLabel"}, "_type": "List"},
    "old": [{"names": ["a", "b"], "_type": "ClassLabel"}],
}


@pytest.mark.parametrize(
    ("column", "value", "name"),
    [("label", 1, "hot"), ("label", -1, None), ("label", 7, 7), ("label", "hot", "hot")]
    + [("labels", [1, 0], ["b", "a"]), ("old", [1], ["b"]), ("text", "1", "1")],
)
def test_a_data_set_names_its_labels(column, value, name):
    stored = {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}
    assert label_names(parquet_features(stored))({column: value}) == {column: name}
    for bad in (None, {b"huggingface": b"[]"}, {b"huggingface": b"{"}):
        assert label_names(parquet_features(bad))({column: value}) == {column: value}
