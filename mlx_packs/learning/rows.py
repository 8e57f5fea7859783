"""Rated answers as rows to train on: what is written of each, and which rows are held out."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from .. import filesystem
from ..errors import PackError
from ..files import replace_file, write_errors
from ..filesystem import temporary
from ..reading import parse_json

# The file of the rows of each task.
FILES = {"kto": "kto.jsonl", "dpo": "dpo.jsonl", "lm": "chat.jsonl"}
_ABOUT = ("id", "model", "version", "pack")  # columns of a row that nothing is trained on
_HELD_OUT = 0.2  # share of the prompts
LEAST_TRAINED = 16
LEAST_HELD_OUT = 8  # prompts
_LEAST_OF_A_KIND = 4  # good answers, and bad ones, of each part

Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer that can be rated.

    Attributes:
        prompt: the messages before it, as examples have them.
        message: the answer as a message.
        columns: more columns of its rows: tools, variables of the chat template.
        about: model, version and hash of the pack that gave it.
        is_cut: whether it has no end, so that nobody should learn to end there.
    """

    prompt: Sequence[Mapping[str, Any]]
    message: Mapping[str, Any]
    columns: Mapping[str, Any]
    about: Mapping[str, Any]
    is_cut: bool = False

    @property
    def text(self) -> str:
        return self.message["content"] or ""

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing and calls no tool."""
        return not self.text.strip() and not self.message.get("tool_calls")


def rows_of(
    answer: Answer,
    identity: str,
    rating: Literal["up", "down"] | None = None,
    correction: str | None = None,
) -> dict[str, Row]:
    """Return the rows of an answer that was rated or corrected, by the name of their file."""
    about = {"id": identity, **answer.about}
    completion = [dict(answer.message)]
    rows: dict[str, Row] = {}

    if rating is not None:
        rows[FILES["kto"]] = {"completion": completion, "label": rating == "up"}

    good = None
    if correction is not None:
        good = [{"role": "assistant", "content": correction}]
        if not answer.is_empty:
            rows[FILES["dpo"]] = {"chosen": good, "rejected": completion}
    elif rating == "up":
        good = completion
    if good is not None:
        rows[FILES["lm"]] = {"completion": good}

    shared = {"prompt": list(answer.prompt), **answer.columns}
    return {name: {**shared, **row, **about} for name, row in rows.items()}


def write_rows(folder: Path, rows: Mapping[str, Row], replaced: str | None = None) -> None:
    """Add rows by the name of their file; those with the identity ``replaced`` are removed.

    One thread of one process may write at a time.

    Raises:
        PackError: a row is no JSON, or a file cannot be written; all files are as they were.
    """
    lines = {name: _line(row) for name, row in rows.items()}
    with ExitStack() as stack:
        replacements = []
        for name in FILES.values():
            path = folder / name
            if name not in lines and (replaced is None or not path.exists()):
                continue

            stack.enter_context(write_errors(path))
            written = list(_lines(path))
            if replaced is not None:
                written = [line for line in written if _identity_of(line) != replaced]
            if name in lines:
                written.append(lines[name])

            new = stack.enter_context(temporary(path, partial(Path.touch, mode=0o600)))
            new.write_bytes("".join(written).encode(errors="surrogateescape"))
            filesystem.sync(new)
            replacements.append((new, path))

        for new, path in replacements:
            replace_file(new, path)


def _line(row: Row) -> str:
    """Return the line of a row; a PackError if `read_rows` would reject it."""
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        parse_json(line)
    except ValueError as error:
        raise PackError(
            f"id: the answer cannot be kept, since its request cannot be read again as JSON: "
            f"{error}.",
            "conflict",
            "id",
        ) from None
    return line + "\n"


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file; a torn last one, which was never confirmed, is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="\n", errors="surrogateescape") as file:
        for line in file:
            if line.endswith("\n"):
                yield line
            elif _parsed_json(line) is not None:
                yield line + "\n"


def _identity_of(line: str) -> str | None:
    row = _parsed_json(line)
    if not isinstance(row, dict):
        return None
    return row.get("id")


def _parsed_json(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


@dataclass(frozen=True)
class Split:
    """Rows of a task without what is only about them."""

    train: Sequence[Row]
    held_out: Sequence[Row]

    @property
    def count(self) -> int:
        return len(self.train) + len(self.held_out)

    @property
    def fault(self) -> str:
        """What there is too little of, and what to do; empty if there is enough."""
        prompts = len({key_of(row["prompt"]) for row in self.held_out})
        if len(self.train) < LEAST_TRAINED or prompts < LEAST_HELD_OUT:
            trained = (LEAST_TRAINED - len(self.train)) / (1 - _HELD_OUT)
            held_out = (LEAST_HELD_OUT - prompts) / _HELD_OUT
            missing = math.ceil(max(trained, held_out))
            return (
                f"{len(self.train)} examples to train on, and {prompts} prompts that are held out "
                f"(one in five). At least {LEAST_TRAINED} and {LEAST_HELD_OUT} are needed: rate "
                f"answers to about {missing} more prompts."
            )

        faults = [self._fault_of("good", True), self._fault_of("bad", False)]
        return next(filter(None, faults), "")

    def _fault_of(self, kind: str, label: bool) -> str:
        """Return the fault of too few answers of a kind; other kinds are no contrast to them."""
        train = _labelled(self.train, label)
        held_out = _labelled(self.held_out, label)

        if min(train, held_out) >= _LEAST_OF_A_KIND:
            return ""
        return (
            f"{train} {kind} answers to train on, and {held_out} that are held out. At least "
            f"{_LEAST_OF_A_KIND} of each are needed, to tell good from bad: rate more, or learn "
            "from corrections with --task dpo or lm."
        )


def _labelled(rows: Sequence[Row], label: bool) -> int:
    """Return how many rows have this label or, in other tasks, none."""
    return sum(bool(row.get("label", label)) == label for row in rows)


def read_rows(folder: Path, task: str) -> Split:
    """Return the rows of a task; a fifth of the prompts is held out.

    A prompt is held out by its hash, so that it stays held out whatever else is rated.
    """
    path = folder / FILES[task]
    train: list[Row] = []
    held_out: list[Row] = []

    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        row = _parsed(path, number, line)
        columns = {name: value for name, value in row.items() if name not in _ABOUT}
        if is_held_out(row["prompt"]):
            held_out.append(columns)
        else:
            train.append(columns)

    return Split(train, held_out)


def _parsed(path: Path, number: int, line: str) -> Row:
    fault = "must be an object with a prompt"
    try:
        row = parse_json(line)
        if isinstance(row, dict) and "prompt" in row:
            return row
    except ValueError as error:
        fault = f"is not valid JSON: {error}"
    raise PackError(f"{path}:{number}: {fault}. Correct or remove the line.", "data")


def is_held_out(prompt: Any) -> bool:
    """Whether the rows of a prompt are held out: a fifth of all prompts, by their hash."""
    digest = hashlib.sha256(key_of(prompt).encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < _HELD_OUT * 2**64


def key_of(prompt: Any) -> str:
    """Return a text that prompts have in common if they are equal.

    A text is the same prompt as the message of a user with this text.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return json.dumps(prompt, sort_keys=True, ensure_ascii=False)
