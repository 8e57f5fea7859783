"""Rows by number: any selection of the rows of any sources reads as one of a list does."""

import json

import numpy as np
import pytest

from mlx_packs.data.formats import Row
from mlx_packs.data.json_lines import JsonLines
from mlx_packs.data.sources import RowList, Rows, ValueList, as_rows


@pytest.fixture
def sources(tmp_path):
    """A file, a list of rows, one without rows, and a list of values: the numbers from 0 to 999."""
    values = [{"text": str(i)} for i in range(1000)]
    lines = "".join(json.dumps(value) + "\n" for value in values[:400])
    (tmp_path / "rows.jsonl").write_text(lines)
    listed = [Row(f"list:{i}", values[i]) for i in range(400, 640)]
    return [
        JsonLines(tmp_path / "rows.jsonl"),
        RowList(listed),
        RowList([]),
        ValueList("values", values[640:], dict),
    ]


def numbers(rows) -> list[int]:
    return [int(row.value["text"]) for row in rows]


def test_rows_are_those_of_one_source_after_another(sources):
    rows = Rows(sources)
    assert numbers(rows) == list(range(1000)) and len(rows) == 1000

    edges = [rows.where(i).rpartition("/")[2] for i in (0, 399, 400, 639, 640, 999)]
    assert edges[:3] == ["rows.jsonl:1", "rows.jsonl:400", "list:400"]
    assert edges[3:] == ["list:639", "values[0]", "values[359]"]

    assert [rows[i].where for i in range(1000)] == [rows.where(i) for i in range(1000)]
    assert rows[-1].value == {"text": "999"} and numbers(rows[398:402]) == [398, 399, 400, 401]

    with pytest.raises(IndexError):
        _ = rows[1000]


@pytest.mark.parametrize(
    "indices",
    [[], [0], [999], [399, 400, 639, 640], [3, 4, 5, 50, 51, 700], [*range(0, 1000, 7)]],
)
def test_selected_rows_are_read_in_any_part(sources, indices):
    rows = Rows(sources)
    selected = rows.select(np.array(indices, int))
    for part in (slice(None), slice(1, 3), slice(2, 100), slice(-2, None), slice(5, 2)):
        assert numbers(selected[part]) == indices[part]
    places = [selected.where(i) for i in range(len(selected))]
    assert places == [row.where for row in selected] == [rows.where(i) for i in indices]
    assert 0 < selected.nbytes() <= rows.nbytes() or not indices
    if indices:
        assert selected[-1].value == {"text": str(indices[-1])}


def test_selections_of_selections_and_parts(sources):
    rows = Rows(sources)
    part = rows[350:700].select(np.arange(0, 350, 3))[10:90]
    assert numbers(part) == list(range(350, 700, 3))[10:90]
    assert numbers(part.select(np.array([0, 5, 79]))) == [380, 395, 617]
    assert len(rows[5:2]) == 0 and numbers(rows[5:2]) == []


def test_key_is_that_of_the_content_and_the_selection(sources):
    rows = Rows(sources)
    parts = [rows, rows[:5], rows[1:], rows.select(np.array([1, 5])), Rows(sources[:2])]
    keys = [part.content_key() for part in parts]
    assert None not in keys and len(set(keys)) == len(keys)
    assert keys[3] == rows.select(np.array([1, 5], np.int32)).content_key()
    assert as_rows([Row("x", {"text": object()})]).content_key() is None


def test_fingerprint_follows_content_and_not_place():
    rows = [Row("a:1", {"text": "x"}), Row("a:2", {"text": "y"})]
    moved = [Row("b:9", {"text": "x"}), Row("c:1", {"text": "y"})]
    own, same, other = (as_rows(each).fingerprint() for each in (rows, moved, rows[::-1]))
    assert own == same != other
