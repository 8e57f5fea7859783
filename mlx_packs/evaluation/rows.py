"""Selection of the examples on which a base and its packs are evaluated."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.data import COLUMN_SETTINGS, DataConfig
from ..data.bad_rows import RowError
from ..data.formats import Row
from ..data.in_memory import Data, InMemoryRows, source_of
from ..data.rows import load_rows, read_rows
from ..data.sources import Rows
from ..display import QUIET, Display
from ..errors import PackError
from ..packs.pack import Pack


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation; see `evaluate.evaluate`."""

    columns: DataConfig
    batch_size: int
    max_seq_length: int
    loss_on: str | None = None
    matmul_path: str = "auto"
    metric: str | None = None
    share_prefix: str = "auto"
    display: Display = field(default_factory=lambda: Display(QUIET))
    trained: Mapping = field(default_factory=dict)  # `objective` of the pack's manifest


def columns_of(pack: Pack | None, data: Data, **specified: Any) -> DataConfig:
    """Return where examples are, with settings as specified, else as the pack was trained.

    The embedded data set has the default names whatever a pack was trained on.
    """
    source = source_of(data)
    recipe = {}
    if pack is not None:
        recipe = pack._part("recipe")

    settings = ("chat_template",)
    if source != "tiny":
        settings += (*COLUMN_SETTINGS, "template_kwargs", "template_date", "on_long_row")
    trained = {name: recipe[name] for name in settings if recipe.get(name)}
    if recipe.get("max_pixels") is not None:
        trained["max_pixels"] = recipe["max_pixels"]

    if variables := specified.get("template_kwargs"):
        specified["template_kwargs"] = {**trained.get("template_kwargs", {}), **variables}
    return DataConfig(data=source, **{**trained, **specified})


def evaluation_rows(columns: DataConfig, split: str, limit: int = -1) -> list[Row]:
    """Return the rows of a file, or of a folder's ``split`` (``valid`` where it has no ``test``).

    ``limit`` takes the first of them; -1 takes all. Raises a PackError if there are none. Rows may
    have the standard names of columns instead of those of ``columns``, which they then get.
    """
    rows = _rows_of(columns, split, limit)
    others = {getattr(DataConfig, name): getattr(columns, name) for name in COLUMN_SETTINGS}
    others = {standard: name for standard, name in others.items() if standard != name}
    if not others:
        return rows

    return [_renamed(row, others) for row in rows]


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    """Return a row with other names of columns, where it has no column of that name."""
    with suppress(RowError):  # who uses a bad row names it
        if isinstance(row.value, Mapping):
            new = {old: name for old, name in names.items() if name not in row.value}
            return row.with_value({new.get(key, key): value for key, value in row.value.items()})

    return row


def _rows_of(columns: DataConfig, split: str, limit: int) -> list[Row]:
    first = slice(limit) if limit >= 0 else slice(None)
    if isinstance(columns.data, InMemoryRows):
        splits = columns.data.splits
        chosen = next((splits[s] for s in (split, "valid", "train") if len(splits[s])), ())
        if not len(chosen):
            raise PackError("data: has no rows.", "data", "data")
        return list(chosen[first])

    if Path(columns.data).is_file():
        return read_rows(Path(columns.data))[first]

    rows = _loaded(columns)
    if split == "test" and not rows["test"]:
        split = "valid"
    if not rows.get(split):
        raise PackError(f"--data {columns.data}: has no {split} examples.", "data", "split")
    return rows[split][first]


def _loaded(columns: DataConfig) -> Mapping[str, Rows]:
    """Return the rows of each split, in which columns may have their standard names."""
    try:
        return load_rows(columns).rows
    except RowError as error:
        standard = {name: getattr(DataConfig, name) for name in COLUMN_SETTINGS}
        if error.reason != "missing columns" or not columns.changed(COLUMN_SETTINGS):
            raise

        try:
            return load_rows(replace(columns, **standard)).rows
        except PackError:
            raise error from None


def check_limit(limit: int) -> None:
    """Raise a PackError unless a number of examples is positive, or -1 for all."""
    if limit == 0 or limit < -1:
        raise PackError(f"--limit {limit}: must be positive, or -1 for all.")
