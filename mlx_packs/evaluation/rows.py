"""Selection of the examples on which a base and its packs are evaluated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.data import COLUMN_SETTINGS, DataConfig
from ..data.formats import Row
from ..data.in_memory import Data, InMemoryRows, source_of
from ..data.rows import load_rows, read_rows
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

    ``limit`` takes the first of them; -1 takes all. Raises a PackError if there are none.
    """
    first = slice(limit) if limit >= 0 else slice(None)
    if isinstance(columns.data, InMemoryRows):
        splits = columns.data.splits
        chosen = next((splits[s] for s in (split, "valid", "train") if len(splits[s])), ())
        if not len(chosen):
            raise PackError("data: has no rows.", "data", "data")
        return list(chosen[first])

    if Path(columns.data).is_file():
        return read_rows(Path(columns.data))[first]

    rows = load_rows(columns).rows
    if split == "test" and not rows["test"]:
        split = "valid"
    if not rows.get(split):
        raise PackError(f"--data {columns.data}: has no {split} examples.", "data", "split")
    return rows[split][first]


def check_limit(limit: int) -> None:
    """Raise a PackError unless a number of examples is positive, or -1 for all."""
    if limit == 0 or limit < -1:
        raise PackError(f"--limit {limit}: must be positive, or -1 for all.")
