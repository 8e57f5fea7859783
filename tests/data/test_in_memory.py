"""Rows in memory: what is taken, where messages say a row is, training, resuming, evaluating."""

from dataclasses import replace

import numpy as np
import pytest

from mlx_packs import DataConfig, Pack, evaluate, evaluate_batch, train_pack
from mlx_packs.cli.main import packs
from mlx_packs.data.in_memory import IN_MEMORY, source_of
from mlx_packs.data.rows import load_rows
from mlx_packs.reading import sha256
from mlx_packs.training.checkpoint import ADAPTERS
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN

FORMS = {
    "list": list,
    "generator": lambda rows: (row for row in rows),
    "splits": lambda rows: {"train": rows[:-1], "validation": rows[-1:]},
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
    with raises("data", None, "rows[1]"):
        train_pack("tiny", [CHATS[0], {"words": 1}, CHATS[1]], LORA, TRAIN, tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_rows_train_what_their_file_trains_and_resume(tmp_path, trained):
    """A run goes on with the same rows only, which the command line does not have."""
    rows = {"train": iter(CHATS), "valid": CHATS[:2]}
    run = train_pack("tiny", rows, LORA, TRAIN, tmp_path / "p")

    other = Pack.open(trained / "o")
    assert sha256(run.pack.path / ADAPTERS) == sha256(other.path / ADAPTERS)
    facts, expected = run.pack.manifest["data"], other.manifest["data"]
    assert facts["source"] == IN_MEMORY and facts["fingerprint"] == expected["fingerprint"]

    with raises("mismatch", "data"):
        train_pack("tiny", CHATS[::-1], LORA, TRAIN, tmp_path / "p", resume=True)
    with raises("not-found", "data"):
        packs(["train", "--resume", "--out", str(tmp_path / "p")], standalone_mode=False)

    rows["train"] = CHATS
    run = train_pack("tiny", rows, LORA, replace(TRAIN, iters=3), tmp_path / "p", resume=True)
    assert run.report["batches"] == 3


def test_rows_are_evaluated(tmp_path, small_tiny):
    pack = random_pack(small_tiny)
    dense = {"matmul_path": "dense"}
    report = evaluate(small_tiny, pack, CHATS, limit=2, **dense)
    write_rows(tmp_path, rows=CHATS)
    assert report == evaluate(small_tiny, pack, tmp_path / "rows.jsonl", limit=2, **dense)
    assert evaluate(small_tiny, data={"train": CHATS, "test": CHATS[:1]}, **dense).rows == 1
    short = {"max_tokens": 2, "rounds": 1, "batch_sizes": [1], "sequence_length": 64}
    (compared,) = evaluate_batch(small_tiny, [], CHATS, limit=2, **short, **dense)
    assert compared.rows == 2
