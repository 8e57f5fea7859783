"""Rows from files and data sets: JSONL, JSON, parquet, Hugging Face."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema import COLUMN_SETTINGS, DataConfig
from ..errors import PackError, did_you_mean
from ..files import TINY_FOLDER, is_hub_id
from .formats import Row, RowFormat, common_format

SPLITS = ("train", "valid", "test")
_SUFFIXES = (".jsonl", ".json", ".parquet")
_HELD_OUT_SHARE, _HELD_OUT_MOST = 0.05, 100


@dataclass
class Splits:
    """The rows of each split."""

    rows: dict[str, list[Row]]  # of each of `SPLITS`
    source: str  # where they come from, as messages name it
    format: RowFormat  # of the first row; the others are checked where they are encoded
    notes: list[str] = field(default_factory=list)  # what was decided for the user

    def present(self) -> list[str]:
        """Return the splits that have rows; train and a held-out one must."""
        present = [split for split in SPLITS if self.rows[split]]
        if "train" not in present:
            raise PackError(f"--data {self.source}: the train split is empty.", "data")
        if present == ["train"]:
            raise PackError(
                f"--data {self.source}: one example is too few. Add a valid.jsonl to evaluate on.",
                "data",
            )
        return present


def tiny_path() -> Path:
    """Return the folder of the embedded data set: train.jsonl, valid.jsonl, test.jsonl."""
    return TINY_FOLDER / "data"


def load_rows(config: DataConfig) -> Splits:
    """Return the rows of train, valid and test from a folder, a file, a Hugging Face id or ``tiny``.

    Without valid and test rows, the last 5 % of the training rows (100 at most) are held out.

    Raises:
        PackError: something cannot be read or used; it names file and line.
    """
    if config.hf_dataset is not None:
        rows, source = _hf_collection(config)
    else:
        rows, source = _local_or_hub(config.data), str(config.data)
    firsts = [rows[split][0] for split in SPLITS if rows[split]]
    if not firsts:
        raise PackError(f"--data {source}: there are no examples.", "data")
    splits = Splits(rows, source, common_format(firsts, config))
    if config.hf_dataset is None:
        _hold_out(splits)
    return splits


def _local_or_hub(data: str) -> dict[str, list[Row]]:
    """Return the rows of each split of a folder, a file (training rows), or a Hub data set."""
    path = tiny_path() if data == "tiny" else Path(data).expanduser()
    if path.is_file():
        return {"train": read_rows(path), "valid": [], "test": []}
    if path.is_dir():
        return _folder_rows(path)
    if path.suffix not in _SUFFIXES and is_hub_id(data):
        return _hf_dataset(data)
    raise PackError(
        f"--data {data}: no such folder or file, and not a data set id (owner/name).", "not-found"
    )


def _folder_rows(path: Path) -> dict[str, list[Row]]:
    """Return the rows of each split of a folder; none at all is an error."""
    rows: dict[str, list[Row]] = {}
    for split in SPLITS:
        files = [file for s in _SUFFIXES if (file := path / (split + s)).is_file()]
        if len(files) > 1:
            raise PackError(
                f"{path}: {files[0].name} and {files[1].name} both hold {split}.",
                "conflict",
                "data",
            )
        rows[split] = read_rows(files[0]) if files else []
    if not any(rows.values()):
        raise PackError(
            f"{path}: must hold train.jsonl (and valid.jsonl, test.jsonl).", "not-found", "data"
        )
    return rows


def _hold_out(splits: Splits) -> None:
    """Make the last training rows the validation split, if nothing is held out."""
    train = splits.rows["train"]
    if splits.rows["valid"] or splits.rows["test"] or len(train) < 2:
        return
    n = max(1, min(_HELD_OUT_MOST, int(len(train) * _HELD_OUT_SHARE)))
    splits.rows["train"], splits.rows["valid"] = train[:-n], train[-n:]
    splits.notes.append(f"no valid examples: the last {n} training examples are held out")


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a .jsonl, .json or .parquet file."""
    if file.suffix not in _SUFFIXES:
        raise PackError(f"{file}: must end in {', '.join(_SUFFIXES)}.", "unsupported", "data")
    try:
        rows = _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
    except OSError as error:
        raise PackError(f"{file}: cannot be read ({error.strerror}).", "unreadable") from None
    except UnicodeDecodeError as error:
        raise PackError(f"{file}: is not UTF-8 text (byte {error.start}).", "unreadable") from None
    if not rows:
        raise PackError(f"{file}: has no examples.", "data")
    for row in rows:
        if not isinstance(row.value, Mapping):
            raise row.error(f"must be a JSON object, but is a {type(row.value).__name__}.")
    return rows


