"""Rows that are in no file of the user: in memory, and streamed from the Hub to a copy on disk."""

import sys
from dataclasses import replace
from datetime import date, datetime
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest

from mlx_packs import DataConfig, Pack, evaluate, evaluate_batch, train_pack
from mlx_packs.cli.main import packs
from mlx_packs.data.in_memory import IN_MEMORY, source_of
from mlx_packs.data.rows import load_rows
from mlx_packs.reading import sha256
from mlx_packs.training.run_folder import _data_name
from mlx_packs.training.state import ADAPTERS
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN


def values(data) -> list:
    rows = load_rows(DataConfig(data=source_of(data))).rows
    return [row.value for split in rows.values() for row in split]


def test_every_form_has_the_same_rows():
    for data in (CHATS, iter(CHATS), {"train": CHATS[:-1], "validation": CHATS[-1:]}):
        assert values(data) == CHATS
    rows = [{"text": np.array(["a"])[0], "n": np.int64(3), "messages": np.array([{"x": 1}])}] * 2
    assert values(rows) == [{"text": "a", "n": 3, "messages": [{"x": 1}]}] * 2
    assert type(values(rows)[0]["n"]) is int
    for data in (3, {"text": ["a"]}, b"x"):
        with raises("invalid", "data"):
            source_of(data)


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


class IterableDataset:
    """A substitute for that of `datasets`, which counts how often it is read and may break."""

    def __init__(self, values, breaks_at=None):
        self.values, self.breaks_at, self.reads = values, breaks_at, 0

    def take(self, count):
        return IterableDataset(self.values[:count])

    def skip(self, count):
        return IterableDataset(self.values[count:])

    def __iter__(self):
        self.reads += 1
        for i, value in enumerate(self.values):
            if i == self.breaks_at:
                raise ConnectionError("the server\nis gone")
            yield value


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rows"


@pytest.fixture
def hub(monkeypatch):
    """A data set of the Hub, by a substitute for its libraries."""

    def load_dataset(name, revision, streaming):
        assert name == "some/set" and revision == module.sha and streaming
        return module.splits

    rows = [{"text": f"row {i}", "score": np.float32(i)} for i in range(50)]
    splits = {"train": IterableDataset(rows), "validation": IterableDataset(rows[:9])}
    module = SimpleNamespace(splits=splits, sha="a" * 40, load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: module)  # its sha
    return module


@pytest.mark.parametrize("is_off", [False, True])
def test_data_set_of_the_hub_is_streamed_once(cache, hub, monkeypatch, is_off):
    if is_off:
        monkeypatch.setenv("MLX_PACKS_CACHE", "off")
    for _ in range(2):
        rows = load_rows(DataConfig(data="hf:some/set")).rows
        assert [len(rows[split]) for split in ("train", "valid", "test")] == [50, 9, 0]
        assert rows["train"][49].where == "hf:some/set/train[49]"
    assert hub.splits["train"].reads == 1
    hub.sha = "b" * 40
    load_rows(DataConfig(data="hf:some/set"))
    assert hub.splits["train"].reads == 2


def test_first_rows_of_a_stream_and_its_dates(cache, hub):
    hub.splits["train"].values[0]["of"] = {"at": datetime(2026, 5, 1, 8), "day": date(2026, 5, 1)}
    rows = load_rows(DataConfig(data="hf:some/set[:20]")).rows
    assert [len(rows[split]) for split in ("train", "valid")] == [20, 9]
    assert rows["train"][0].value["of"] == {"at": "2026-05-01T08:00:00", "day": "2026-05-01"}
    assert _data_name(DataConfig(data="hf:some/set[:20]")) == "set"


def test_what_is_wrong_with_a_stream_is_named_and_leaves_nothing(cache, hub, monkeypatch):
    for stream in (hub.splits["train"], hub.splits):
        with raises("unsupported", "data", "an IterableDataset is not read", "hf:owner/name"):
            source_of(stream)

    for name in ("hf:", "hf:some/set[5:]", "hf:a/b/c"):
        with raises("invalid", "data", "hf:owner/name[:1000]"):
            load_rows(DataConfig(data=name))

    hub.splits["train"].breaks_at = 5
    with raises("network", "data", "hf:some/set/train: cannot be streamed: the server is gone"):
        load_rows(DataConfig(data="hf:some/set"))
    assert not list(cache.iterdir())

    del hub.splits["train"]
    with raises("data", "data", "has no train split, only validation"):
        load_rows(DataConfig(data="hf:some/set"))

    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises("dependency", "data", "`pip install datasets`"):
        load_rows(DataConfig(data="hf:some/set"))


@pytest.mark.interop
def test_stream_of_the_library_itself():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": f"row {i}"} for i in range(30)])
    assert len(source_of(rows).splits["train"]) == 30
    with raises("unsupported", "data", "an IterableDataset is not read"):
        source_of(rows.to_iterable_dataset(3).take(20))
    assert len(source_of({"text": str(i)} for i in range(3)).splits["train"]) == 3
