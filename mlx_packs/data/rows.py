"""Rows from files, patterns, numbered shards and data sets of the Hugging Face Hub."""

import glob
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..config.data import COLUMN_SETTINGS, DataConfig
from ..errors import PackError, did_you_mean, errors_of
from ..files import TINY_FOLDER, is_hub_id, is_pattern
from ..reading import check_regular
from .formats import FORMATS, Row, RowFormat, check_format, first_format
from .in_memory import IN_MEMORY, SPLIT_NAMES, InMemoryRows
from .json_lines import BOM, TEXT_SUFFIXES, JsonLines, gzip_rows, parse_json, table_rows, text_rows
from .near_copies import hold_out
from .row_format import BadRows, label_names, shown_counts
from .sources import Parquet, Rows, Source, ValueList, data_error, file_error
from .streams import STREAMED, hub_errors, hub_library, hub_splits, hub_stream

SPLITS = tuple(SPLIT_NAMES)
_KNOWN_NAMES = "; ".join(", ".join(names) for names in SPLIT_NAMES.values())
_HELD_OUT_SHARE = 0.05
_HELD_OUT_MOST = 100
# train-00000-of-00008, train_3, part.12
_SHARD = re.compile(r"(?P<name>.+?)[-_.](?P<number>\d+)(?:-of-(?P<count>\d+))?")


@dataclass
class Splits:
    """The rows of each split, and what encoding has seen of them."""

    rows: dict[str, Rows]  # of each of `SPLITS`
    source: str  # where they come from, as messages name it
    format: RowFormat  # of the first row; the others are checked where they are encoded
    notes: list[str] = field(default_factory=list)  # what was decided for the user
    fingerprints: dict[str, str] = field(default_factory=dict)  # of the rows in use, by split
    bad: dict[str, BadRows] = field(default_factory=dict)  # left out by encoding, by split

    def present(self) -> list[str]:
        """Return the splits that have rows; an error without train or a split to evaluate on."""
        present = [split for split in SPLITS if len(self.rows[split])]
        if "train" not in present:
            raise data_error(self.source, "the train split is empty.")
        if present == ["train"]:
            fault = "one example is too few. Add a valid.jsonl to evaluate on."
            raise data_error(self.source, fault)

        return present

    def note_encoded(self, split: str, fingerprint: str | None, bad: BadRows) -> None:
        if fingerprint is not None:
            self.fingerprints[split] = fingerprint
        if bad.errors:
            self.bad[split] = bad

    def bad_lines(self) -> list[str]:
        """Return a line on the rows left out for each split that has some."""
        return [
            f"{len(bad):,} of {len(self.rows[split]):,} {split} examples left out: "
            f"{shown_counts(bad.counts())}; the first is {bad.errors[0][1].where}"
            for split, bad in self.bad.items()
        ]

    def usable(self, split: str) -> Iterator[Row]:
        """Yield the rows of a split that encoding has not left out."""
        bad: set[int] = {i for i, _ in self.bad[split].errors} if split in self.bad else set()
        yield from (row for i, row in enumerate(self.rows[split]) if i not in bad)

    def first_usable(self, split: str) -> Row:
        return next(self.usable(split))

    def fingerprint(self, split: str) -> str:
        """Return a hash of the rows in use by their content, whatever file they are in."""
        if split not in self.fingerprints:
            self.fingerprints[split] = self.rows[split].fingerprint()
        return self.fingerprints[split]


def tiny_path() -> Path:
    """Return the folder of the embedded data set: train.jsonl, valid.jsonl, test.jsonl."""
    return TINY_FOLDER / "data"


def load_rows(config: DataConfig, formats: Sequence[RowFormat] = FORMATS) -> Splits:
    """Return the rows of each split: of a folder, a file, files by a pattern, or the Hub.

    Without valid and test rows, 5 % of the training rows (100 at most) are held out: a sample, the
    same each time, or the last ones. An error names file and line.
    """
    notes: list[str] = []
    if config.hf_dataset is not None:
        rows, source = _hf_collection(config)
    else:
        rows, notes = _local_or_hub(config.data)
        source = str(config.data)

    present = [split for split in SPLITS if len(rows[split])]
    if not present:
        raise data_error(source, "there are no examples.")

    first, row_format = first_format(rows[present[0]], config, formats)
    if config.on_bad_row == "stop":
        for split in present[1:]:
            check_format(rows[split][0], row_format, first.where, config, formats)

    splits = Splits(rows, source, row_format, notes)
    if config.hf_dataset is None:
        _hold_out(splits, config)
    return splits


def _path_of(data: str) -> Path:
    return tiny_path() if data == "tiny" else Path(data).expanduser()


def below(data: str, where: str) -> str:
    """Return the place of a row without the folder of the data set, or of its file."""
    path = _path_of(data)
    folder = path if path.is_dir() else path.parent
    return where.removeprefix(f"{folder}/")