def _json_rows(file: Path) -> list[Row]:
    text = file.read_text(encoding="utf-8-sig")  # Windows editors begin with a byte order mark
    if file.suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            message = f"is not valid JSON: {error.msg}."
            raise PackError(f"{file}:{error.lineno}: {message}", "unreadable") from None
        if not isinstance(values, list):
            kind = type(values).__name__
            raise PackError(f"{file}: must be a list of examples, but is a {kind}.", "data")
        return [Row(f"{file}[{i}]", v) for i, v in enumerate(values)]
    rows = []
    # not splitlines(): U+2028 may stand inside a JSON string
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(Row(f"{file}:{number}", json.loads(line)))
        except json.JSONDecodeError as error:
            shown = line if len(line) < 60 else line[:60] + "…"
            message = f"is not valid JSON ({error.msg} at column {error.colno}). Shown: {shown}"
            raise PackError(f"{file}:{number}: {message}", "unreadable") from None
    return rows


def _parquet_rows(file: Path) -> list[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise PackError(
            f"{file}: reading parquet needs `pip install pyarrow`.", "dependency"
        ) from None
    return [Row(f"{file}[{i}]", v) for i, v in enumerate(parquet.read_table(file).to_pylist())]


def _hf_load(name: str, /, **arguments: Any) -> Any:
    """Return what `datasets.load_dataset` loads."""
    try:
        import datasets
    except ImportError:
        raise PackError(
            f"--data {name}: no such folder or file here. To take it from the Hugging Face Hub, "
            "run `pip install datasets`.",
            "dependency",
        ) from None
    try:
        return datasets.load_dataset(name, **arguments)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PackError(
            f"--data {name}: cannot be loaded from the Hub: {reason}", "network"
        ) from None


def _hf_dataset(name: str) -> dict[str, list[Row]]:
    """Return every split of a data set of the Hub that has our name (or is called validation)."""
    loaded = _hf_load(name)
    splits = {split: loaded[split] for split in SPLITS if split in loaded}
    if "validation" in loaded:
        splits.setdefault("valid", loaded["validation"])
    if "train" not in splits:
        raise PackError(f"--data {name}: has no train split, only {', '.join(loaded)}.", "data")
    return {split: _hf_rows(name, split, splits.get(split, ())) for split in SPLITS}


def _hf_rows(name: str, split: str, loaded: Iterable[Mapping]) -> list[Row]:
    return [Row(f"{name}/{split}[{i}]", dict(v)) for i, v in enumerate(loaded)]


def _hf_collection(config: DataConfig) -> tuple[dict[str, list[Row]], str]:
    """Return the rows of mlx-lm's ``hf_dataset`` key, one or several, and where they come from."""
    entries = config.hf_dataset if isinstance(config.hf_dataset, list) else [config.hf_dataset]
    features = {name: getattr(config, name) for name in COLUMN_SETTINGS}
    valid_keys = {"path", "name", "train_split", "valid_split", "test_split", "config", *features}
    rows: dict[str, list[Row]] = {split: [] for split in SPLITS}
    paths = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            message = f"hf_dataset: must hold keys such as 'path', but got {entry!r}."
            raise PackError(message, "invalid", "hf_dataset")
        for key in entry:
            if key not in valid_keys:
                message = f"hf_dataset: unknown key '{key}'. {did_you_mean(key, list(valid_keys))}"
                raise PackError(message, "unknown", "hf_dataset")
        path = entry.get("path") or entry.get("name")
        if not path:
            raise PackError("hf_dataset: every entry needs a 'path'.", "invalid", "hf_dataset")
        paths.append(str(path))
        parts = {"train": "train[:80%]", "valid": "train[-10%:]"}
        parts |= {split: entry[f"{split}_split"] for split in SPLITS if f"{split}_split" in entry}
        arguments = entry.get("config") or {}
        renames = {entry[name]: features[name] for name in features if name in entry}
        for split, part in parts.items():
            loaded = _hf_load(path, split=part, **arguments)
            rows[split] += [
                Row(r.where, {renames.get(k, k): v for k, v in r.value.items()})
                for r in _hf_rows(path, split, loaded)
            ]
    return rows, ", ".join(paths)


def fingerprint(rows: list[Row]) -> str:
    """Return a hash of the rows' content, whatever file they stand in."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row.value, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()
