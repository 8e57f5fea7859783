"""Rows of a stream: on disk as they come, in memory one at a time."""

import sys
from datetime import date, datetime
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.in_memory import source_of
from mlx_packs.data.rows import load_rows
from mlx_packs.training.run_folder import _data_name
from tests.helpers.errors import raises


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


ROWS = [{"text": f"row {i}", "score": np.float32(i)} for i in range(50)]


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

    splits = {"train": IterableDataset(ROWS), "validation": IterableDataset(ROWS[:9])}
    module = SimpleNamespace(splits=splits, sha="a" * 40, load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: module)  # its sha
    return module


def test_a_stream_in_memory_is_rejected():
    for given in (IterableDataset(ROWS), {"train": IterableDataset(ROWS)}):
        with raises("unsupported", "data", "an IterableDataset is not read", "hf:owner/name"):
            source_of(given)


def test_dates_of_a_stream_are_iso_texts(cache, hub):
    values = [{"text": "a", "of": {"at": datetime(2026, 5, 1, 8), "day": date(2026, 5, 1)}}] * 2
    hub.splits["train"] = IterableDataset(values)
    row = load_rows(DataConfig(data="hf:some/set")).rows["train"][0]
    assert row.value["of"] == {"at": "2026-05-01T08:00:00", "day": "2026-05-01"}


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


def test_first_rows_of_a_stream(cache, hub):
    rows = load_rows(DataConfig(data="hf:some/set[:20]")).rows
    assert [len(rows[split]) for split in ("train", "valid")] == [20, 9]
    assert _data_name(DataConfig(data="hf:some/set[:20]")) == "set"


def test_stream_that_breaks_off_leaves_nothing(cache, hub):
    hub.splits["train"] = IterableDataset(ROWS, breaks_at=5)
    with raises("network", "data", "hf:some/set/train: cannot be streamed: the server is gone"):
        load_rows(DataConfig(data="hf:some/set"))
    assert not list(cache.iterdir())


def test_what_is_wrong_with_a_stream_is_named(cache, hub, monkeypatch):
    for name in ("hf:", "hf:some/set[5:]", "hf:a/b/c"):
        with raises("invalid", "data", "hf:owner/name[:1000]"):
            load_rows(DataConfig(data=name))
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
