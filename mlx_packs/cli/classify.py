"""`packs classify`: rows of JSON on standard input, their labels on standard output."""

import itertools
import json
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

import click

from ..errors import PackError
from ..terminal import echo
from . import options
from .options import option

if TYPE_CHECKING:
    from ..config.data import DataConfig
    from ..data.formats import Row

_CHUNK = 64  # batches that are read before their labels are written


@click.command()
@options.packs("Classifier that `packs train --task classify` has written.")
@options.model_of_pack
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
    batch_size: int,
    top: int | None,
    matmul_path: str,
    trust_remote_code: bool,
) -> None:
    """Label texts or chats with a classifier.

    Each line of standard input is a JSON text, or an object with "text" or "messages". Each line of
    standard output is an object with "label" and "probabilities", in the same order; "labels" if
    several may apply, and "score" for a regression.
    """
    from ..memory.matmul_path import generation_path
    from ..packs.base import load_base_for
    from ..packs.classify import check_classifier, open_classifier

    if len(packs) != 1:
        raise PackError("--pack: name one classifier. Several are not added up.", flag="pack")

    pack = options.one_pack(packs)
    check_classifier(pack)
    base = load_base_for(pack, options.base_of(model, pack), trust_remote_code)
    base.check_architecture("classify", "decoder")
    if matmul_path == "auto":
        matmul_path = generation_path(base.model)

    with open_classifier(base, pack, matmul_path) as classifier:
        rows = _rows(sys.stdin.buffer, classifier.names)
        while chunk := list(itertools.islice(rows, _CHUNK * batch_size)):
            for prediction in classifier.classify(chunk, batch_size):
                echo(json.dumps(prediction.to_json(top), ensure_ascii=True))


def _rows(stream: IO[bytes], names: "DataConfig") -> "Iterator[Row]":
    """Yield the rows of a stream; blank lines are none."""
    from ..data.json_lines import parse_line
    from ..packs.classify import input_row

    for number, line in enumerate(stream, 1):
        where = f"stdin:{number}"
        if line.strip():
            yield input_row(where, parse_line(where, line), names)
