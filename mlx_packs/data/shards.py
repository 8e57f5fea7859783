"""Data sets in several files: files of a pattern (``DIR/*.jsonl``), and numbered shards."""

import glob
import re
from collections import defaultdict
from pathlib import Path

from ..errors import PackError

# train-00000-of-00008, train_3, part.12
_SHARD = re.compile(r"(?P<name>.+?)[-_.](?P<number>\d+)(?:-of-(?P<count>\d+))?")


def matching_files(pattern: str) -> list[Path]:
    """Return the files of a pattern by name; none is an error. ``**`` stands for any folders."""
    paths = map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True))
    files = sorted(path for path in paths if not path.is_dir())
    if not files:
        raise PackError(
            f"--data {pattern}: no file matches. Check the folder, and quote the pattern.",
            "not-found",
            "data",
        )

    _check_complete({file: file.name.split(".")[0] for file in files})
    return files


def numbered_shards(stems: dict[Path, str]) -> dict[str, list[Path]]:
    """Return numbered files by their common name, in the order of their numbers.

    ``stems`` has the names of files without their endings. Missing shards are a PackError.
    """
    shards: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for file, stem in stems.items():
        if match := _SHARD.fullmatch(stem):
            shards[match["name"]].append((int(match["number"]), file))

    _check_complete(stems)
    return {name: [file for _, file in sorted(numbered)] for name, numbered in shards.items()}


def _check_complete(stems: dict[Path, str]) -> None:
    """Raise a PackError if the names of shards (``-of-00008``) count more than there are."""
    numbers: dict[tuple[Path, str, int], set[int]] = defaultdict(set)
    for file, stem in stems.items():
        match = _SHARD.fullmatch(stem)
        if match and match["count"]:
            numbers[file.parent, match["name"], int(match["count"])].add(int(match["number"]))

    for (folder, name, count), present in numbers.items():
        if len(present) < count:
            raise PackError(
                f"{folder}: has {len(present)} of the {count} shards of {name}. Complete the "
                "download, or rename the files without '-of-'.",
                "not-found",
                "data",
            )
