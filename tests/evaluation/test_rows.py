"""Rows that are evaluated have the columns and images that the pack was trained with."""

from types import SimpleNamespace

import pytest

from mlx_packs.config.data import DataConfig
from mlx_packs.data.in_memory import source_of
from mlx_packs.evaluation.rows import columns_of, evaluation_rows
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows

OWN = {
    "prompt_feature": "question",
    "completion_feature": "answer",
    "chat_feature": "turns",
    "text_feature": "body",
}


def test_rows_are_those_of_any_place(tmp_path):
    row = {"question": "Where?", "answer": "There."}
    folder = write_rows(tmp_path, train=[row] * 2, test=[row] * 2)
    for data in (source_of([row] * 2), str(folder / "test.jsonl"), str(folder)):
        rows = evaluation_rows(DataConfig(data=data, **OWN), "test")
        assert [r.value for r in rows] == [row] * 2
        assert [r.where.rpartition("/")[2] for r in rows][-1] in ("rows[1]", "test.jsonl:2")


def test_rows_with_other_names_are_named_with_the_names_of_the_pack(tmp_path):
    row = {"prompt": "Where?", "completion": "There."}
    folder = write_rows(tmp_path, train=[row] * 2, test=[row])
    with raises("data", None, "train.jsonl:1", "{question, answer}"):
        evaluation_rows(DataConfig(data=str(folder), **OWN), "test")


@pytest.mark.parametrize("pixels", [{"max_pixels": 0}, {"max_pixels": 784}, {}])
def test_images_are_as_large_as_in_training_but_not_of_the_network(pixels):
    pack = SimpleNamespace(_part=lambda name: {"allow_urls": True, **pixels})
    columns = columns_of(pack, "somewhere")
    expected = pixels.get("max_pixels", DataConfig.max_pixels)
    assert (columns.max_pixels, columns.allow_urls) == (expected, False)
    columns = columns_of(pack, "somewhere", max_pixels=0, allow_urls=True)
    assert (columns.max_pixels, columns.allow_urls) == (0, True)


def test_packs_data_has_the_settings_of_images(here, run):
    write_rows(here / "d", train=CHATS, valid=CHATS)
    code, _, err = run("data", "d", "--max-pixels", "0", "--allow-urls", "--samples", "0")
    assert code == 0, err
    assert run("data", "d", "--max-pixels", "-1")[0] == 2
