"""Selection of the examples on which a base and its packs are evaluated."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bases.files import public_name
from ..config.data import COLUMN_SETTINGS, DataConfig
from ..data.formats import PROMPT, Row
from ..data.in_memory import Data, InMemoryRows, source_of
from ..data.rows import load_rows, read_rows
from ..display import QUIET, Display
from ..errors import PackError
from ..files import is_hub_id
from ..packs.compatibility import recipe_of_run
from ..packs.pack import Pack
from .metrics import Metric


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation; see `evaluate.evaluate`."""

    columns: DataConfig
    batch_size: int
    max_seq_length: int
    loss_on: str | None = None
    matmul_path: str = "auto"
    metric: str | None = None
    own_metric: Metric | None = None  # of a function of the user's
    share_prefix: str = "auto"
    display: Display = field(default_factory=lambda: Display(QUIET))
    pack: Pack | None = None

    @property
    def trained(self) -> Mapping:
        """The `objective` of the pack's manifest."""
        return self.pack._part("objective") if self.pack is not None else {}


def columns_of(pack: Pack | None, data: Data, **specified: Any) -> DataConfig:
    """Return where examples are, with settings as specified, else as the pack was trained.

    The embedded data set has the default names whatever a pack was trained on.
    """
    source = source_of(data)
    recipe = pack._part("recipe") if pack is not None else {}

    settings = ("chat_template",)
    if source != "tiny":
        settings += (*COLUMN_SETTINGS, "template_kwargs", "template_date")
    trained = {name: recipe[name] for name in settings if recipe.get(name)}
    if recipe.get("max_pixels") is not None:
        trained["max_pixels"] = recipe["max_pixels"]

    if variables := specified.get("template_kwargs"):
        specified["template_kwargs"] = {**trained.get("template_kwargs", {}), **variables}
    return DataConfig(data=source, **{**trained, **specified})


def comparison_data(
    result: Pack, packs: Sequence[Pack], data: Data | None
) -> tuple[DataConfig, str]:
    """Return examples to compare variants of a result on, and what they are, in a line.

    None is the data that one of the packs it is made of was trained on, or the embedded data set
    if it has gone.
    """
    if data is not None:
        columns = columns_of(result, data)
        return columns, public_name(columns.data)

    for pack in packs:
        if (columns := trained_data(pack)) is not None:
            names = {name: getattr(columns, name) for name in (*COLUMN_SETTINGS, "hold_out")}
            shown = f"{public_name(columns.data)}, which {pack.name} was trained on"
            return columns_of(result, columns.data, **names), shown

    trained = packs[0]._part("data").get("source") or "not recorded"
    reason = f"the data of {packs[0].name} ({trained}) is not here, has changed or has no answers"
    return columns_of(result, "tiny"), f"the bundled examples: {reason}. Pass --data"


def trained_data(pack: Pack) -> DataConfig | None:
    """Return the data that a pack was trained on, by fingerprint; None if it has gone.

    A manifest has no paths: the names tried are the manifest's, and the run folder's.
    """
    if pack.examples is not None:
        return columns_of(pack, pack.examples)

    recipe = pack._part("recipe")
    named = _data_of(recipe)
    if named == "tiny":
        return columns_of(pack, named)

    fingerprints = (pack._part("data").get("fingerprint") or {}).values()
    named_by_run = _data_of(recipe_of_run(pack.path)) if pack.path else ""
    for source in filter(None, dict.fromkeys((named, named_by_run))):
        # the pack of a stranger is no reason to ask the Hub
        is_of_hub = source == named == named_by_run and is_hub_id(source)
        if not is_of_hub and not Path(source).expanduser().exists():
            continue

        with suppress(PackError, OSError):
            columns = columns_of(pack, source, hold_out=recipe.get("hold_out") or "sample")
            splits = load_rows(columns)
            same = any(splits.fingerprint(split) in fingerprints for split in splits.present())
            if same and splits.format is not PROMPT:
                return columns
    return None


def _data_of(recipe: Mapping) -> str:
    """Return the data of the last phase of a recipe; empty if it is not one name."""
    if recipe.get("hf_dataset"):
        return ""

    named = recipe.get("data")
    phases = recipe.get("phases")
    if isinstance(phases, list) and phases and isinstance(phases[-1], Mapping):
        named = phases[-1].get("data") or named
    return named if isinstance(named, str) else ""


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