def _local_or_hub(data: str) -> tuple[dict[str, Rows], list[str]]:
    """Return the rows of each split, and notes; all rows of a single file are for training."""
    if isinstance(data, InMemoryRows):
        return dict(data.splits), []

    path = _path_of(data)
    if data == IN_MEMORY and not path.exists():
        raise PackError(
            "--data: these rows were in the memory of another process. Give the same rows to "
            "train_pack from Python.",
            "not-found",
        )

    if path.exists() and not path.is_dir():
        return _all_splits({"train": read_rows(path)}), []
    if path.is_dir():
        return _folder_rows(path)

    if data.startswith(STREAMED):
        return _all_splits(hub_stream(data)), []
    if is_pattern(data):
        return _all_splits({"train": _rows_of(matching_files(data))}), []
    if suffix_of(path) is None and is_hub_id(data):
        loaded = hub_splits(data, _hf_load(data))
        rows = {
            split: Rows([ValueList(f"{data}/{split}", values, label_names(values))])
            for split, values in loaded.items()
        }
        return _all_splits(rows), []

    fault = "no such folder or file, and not a data set id (owner/name)."
    raise data_error(data, fault, "not-found")


def _all_splits(rows: Mapping[str, Rows]) -> dict[str, Rows]:
    return {split: rows.get(split, Rows()) for split in SPLITS}


def _rows_of(files: Sequence[Path]) -> Rows:
    return Rows([_source_of(file) for file in files])


def _folder_rows(path: Path) -> tuple[dict[str, Rows], list[str]]:
    """Return the rows of each split, and notes; a folder without any rows is an error."""
    files = sorted(file for file in path.iterdir() if suffix_of(file))
    tables = [file for file in files if suffix_of(file) not in TEXT_SUFFIXES]
    by_split = _files_of_splits(path, tables)
    used = [file for chosen in by_split.values() for file in chosen]
    if not used:
        return _all_splits({"train": _text_folder(path, tables)}), []

    rows = {split: _rows_of(chosen) for split, chosen in by_split.items()}
    for split, chosen in by_split.items():
        if len(chosen) == 1 and not len(rows[split]):
            raise file_error(chosen[0], "has no examples.", "data")

    others = [file.name for file in tables if file not in used]
    if not others:
        return rows, []
    return rows, [f"not used: {', '.join(others[:3])} (names are {_KNOWN_NAMES})"]


