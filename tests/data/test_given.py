"""Rows in memory: what is taken, where messages say a row is, training, resuming, evaluating."""

import numpy as np
import pytest

from mlx_packs import (
    DataConfig,
    LoRAConfig,
    TrainConfig,
    evaluate,
    evaluate_batch,
    load_base,
    train_pack,
)
from mlx_packs.cli.main import packs
from mlx_packs.data.given import IN_MEMORY, source_of
from mlx_packs.data.rows import load_rows
from mlx_packs.reading import sha256
from mlx_packs.training.checkpoint import ADAPTERS
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN


class Frame:
    """What pandas' DataFrame has of this."""

    def __init__(self, rows: list):
        self.rows, self.columns = rows, list(rows[0])

    def to_dict(self, orient: str) -> list:
        assert orient == "records"
        return self.rows


class Polars(Frame):
    to_dict = None

    def to_dicts(self) -> list:
        return self.rows


class Dataset:
    """What `datasets.Dataset` has of this."""

    def __init__(self, rows: list):
        self.rows, self.column_names = rows, list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return self.rows[i]


FORMS = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "generator": lambda rows: (row for row in rows),
    "pandas": Frame,
    "polars": Polars,
    "datasets": Dataset,
    "splits": lambda rows: {"train": rows[:-1], "validation": Dataset(rows[-1:])},
}


def values(data) -> list:
    rows = load_rows(DataConfig(data=source_of(data))).rows
    return [row.value for split in rows.values() for row in split]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_rows(form):
    assert values(FORMS[form](CHATS)) == CHATS


@pytest.mark.interop
def test_pandas_polars_and_datasets_themselves():
    import datasets
    import pandas
    import polars

    whole = datasets.Dataset.from_list(CHATS)
    for data in (pandas.DataFrame(CHATS), polars.DataFrame(CHATS), whole):
        assert values(data) == CHATS
    splits = datasets.DatasetDict({"train": whole, "validation": whole.select(range(2))})
    assert values(splits) == [*CHATS, *CHATS[:2]]


def test_values_of_numpy_become_pythons():
    rows = [{"text": np.array(["a"])[0], "n": np.int64(3), "messages": np.array([{"x": 1}])}] * 2
    assert values(rows) == [{"text": "a", "n": 3, "messages": [{"x": 1}]}] * 2
    assert type(values(rows)[0]["n"]) is int


@pytest.mark.parametrize("data", [3, None, {"text": ["a"]}, b"x"])
def test_what_is_no_rows_is_one_line(data):
    with raises("invalid", "data"):
        source_of(data)


def test_a_bad_row_is_named_by_its_number(tmp_path):
    for bad in ({"words": 1}, "x", None):
        with raises("data", None, "rows[1]"):
            train_pack("tiny", [CHATS[0], bad, CHATS[1]], LORA, TRAIN, tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_rows_train_what_their_file_trains(tmp_path):
    run = train_pack("tiny", iter(CHATS), LORA, TRAIN, tmp_path / "p")
    folder = write_rows(tmp_path / "d", train=CHATS)
    other = train_pack("tiny", folder, LORA, TRAIN, tmp_path / "q")
    assert sha256(run.pack.path / ADAPTERS) == sha256(other.pack.path / ADAPTERS)
    assert run.pack.manifest["data"]["source"] == IN_MEMORY
    assert run.pack.manifest["data"]["fingerprint"] == other.pack.manifest["data"]["fingerprint"]


def test_a_run_goes_on_with_the_same_rows_alone(tmp_path):
    more = TrainConfig(**{**vars(TRAIN), "iters": 4})
    train_pack("tiny", CHATS, LORA, TRAIN, tmp_path / "p")
    with raises("mismatch", "data"):
        train_pack("tiny", CHATS[::-1], LORA, more, tmp_path / "p", resume=True)
    with raises("not-found", "data"):
        packs(["train", "--resume", "--out", str(tmp_path / "p")], standalone_mode=False)
    run = train_pack("tiny", CHATS, LORA, more, tmp_path / "p", resume=True)
    assert run.report["batches"] == 4


def test_rows_are_evaluated(tmp_path):
    base = load_base("tiny")
    pack = train_pack(base, CHATS, LoRAConfig(rank=2, num_layers=1), TRAIN, tmp_path / "p").pack
    report = evaluate(base, pack, CHATS, limit=3)
    file = tmp_path / "rows.jsonl"
    write_rows(tmp_path, rows=CHATS)
    assert report == evaluate(base, pack, file, limit=3)
    assert evaluate(base, data={"train": CHATS, "test": CHATS[:2]}).rows == 2
    short = {"max_tokens": 2, "rounds": 1}
    (compared, _) = evaluate_batch(base, [pack], CHATS, batch_sizes=[1], limit=2, **short)
    assert compared.rows == 2
