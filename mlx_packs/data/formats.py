"""Row formats: which columns each has, and what becomes of a row.

To add a format, write its class and name it in `FORMATS`; one that a single task trains on is named
in the facts of the task.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..config.choices import TASKS
from ..config.data import DataConfig
from ..errors import PackError, any_of
from .chat_formats import Alpaca, Chat, Completion
from .chat_formats import TokenFormat as TokenFormat
from .conversations import PlainText
from .row_format import Row as Row
from .row_format import RowError, is_missing, shown, text_of
from .row_format import RowFormat as RowFormat
from .row_format import check_unicode as check_unicode
from .task_formats import PREFERENCE as PREFERENCE
from .task_formats import PROMPT as PROMPT


@dataclass(frozen=True, eq=False)
class Text(TokenFormat):
    """A plain text, all of which is supervised."""

    name: str = "text"
    required: tuple[str, ...] = ("text_feature",)
    special_tokens: bool = True

    def read(self, row: Row, names: DataConfig, tokenizer: Any = None) -> PlainText:
        return PlainText(row.where, text_of(row, names.text_feature), names.text_feature, tokenizer)

    def resolve_loss_on(self, loss_on: str | None) -> str:
        """Anything but ``all`` is an error: a text has no prompt that could be left out."""
        if loss_on not in (None, "all"):
            raise PackError(
                f"--loss-on {loss_on}: text examples have no prompt. Use --loss-on all.", "conflict"
            )
        return "all"


COMPLETION = Completion()
# A row is of the first format that it matches; mlx-lm has the same order of the first three.
CHAT = Chat()
TEXT = Text()
SHAREGPT = Chat("sharegpt", ("conversations",))  # turns with from and value, or role and content
TOKEN_FORMATS: tuple[TokenFormat, ...] = (COMPLETION, CHAT, TEXT, Alpaca(), SHAREGPT)
_OF_TASKS: dict[str, tuple[RowFormat, ...]] = {
    name: TASKS.resolve(name, facts.formats) for name, facts in TASKS.items() if facts.formats
}
_OTHERS = [each for formats in _OF_TASKS.values() for each in formats if each is not PROMPT]
# Every prompt is one of `PROMPT`, too, which therefore is the last.
FORMATS: tuple[RowFormat, ...] = tuple(
    dict.fromkeys((*TOKEN_FORMATS, PREFERENCE, *_OTHERS, PROMPT))
)


def own_formats(task: str) -> tuple[RowFormat, ...]:
    """Return the formats of rows that a task trains on."""
    if TASKS[task].formats is None:
        return TOKEN_FORMATS
    return _OF_TASKS.get(task) or TASKS.resolve(task, TASKS[task].formats)


def formats_of(task: str) -> tuple[RowFormat, ...]:
    """Return the formats that rows may have, the task's own first."""
    return tuple(dict.fromkeys((*own_formats(task), *FORMATS)))


def tasks_of(row_format: RowFormat) -> list[str]:
    """Return the built-in tasks whose own format it is."""
    return [task for task, formats in _OF_TASKS.items() if row_format in formats]


def suggested_tasks(row: Row, names: DataConfig, unused: Iterable[str]) -> list[str]:
    """Return the built-in tasks that train on most columns which are ``unused`` by another one."""
    columns = set(unused)
    covered = {
        each: len(columns & each.used(row, names)) for each in _OTHERS if each.matches(row, names)
    }
    most = max(covered.values(), default=0)
    suitable = [each for each, count in covered.items() if count == most > 0]
    return list(dict.fromkeys(task for each in suitable for task in tasks_of(each)))


def with_task(error: PackError, row: Row, names: DataConfig) -> PackError:
    """Return the error of a row with the task that would train on its other columns."""
    tasks: list[str] = []
    with suppress(PackError):  # a row that cannot be read
        unused = set(row.value) - format_of(row, names).used(row, names)
        tasks = suggested_tasks(row, names, unused)
    if not tasks:
        return error

    advice = f" Its other columns are for --task {any_of(tasks)}."
    error.message += advice
    error.text += advice
    error.flag = "task"
    return error


def format_of(row: Row, names: DataConfig, formats: Sequence[RowFormat] = FORMATS) -> RowFormat:
    """Return the first of ``formats`` that a row matches; a row without one is an error.

    A column that is null, as in tables put together, only counts if no other format matches.
    """
    if not isinstance(row.value, Mapping):
        fault = f"must be a JSON object, but is a {type(row.value).__name__}."
        raise row.error(fault, "not an object")

    matching = (each for each in formats if each.matches(row, names))
    first = None
    for row_format in matching:
        first = first or row_format
        columns = row_format.columns(names)
        values = [row.value[row_format.column(row, name)] for name in columns]
        if not any(map(is_missing, values)) and any(value != "" for value in values):
            return row_format
    if first is not None:
        return first

    known = " or ".join("{" + ", ".join(each) + "}" for each in _least_columns(formats, names))
    present = shown(sorted(row.value)) if row.value else "none"
    fault = f"must have the columns {known}, but has {present}."
    flag: str | None = "task"
    if tasks := suggested_tasks(row, names, row.value):
        fault += f" Pass --task {any_of(tasks)}, which trains on these."
    elif not any(isinstance(each, TokenFormat) for each in formats):
        fault += " Other examples are for --task lm."
    else:
        fault = f"has {present}. {_naming(row, names, formats)} The formats are {known}."
        flag = None
    error = row.error(fault, "missing columns", flag)
    error.columns = sorted(row.value)
    raise error


def _naming(row: Row, names: DataConfig, formats: Sequence[RowFormat]) -> str:
    """Return how a run reads columns of other names, with the names in a row."""
    texts = [name for name, value in row.value.items() if isinstance(value, str) and len(name) < 60]
    texts.sort(key=lambda name: (name != names.prompt_feature, name == names.completion_feature))
    prompt, completion = [*map(shlex.quote, texts), "COLUMN", "COLUMN"][:2]
    flags = f"--prompt-feature {prompt} --completion-feature {completion}"
    if len(texts) == 1 and TEXT in formats:
        flags = f"--text-feature {prompt}"
    return f"Name the columns to train on, such as {flags}."


def _least_columns(formats: Sequence[RowFormat], names: DataConfig) -> list[tuple[str, ...]]:
    """Return the columns of each format, without formats that have more than an earlier one."""
    least: list[tuple[str, ...]] = []
    for row_format in formats:
        columns = row_format.columns(names)
        if not any(set(other) <= set(columns) for other in least):
            least.append(columns)

    return least


def check_format(
    row: Row,
    row_format: RowFormat,
    first: str,
    names: DataConfig,
    formats: Sequence[RowFormat] = FORMATS,
) -> None:
    """Raise an error if a row has another format than the row called ``first``."""
    if (other := format_of(row, names, formats)).name != row_format.name:
        example = first if first != row.where else "the first example"
        raise row.error(
            f"mixed formats: this example is {other.name}, but {example} is {row_format.name}.",
            "another format",
        )


def first_format(
    rows: Sequence[Row], names: DataConfig, formats: Sequence[RowFormat] = FORMATS
) -> tuple[Row, RowFormat]:
    """Return the first row that has one of ``formats``, and that format.

    The first row's error is raised if it stops the run (``names.on_bad_row``) or no row has one.
    """
    first = None
    for row in rows:
        try:
            return row, format_of(row, names, formats)
        except RowError as error:
            if names.on_bad_row == "stop":
                raise
            first = first or error

    raise first or PackError("--data: the split has no examples.", "data")
