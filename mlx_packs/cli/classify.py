"""`packs classify`: labels of texts, in a file or in lines of standard input."""

import csv
import io
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from ..errors import PackError
from ..terminal import echo
from . import options
from .options import option

if TYPE_CHECKING:
    from ..config.data import DataConfig
    from ..data.formats import Row
    from ..packs.scored import Prediction

_CHUNK = 64  # batches that are read before their labels are written
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = ".jsonl"


@click.command()
@options.packs("Classifier that `packs train --task classify` has written.")
@options.model_of_pack
@option(
    "--data",
    metavar="FILE",
    help="File with the texts: a table or rows as for training, or .txt with a text in each line.",
    default_text="standard input",
    section="Model and data",
)
@option(
    "--out",
    metavar="FILE",
    help="File to write: .csv or .tsv with the columns of the data and the prediction, or .jsonl.",
    default_text="standard output, as .jsonl",
    section="Output",
)
@options.setting("batch_size", default=8, type=click.IntRange(1))
@option(
    "--top",
    type=click.IntRange(1),
    default_text="all labels",
    help="Number of labels whose probabilities are printed, the most likely first.",
)
@options.matmul_path("auto")
@options.trust_remote_code
@options.backend
def classify(
    packs: tuple[str, ...],
    model: str | None,
    data: str | None,
    out: str | None,
    batch_size: int,
    top: int | None,
    **given,
) -> None:
    """Label texts or chats with a classifier.

    Each line of standard input is a text, a JSON text, or an object with "text" or "messages". Each
    line of standard output is an object with "label" and "probabilities", in the same order;
    "labels" if several may apply, and "score" for a regression. A table gets the columns
    "predicted_label" (or "predicted_labels", "predicted_score") and "probability".
    """
    from ..packs.base import scoring
    from ..packs.compatibility import checked_scorer
    from ..packs.scored import classifier_of

    if len(packs) != 1:
        raise PackError("PACK: name one classifier. Several are not added up.", flag="pack")

    pack = checked_scorer(options.one_pack(packs), "classify")
    target = _output(out, data)
    base = options.load_base(model, pack, given["trust_remote_code"])
    base.check_architecture("classify", "decoder")

    labelled = []
    with scoring(base, pack, given["matmul_path"]) as head:
        classifier = classifier_of(base, pack, head)
        rows = _rows(data, classifier.names)
        while chunk := list(itertools.islice(rows, _CHUNK * batch_size)):
            predictions = classifier.classify(chunk, batch_size)
            if target is None:
                for prediction in predictions:
                    echo(json.dumps(prediction.to_json(top), ensure_ascii=True))
            else:
                labelled += zip((row.value for row in chunk), predictions, strict=True)

    if target is not None:
        _write(target, labelled, top)


def _output(out: str | None, data: str | None) -> Path | None:
    """Return the file to write; a PackError if it cannot be, or is the data."""
    target = options.writable_file(out, "--out")
    if target is None:
        return None

    if target.suffix.lower() not in (*_DELIMITERS, _JSON_LINES):
        raise PackError(f"--out {out}: must end in .csv, .tsv or .jsonl.", "unsupported", "out")
    if data is not None and target.resolve() == Path(data).expanduser().resolve():
        raise PackError(f"--out {out}: is the file of --data. Name another.", "conflict", "out")
    return target


def _rows(data: str | None, names: "DataConfig") -> "Iterator[Row]":
    from ..data.rows import read_rows, suffix_of
    from ..reading import open_regular

    if data is None:
        yield from _lines(sys.stdin.buffer, "stdin", names)
    elif suffix_of(file := Path(data).expanduser()) == ".txt":
        with open_regular(file) as stream:
            yield from _lines(stream, data, names)
    else:
        yield from read_rows(file)


def _lines(stream: IO[bytes], name: str, names: "DataConfig") -> "Iterator[Row]":
    """Yield the rows of a stream; blank lines are none."""
    from ..packs.scored import input_row

    for number, line in enumerate(stream, 1):
        where = f"{name}:{number}"
        if line.strip():
            yield input_row(where, _value(where, line), names)


def _value(where: str, line: bytes) -> Any:
    """Return the JSON of a line; a line that is no text, list or object of JSON is the text."""
    from ..data.json_lines import parse_line
    from ..data.row_format import RowError

    is_structured = line.lstrip()[:1] in (b"{", b"[")
    try:
        value = parse_line(where, line)
    except RowError as error:
        if is_structured or error.reason != "not JSON":
            raise
        return line.decode().strip()

    if is_structured or isinstance(value, str):
        return value
    return line.decode().strip()


def _write(target: Path, labelled: "Sequence[tuple[dict, Prediction]]", top: int | None) -> None:
    from ..files import atomic_write

    suffix = target.suffix.lower()
    if suffix == _JSON_LINES:
        lines = [json.dumps(each.to_json(top), ensure_ascii=False) for _, each in labelled]
        text = "".join(f"{line}\n" for line in lines)
    else:
        text = _table(labelled, _DELIMITERS[suffix])
    atomic_write(target, text)

    counts = Counter(each.label for _, each in labelled if isinstance(each.label, str))
    shown = "".join(f" · {label} {count:,}" for label, count in counts.most_common(8))
    echo(f"out     {target} · {len(labelled):,} rows{shown}")


def _table(labelled: "Iterable[tuple[dict, Prediction]]", delimiter: str) -> str:
    rows = []
    for values, prediction in labelled:
        name, value = next(iter(prediction.to_json().items()))
        added = {f"predicted_{name}": value}
        if name == "label":
            added["probability"] = f"{prediction.probabilities[value]:.4f}"
        rows.append({**values, **added})

    columns = dict.fromkeys(name for row in rows for name in row)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        others = {k: v for k, v in row.items() if not isinstance(v, str | None)}
        texts = {k: json.dumps(v, ensure_ascii=False) for k, v in others.items()}
        writer.writerow({**row, **texts})
    return stream.getvalue()
