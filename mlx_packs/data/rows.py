"""Rows from files and data sets: JSONL, JSON, parquet, Hugging Face; and what their columns say."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..config.schema import DataConfig
from ..errors import PackError, did_you_mean
from ..files import TINY_FOLDER

SPLITS = ("train", "valid", "test")
# The columns of sentence-transformers, by format; what has more of them is looked for first.
PAIR_COLUMNS = {
    "scored pairs": ("sentence1", "sentence2", "score"),
    "triplets": ("anchor", "positive", "negative"),
    "pairs": ("anchor", "positive"),
}
_SUFFIXES = (".jsonl", ".json", ".parquet")
_HELD_OUT_SHARE, _HELD_OUT_MOST = 0.05, 100


@dataclass(frozen=True)
class Row:
    """One row as it was read, with the place that messages name (``train.jsonl:17``)."""

    where: str
    value: Mapping


@dataclass
class Splits:
    """Rows of each split and where they come from; ``notes`` say what was decided for the user."""

    rows: dict[str, list[Row]]
    source: str
    notes: list[str] = field(default_factory=list)

    def present(self) -> list[str]:
        """The splits that have rows. Raises: PackError without training rows, or held-out ones."""
        found = [split for split in SPLITS if self.rows[split]]
        if "train" not in found:
            raise PackError(f"--data {self.source}: the train split is empty.")
        if found == ["train"]:
            raise PackError(
                f"--data {self.source}: one row is too few: some must be held out (valid.jsonl)."
            )
        return found


def tiny_path() -> Path:
    """The folder of the embedded data set: train.jsonl, valid.jsonl, test.jsonl."""
    return TINY_FOLDER / "data"


def load_rows(config: DataConfig) -> Splits:
    """Rows of train, valid and test from a folder, a file, a Hugging Face id or ``tiny``.

    Without valid and test rows, the last 5 % of the training rows (100 at most) are held out.
    Raises: PackError naming file and line.
    """
    if config.hf_dataset is not None:
        return _hf_collection(config)
    path = tiny_path() if config.data == "tiny" else Path(config.data).expanduser()
    if path.is_file():
        rows = {"train": read_rows(path), "valid": [], "test": []}
    elif path.is_dir():
        rows = {}
        for split in SPLITS:
            files = [path / (split + s) for s in _SUFFIXES if (path / (split + s)).is_file()]
            if len(files) > 1:
                raise PackError(f"{path}: {files[0].name} and {files[1].name} both hold {split}.")
            rows[split] = read_rows(files[0]) if files else []
        if not any(rows.values()):
            raise PackError(f"{path}: must hold train.jsonl (and valid.jsonl, test.jsonl).")
    elif path.suffix not in _SUFFIXES and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", config.data):
        rows = _hf_dataset(config.data)
    else:
        raise PackError(
            f"--data {config.data}: no such folder or file, and not a data set id (owner/name)."
        )
    _check_formats(rows, config)
    splits = Splits(rows, str(config.data))
    _hold_out(splits)
    return splits


def _check_formats(rows: Mapping[str, list[Row]], config: DataConfig) -> None:
    """Refuse splits of different formats: what is measured must be what is learned."""
    first = [rows[s][0] for s in SPLITS if rows[s]]
    for row in first[1:]:
        found, wanted = row_format(row, config), row_format(first[0], config)
        if found != wanted:
            raise PackError(
                f"{row.where}: mixed formats: this row is {found}, but "
                f"{first[0].where} is {wanted}."
            )


def _hold_out(splits: Splits) -> None:
    train = splits.rows["train"]
    if splits.rows["valid"] or splits.rows["test"] or len(train) < 2:
        return
    n = max(1, min(_HELD_OUT_MOST, int(len(train) * _HELD_OUT_SHARE)))
    splits.rows["train"], splits.rows["valid"] = train[:-n], train[-n:]
    splits.notes.append(f"no valid rows: the last {n} training rows are held out")


def read_rows(file: Path) -> list[Row]:
    """The rows of a .jsonl, .json or .parquet file.

    Raises: PackError with file and line for what is not a JSON object, or an empty file.
    """
    if file.suffix not in _SUFFIXES:
        raise PackError(f"{file}: must end in {', '.join(_SUFFIXES)}.")
    try:
        rows = _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
    except OSError as error:
        raise PackError(f"{file}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise PackError(f"{file}: is not UTF-8 text (byte {error.start}).") from None
    if not rows:
        raise PackError(f"{file}: holds no rows.")
    for row in rows:
        if not isinstance(row.value, Mapping):
            kind = type(row.value).__name__
            raise PackError(f"{row.where}: must be a JSON object, but is a {kind}.")
    return rows


def _json_rows(file: Path) -> list[Row]:
    text = file.read_text(encoding="utf-8-sig")  # Windows editors begin with a byte order mark
    if file.suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PackError(f"{file}:{error.lineno}: is not valid JSON: {error.msg}.") from None
        if not isinstance(values, list):
            raise PackError(f"{file}: must hold a list of rows, but is a {type(values).__name__}.")
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
            raise PackError(f"{file}:{number}: {message}") from None
    return rows


def _parquet_rows(file: Path) -> list[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise PackError(f"{file}: reading parquet needs: pip install pyarrow") from None
    return [Row(f"{file}[{i}]", v) for i, v in enumerate(parquet.read_table(file).to_pylist())]


def _hf_load(name: str, /, **arguments):
    """`datasets.load_dataset`, or one line that says why not."""
    try:
        import datasets
    except ImportError:
        raise PackError(
            f"--data {name}: no such folder or file here; to take it from the Hugging Face Hub: "
            "pip install datasets."
        ) from None
    try:
        return datasets.load_dataset(name, **arguments)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PackError(f"--data {name}: cannot be loaded from the Hub: {reason}") from None


def _hf_dataset(name: str) -> dict[str, list[Row]]:
    """Every split of a data set of the Hub that has our name (or is called validation)."""
    loaded = _hf_load(name)
    found = {s: loaded[s] for s in SPLITS if s in loaded}
    if "validation" in loaded:
        found.setdefault("valid", loaded["validation"])
    if "train" not in found:
        raise PackError(f"--data {name}: has no train split, only {', '.join(loaded)}.")
    return {s: _hf_rows(name, s, found.get(s, ())) for s in SPLITS}


def _hf_rows(name: str, split: str, loaded) -> list[Row]:
    return [Row(f"{name}/{split}[{i}]", dict(v)) for i, v in enumerate(loaded)]


def _hf_collection(config: DataConfig) -> Splits:
    """mlx-lm's ``hf_dataset`` key: one data set or several, each with splits and column names."""
    wanted = config.hf_dataset if isinstance(config.hf_dataset, list) else [config.hf_dataset]
    features = {f: getattr(config, f) for f in _FEATURES}
    known = {"path", "name", "train_split", "valid_split", "test_split", "config", *features}
    rows: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for entry in wanted:
        if not isinstance(entry, Mapping):
            raise PackError(f"hf_dataset: must hold keys such as 'path', but got {entry!r}.")
        for key in entry:
            if key not in known:
                raise PackError(
                    f"hf_dataset: unknown key '{key}'. {did_you_mean(key, list(known))}"
                )
        name = entry.get("path") or entry.get("name")
        if not name:
            raise PackError("hf_dataset: every entry needs a 'path'.")
        splits = {
            "train": entry.get("train_split", "train[:80%]"),
            "valid": entry.get("valid_split", "train[-10%:]"),
        }
        if "test_split" in entry:
            splits["test"] = entry["test_split"]
        arguments = entry.get("config") or {}
        renames = {entry[f]: features[f] for f in features if f in entry}
        for split, wanted_split in splits.items():
            loaded = _hf_load(name, split=wanted_split, **arguments)
            rows[split] += [
                Row(r.where, {renames.get(k, k): v for k, v in r.value.items()})
                for r in _hf_rows(name, split, loaded)
            ]
    _check_formats(rows, config)
    return Splits(rows, ", ".join(str(e.get("path") or e.get("name")) for e in wanted))


_FEATURES = ("chat_feature", "prompt_feature", "completion_feature", "text_feature")


def fingerprint(rows: list[Row]) -> str:
    """A hash of the rows' content, whatever file they stand in."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row.value, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()


def pair_format(row: Row) -> str | None:
    """Which kind of pairs a row holds, of `PAIR_COLUMNS`; None if it is of none."""
    kinds = (kind for kind, names in PAIR_COLUMNS.items() if all(n in row.value for n in names))
    return next(kinds, None)


def row_format(row: Row, config: DataConfig) -> str:
    """chat, completion or text, by the columns of a row, in mlx-lm's order; or a kind of pairs."""
    if config.prompt_feature in row.value and config.completion_feature in row.value:
        return "completion"
    if config.chat_feature in row.value:
        return "chat"
    if config.text_feature in row.value:
        return "text"
    if (pairs := pair_format(row)) is not None:
        return pairs
    raise PackError(
        f"{row.where}: must have '{config.chat_feature}', or '{config.prompt_feature}' and "
        f"'{config.completion_feature}', or '{config.text_feature}', but has "
        f"{sorted(row.value) or 'nothing'}. Other names: --prompt-feature and its kin."
    )
