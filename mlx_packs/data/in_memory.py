"""Rows that are in memory: lists, iterators, data frames, data sets, or a mapping of splits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.data import DataConfig
from ..errors import PackError
from .row_format import label_names, plain
from .sources import Rows, ValueList

IN_MEMORY = "rows-in-memory"  # what runs and manifests call them
# What people call each split.
SPLIT_NAMES = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}


Data = str | Path | Iterable[Mapping] | Mapping[str, Iterable[Mapping]]  # and what is like these


class InMemoryRows(str):
    """The name of rows in memory, which carries them."""

    splits: dict[str, Rows]  # by the names of `SPLIT_NAMES`

    def __new__(cls, splits: dict[str, Rows]) -> "InMemoryRows":
        name = super().__new__(cls, IN_MEMORY)
        name.splits = splits
        return name


def source_of(data: Any) -> str:
    """Return where rows are: a name as it is, and for rows in memory a `InMemoryRows`.

    ``data`` is a folder, file or data set id; or a list or iterator of mappings, a DataFrame of
    pandas or polars, a `datasets.Dataset`, or a mapping of split names to such. Anything else is a
    PackError.
    """
    if isinstance(data, InMemoryRows):
        return data
    if isinstance(data, (str, Path)):
        return str(data)
    if not isinstance(data, Mapping):
        return InMemoryRows({"train": _rows(data, "rows"), "valid": Rows(), "test": Rows()})

    names = {name: split for split, known in SPLIT_NAMES.items() for name in known}
    if unknown := [str(name) for name in data if name not in names]:
        raise PackError(
            f"data: a mapping must have rows by split ({', '.join(names)}), but has "
            f"{', '.join(unknown[:5])}. Give a list of mappings, a DataFrame or a Dataset.",
            flag="data",
        )

    splits = {split: Rows() for split in SPLIT_NAMES}
    for name, part in data.items():
        splits[names[name]] = _rows(part, name)
    return InMemoryRows(splits)


def columns_of(data: Data | None, columns: DataConfig | None) -> DataConfig:
    """Return ``columns`` with the source of the examples; both naming examples is an error."""
    columns = columns or DataConfig()
    if not isinstance(columns.data, str):
        columns = replace(columns, data=source_of(columns.data))

    if data is None:
        return columns

    if named := columns.changed(("data", "hf_dataset")):
        raise PackError(
            f"data: columns names examples too ({named[0]}). Leave one of them out.",
            "conflict",
            "data",
        )
    return replace(columns, data=source_of(data))


def _rows(data: Any, name: str) -> Rows:
    """Return the rows of one split; messages call them ``name[number]``."""
    if hasattr(data, "take") and hasattr(data, "skip") and not hasattr(data, "__len__"):
        raise PackError(
            "data: an IterableDataset is not read. Give list(dataset.take(N)), or the name of the "
            "data set, 'hf:owner/name', which is streamed.",
            "unsupported",
            "data",
        )
    if hasattr(data, "to_dicts"):  # polars
        values: Any = data.to_dicts()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        values = data.to_dict("records")
    elif hasattr(data, "column_names") and hasattr(data, "__getitem__"):  # datasets.Dataset
        values = data
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping)):
        values = data if isinstance(data, Sequence) else list(data)
    else:
        raise PackError(
            f"data: must be a path, a list of mappings, a DataFrame or a Dataset, but is a "
            f"{type(data).__name__}.",
            flag="data",
        )

    with_names = label_names(data)
    return Rows([ValueList(name, values, lambda value: with_names(plain(value)))])