def _files_of_splits(path: Path, tables: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each split: one by its name, or its numbered shards.

    Without either, a single file or the shards of a single name are training data.
    """
    stems = {file: file.name.lower().removesuffix(suffix_of(file) or "") for file in tables}
    shards = numbered_shards(stems)
    by_split: dict[str, list[Path]] = {}

    for split, names in SPLIT_NAMES.items():
        sharded = [shards[name] for name in names if name in shards]
        chosen = [[file] for file in tables if stems[file] in names] or sharded
        if len(chosen) > 1:
            fault = f"{chosen[0][0].name} and {chosen[1][0].name} both contain {split}."
            raise file_error(path, fault, "conflict")
        by_split[split] = next(iter(chosen), [])

    others = list(shards.values())
    if len(tables) == 1:
        others = [list(tables)]
    if not any(by_split.values()) and len(others) == 1 and len(others[0]) == len(tables):
        by_split["train"] = others[0]
    return by_split


def _text_folder(path: Path, tables: Sequence[Path]) -> Rows:
    """Return the texts below a folder that has no files of rows; blank ones have no rows."""
    texts = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in TEXT_SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )

    if tables or not texts:
        fault = (
            "must contain train.jsonl (and valid.jsonl, test.jsonl) or shards of it "
            f"(train-00000-of-00008.jsonl), a file of rows, or texts ({', '.join(TEXT_SUFFIXES)})."
        )
        raise file_error(path, fault, "not-found")

    return _rows_of(texts)


def _hold_out(splits: Splits, config: DataConfig) -> None:
    """Make some training rows the validation split, if nothing is held out."""
    train = splits.rows["train"]
    if len(splits.rows["valid"]) or len(splits.rows["test"]) or len(train) < 2:
        return

    parts = held_out(train, config, splits.format)
    splits.rows["train"], splits.rows["valid"], note = parts
    splits.notes.append(f"no validation examples in the file: {note}")


def held_out(rows: Rows, config: DataConfig, row_format: RowFormat) -> tuple[Rows, Rows, str]:
    """Return the rows to train on, the rows to hold out, and a note on how they were chosen."""
    n = max(1, min(_HELD_OUT_MOST, int(len(rows) * _HELD_OUT_SHARE)))
    if config.hold_out == "last":
        return rows[:-n], rows[-n:], f"the last {n} training examples are held out"

    chosen, copies = hold_out(rows, n, row_format, config)
    number = "1 training example is" if len(chosen) == 1 else f"{len(chosen)} training examples are"
    note = f"{number} held out, drawn at random"
    if copies:
        note += f", {copies} of them near-duplicates of others"
    is_trained = np.ones(len(rows), bool)
    is_trained[chosen] = False
    # a list of a million rows takes half the memory
    trained = np.flatnonzero(is_trained).astype(np.int32 if len(rows) < 1 << 31 else np.int64)
    return rows.select(trained), rows.select(np.array(chosen)), note


def suffix_of(file: Path) -> str | None:
    """Return the ending by which a file is read, in lower case; None where it has none."""
    name = file.name.lower()
    return next((each for each in _READERS if name.endswith(each)), None)


def read_rows(file: Path) -> Rows:
    """Return the rows of a file by its ending; .jsonl and .parquet are read when needed."""
    rows = Rows([_source_of(file)])
    if not len(rows):
        raise file_error(file, "has no examples.", "data")
    return rows


def _source_of(file: Path) -> Source:
    """The file may have no rows."""
    if (suffix := suffix_of(file)) is None:
        raise file_error(file, f"must end in {', '.join(_READERS)}.", "unsupported")

    try:
        with errors_of("data"):  # a pipe has no end
            check_regular(file)
        return _READERS[suffix](file)
    except OSError as error:
        raise file_error(file, f"cannot be read ({error.strerror}).") from None


def _json_rows(file: Path) -> ValueList:
    """Return the rows of a JSON list; all of it is in memory."""
    values = parse_json(str(file), file.read_bytes().removeprefix(BOM))
    if not isinstance(values, list):
        kind = type(values).__name__
        raise file_error(file, f"must be a list of examples, but is a {kind}.", "data")
    return ValueList(str(file), values, folder=file.parent)


_READERS: dict[str, Callable[[Path], Source]] = {
    ".jsonl": JsonLines,
    ".json": _json_rows,
    ".parquet": Parquet,
    ".csv": table_rows,
    ".tsv": table_rows,
    ".jsonl.gz": gzip_rows,
    ".csv.gz": table_rows,
    ".tsv.gz": table_rows,
    **dict.fromkeys(TEXT_SUFFIXES, text_rows),
}


def _hf_load(name: str, /, **arguments: Any) -> Any:
    purpose = "no such folder or file here. To take it from the Hugging Face Hub"
    datasets = hub_library(name, purpose)
    with hub_errors(name, "cannot be loaded from the Hub"):
        return datasets.load_dataset(name, **arguments)


def _hf_collection(config: DataConfig) -> tuple[dict[str, Rows], str]:
    """Return the rows of mlx-lm's ``hf_dataset`` key, one entry or several, and their source."""
    entries = config.hf_dataset
    if not isinstance(entries, list):
        entries = [entries]
    features = {name: getattr(config, name) for name in COLUMN_SETTINGS}
    valid_keys = {"path", "name", "train_split", "valid_split", "test_split", "config", *features}
    sources: dict[str, list[Source]] = {split: [] for split in SPLITS}
    paths = []

    for entry in entries:
        path = entry.get("path") or entry.get("name") if isinstance(entry, Mapping) else None
        if not path:
            fault = f"every entry must be a mapping with a 'path', but got {entry!r}."
            raise PackError(fault, "invalid", "hf_dataset", "hf_dataset")
        for key in entry:
            if key not in valid_keys:
                fault = f"unknown key '{key}'. {did_you_mean(key, list(valid_keys))}"
                raise PackError(fault, "unknown", "hf_dataset", "hf_dataset")
        paths.append(str(path))

        shares = {"train": "train[:80%]", "valid": "train[-10%:]"}
        shares |= {split: entry[f"{split}_split"] for split in SPLITS if f"{split}_split" in entry}
        arguments = entry.get("config") or {}
        renames = {entry[name]: features[name] for name in features if name in entry}

        for split, share in shares.items():
            loaded = _hf_load(path, split=share, **arguments)
            renamed = partial(_renamed, renames, label_names(loaded))
            sources[split].append(ValueList(f"{path}/{split}", loaded, renamed))

    return {split: Rows(of_split) for split, of_split in sources.items()}, ", ".join(paths)


def _renamed(
    names: Mapping[str, str], with_names: Callable[[Mapping], Mapping], value: Mapping
) -> dict:
    return {names.get(name, name): column for name, column in with_names(value).items()}


def matching_files(pattern: str) -> list[Path]:
    """Return the files of a pattern by name; none is an error. ``**`` stands for any folders."""
    paths = map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True))
    files = sorted(path for path in paths if not path.is_dir())
    if not files:
        fault = "no file matches. Check the folder, and quote the pattern."
        raise data_error(pattern, fault, "not-found")

    numbered_shards({file: file.name.split(".")[0] for file in files})
    return files


def numbered_shards(stems: dict[Path, str]) -> dict[str, list[Path]]:
    """Return numbered files by their common name, in the order of their numbers.

    ``stems`` has the names of files without their endings. Missing shards are a PackError.
    """
    shards: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    numbers: dict[tuple[Path, str, int], set[int]] = defaultdict(set)
    for file, stem in stems.items():
        if match := _SHARD.fullmatch(stem):
            name, number, count = match.groups(default="0")
            shards[name].append((int(number), file))
            numbers[file.parent, name, int(count)].add(int(number))

    for (folder, name, count), present in numbers.items():
        if len(present) < count:
            fault = (
                f"has {len(present)} of the {count} shards of {name}. Complete the download, or "
                "rename the files without '-of-'."
            )
            raise file_error(folder, fault, "not-found")

    return {name: [file for _, file in sorted(numbered)] for name, numbered in shards.items()}
