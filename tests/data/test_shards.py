"""Data sets in several files: by a pattern, or as numbered shards."""

import json

import pytest

from mlx_packs.bases.files import public_name
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.rows import load_rows, matching_files
from mlx_packs.files import is_pattern
from mlx_packs.memory.row_shapes import example_memory
from mlx_packs.training.run_folder import _data_name
from tests.helpers.errors import raises


def write(folder, *names, rows=3):
    """Files of a few texts that name their file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        lines = [json.dumps({"text": f"{name.split('.')[0]} {i}"}) + "\n" for i in range(rows)]
        (folder / name).write_text("".join(lines))


def texts(data, split="train"):
    rows = load_rows(DataConfig(data=str(data), hold_out="last")).rows[split]
    return [row.value["text"] for row in rows]


def test_shards_of_a_folder_are_splits_in_the_order_of_their_numbers(tmp_path):
    write(tmp_path / "d", "train-10.jsonl", "train-9.jsonl", "Validation_0.jsonl", "other.jsonl")
    assert texts(tmp_path / "d") == [f"train-{n} {i}" for n in (9, 10) for i in range(3)]
    assert texts(tmp_path / "d", "valid") == [f"Validation_0 {i}" for i in range(3)]
    assert load_rows(DataConfig(data=str(tmp_path / "d"))).notes == [
        "not used: other.jsonl (names are train; valid, validation, val, dev; test)"
    ]


def test_shards_of_another_name_are_training_data_if_they_are_all(tmp_path):
    write(tmp_path / "d", *(f"part-{i:05d}.jsonl" for i in range(3)))
    assert len(texts(tmp_path / "d")) + len(texts(tmp_path / "d", "valid")) == 9
    write(tmp_path / "d", "other-0.jsonl")
    with raises("not-found", "data", "must contain train.jsonl"):
        texts(tmp_path / "d")


def test_a_file_without_a_number_is_the_split(tmp_path):
    write(tmp_path / "d", "train.jsonl", "train_1.jsonl", "valid.jsonl")
    assert texts(tmp_path / "d") == [f"train {i}" for i in range(3)]
    write(tmp_path / "e", "valid-0.jsonl", "dev-0.jsonl", "train.jsonl")
    with raises("conflict", "data", "both contain valid"):
        texts(tmp_path / "e")


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"],
        ["train-1-of-3.jsonl", "train-3-of-3.jsonl"],
    ],
)
def test_missing_shards_are_counted(tmp_path, names):
    write(tmp_path / "d", *names)
    for data in (tmp_path / "d", tmp_path / "d" / "*.jsonl"):
        with raises("not-found", "data", "has 2 of the 3 shards of train"):
            texts(data)


def test_files_by_a_pattern_are_training_data_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "d", "b.jsonl", "a.jsonl", "c.md")
    write(tmp_path / "d" / "e" / "f", "a.jsonl")

    held_out = texts(tmp_path / "d" / "*.jsonl", "valid")
    assert texts(tmp_path / "d" / "*.jsonl") + held_out == [
        f"{name} {i}" for name in "ab" for i in range(3)
    ]

    assert len(matching_files(str(tmp_path / "d" / "**" / "*.jsonl"))) == 3
    rows = load_rows(DataConfig(data=str(tmp_path / "d" / "*.jsonl"))).rows["train"]
    assert rows[0].where.endswith("d/a.jsonl:1")

    with raises("not-found", "data", "*.json: no file matches"):
        texts(tmp_path / "d" / "*.json")
    with raises("unsupported", "data", "x.bin: must end in .jsonl"):
        write(tmp_path / "x", "x.bin")
        texts(tmp_path / "x" / "*")


def test_empty_shards_are_left_out_and_only_such_are_an_error(tmp_path):
    write(tmp_path / "d", "train-0.jsonl", "train-2.jsonl")
    write(tmp_path / "d", "train-1.jsonl", rows=0)
    assert len(texts(tmp_path / "d")) == 5
    write(tmp_path / "e", "train-0.jsonl", "train-1.jsonl", rows=0)
    with raises("data", None, "there are no examples"):
        texts(tmp_path / "e")


def test_a_pattern_has_the_name_of_its_folder_and_manifests_have_no_path(tmp_path):
    write(tmp_path / "notes", "a.jsonl")
    for pattern in ("notes/*.jsonl", "notes/**/a?.jsonl"):
        assert _data_name(DataConfig(data=str(tmp_path / pattern))) == "notes"
    assert public_name(str(tmp_path / "notes" / "*.jsonl")) == "*.jsonl"
    assert example_memory(DataConfig(data=str(tmp_path / "notes" / "*.jsonl"))).rows == 3
    odd = tmp_path / "a[1].jsonl"
    odd.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert not is_pattern(str(odd)) and public_name(str(odd)) == "a[1].jsonl"
    assert texts(odd) == ["a"]
