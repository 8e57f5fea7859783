"""Rows that come one after another: a data set of the Hub as a stream, on disk as it comes.

Training reads rows in any order and more than once, so a stream is written to JSONL, with one row
in memory at a time; the files of the data set are not downloaded as a whole.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import date, time
from functools import partial
from typing import Any, BinaryIO

from ..cache import key_of
from ..errors import library_errors
from .images import stored_text
from .in_memory import SPLIT_NAMES
from .json_lines import ROWS, JsonLines
from .row_format import label_names, plain
from .sources import Rows, data_error

STREAMED = "hf:"
_NAME = re.compile(r"hf:(?P<name>[\w-][\w.-]*(?:/[\w.-]+)?)(?:\[:(?P<count>\d+)\])?", re.ASCII)
_VERSION = 2  # of the copies


def hub_splits(data: str, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the splits of a data set of the Hub by our names; one without train is an error."""
    splits = {
        split: next((loaded[name] for name in names if name in loaded), None)
        for split, names in SPLIT_NAMES.items()
    }
    if splits["train"] is None:
        raise data_error(data, f"has no train split, only {', '.join(loaded)}.")
    return {split: values for split, values in splits.items() if values is not None}


def hub_stream(data: str) -> dict[str, Rows]:
    """Return every split of a data set of the Hub, read as a stream: ``hf:owner/name``.

    ``hf:owner/name[:1000]`` has the first 1000 rows of each. The copy is kept by the revision of
    the data set, unless the stream is interrupted.
    """
    match = _NAME.fullmatch(data)
    if not match:
        fault = (
            "must be hf:owner/name, or hf:owner/name[:1000] for the first 1000 rows of each split."
        )
        raise data_error(data, fault, "invalid")

    count = int(match["count"]) if match["count"] else None
    datasets = hub_library(data, "to stream from the Hugging Face Hub")
    from huggingface_hub import dataset_info

    with hub_errors(data, "cannot be streamed"):
        revision = dataset_info(match["name"]).sha
        streams = datasets.load_dataset(match["name"], revision=revision, streaming=True)

    rows = {}
    for split, stream in hub_splits(data, streams).items():
        name = f"{data}/{split}"
        values = map(label_names(stream), itertools.islice(stream, count))
        # written if it is missing
        file = f"{key_of(name, str(revision), _VERSION)}-stream.jsonl"
        copy = ROWS.file(file, partial(_write, name, values))
        rows[split] = Rows([JsonLines(copy, name, has_same_lines=False)])
    return rows


def _write(name: str, values: Iterable[Mapping], file: BinaryIO) -> None:
    """Write rows as lines of JSON: dates in ISO format, images and bytes as data URLs."""

    def text(value: Any) -> str:
        return value.isoformat() if isinstance(value, (date, time)) else stored_text(value)

    source = iter(values)
    while True:
        with hub_errors(name, "cannot be streamed"):
            value = next(source, None)

        if value is None:
            return

        line = json.dumps(plain(value), ensure_ascii=False, default=text)
        file.write(line.encode(errors="surrogatepass") + b"\n")


def hub_library(data: str, purpose: str) -> Any:
    """Return the library `datasets`."""
    try:
        import datasets
    except ImportError:
        raise data_error(data, f"{purpose}, run `pip install datasets`.", "dependency") from None
    return datasets


def hub_errors(data: str, fault: str) -> AbstractContextManager:
    return library_errors(lambda reason: data_error(data, f"{fault}: {reason[:200]}", "network"))
