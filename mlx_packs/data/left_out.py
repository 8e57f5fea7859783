"""What rows say that no token shows: unused columns, and parts the chat template leaves out."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..bases.chat_template import unread_variables
from ..bases.tokenizer import with_template
from ..bases.turns import answer_end_note
from ..config.data import DataConfig
from ..errors import PackError, any_of
from .chat_formats import ConversationFormat
from .conversations import Conversation
from .formats import COMPLETION, PREFERENCE, PROMPT, Row, RowFormat, suggested_tasks
from .near_copies import compared
from .preferences import both_completions
from .prompts import with_placeholder
from .rendered_parts import Part, checked_parts, remedy
from .row_format import RowError, optional
from .sources import as_rows

_LOOKED_AT = 10_000  # rows of a larger split
_RENDERINGS = 300  # of a kind of part
_MOST_NAMES = 8  # of columns that a note has
_THINK = "<think>"


def template_notes(
    rows: Sequence[Row], row_format: RowFormat, names: DataConfig, tokenizer: Any
) -> list[str]:
    """Return a note for each kind of thing in rows that nothing is trained on.

    An unusual end of answers in rendered rows has one, too. From more than
    `_LOOKED_AT` rows, blocks of that many are read.
    """
    tokenizer = with_template(tokenizer, names.chat_template)
    unused: dict[str, None] = {}
    variables: dict[str, str] = {}  # and the first row that has it
    tasks: list[str] = []  # that train on columns which are not used
    checks = _Checks()

    for _, row in compared(as_rows(rows), _LOOKED_AT):
        try:
            if not isinstance(row.value, Mapping):
                continue
        except RowError:  # encoding names such rows
            continue

        used = row_format.used(row, names)
        columns = [c for c in row.value if c not in used and optional(row, c) is not None]
        if new := [column for column in columns if column not in unused]:
            unused |= dict.fromkeys(new)
            tasks = tasks or suggested_tasks(row, names, columns)

        for conversation in _conversations(row, row_format, names, tokenizer):
            checks.add(conversation)
            variables = dict.fromkeys(conversation.variables, conversation.where) | variables

    unread = {name: variables[name] for name in unread_variables(tokenizer, variables)}
    notes = [*_unread_note(unread), *checks.notes()]
    if unused:
        note = f"columns that are not used: {_listed(list(unused))}"
        if tasks:
            note += f"; train on them with --task {any_of(tasks)}"
        notes.insert(0, note)
    if _is_rendered(row_format) and (end := answer_end_note(tokenizer)):
        notes.append(end)
    return notes


def _is_rendered(row_format: RowFormat) -> bool:
    return isinstance(row_format, ConversationFormat) or row_format in (PREFERENCE, PROMPT)


def _unread_note(variables: dict[str, str]) -> list[str]:
    """``variables`` has the first row of each variable."""
    if not variables:
        return []
    return [
        f"the chat template does not read {_listed(list(variables))}, the first in "
        f"{next(iter(variables.values()))}. Check the names in --template-kwargs and in the column "
        "chat_template_kwargs"
    ]


def _listed(names: list[str]) -> str:
    text = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    if more > 0:
        text += f" and {more} more"
    return text


def _conversations(
    row: Row, row_format: RowFormat, names: DataConfig, tokenizer: Any
) -> Iterator[Conversation]:
    """Yield the conversations that the chat template renders; a bad row has none."""
    if not _is_rendered(row_format):
        return

    try:
        if row_format is PREFERENCE:
            for side in both_completions([row], names):
                yield COMPLETION.read(side, names, tokenizer)
        elif row_format is PROMPT:
            prompt = COMPLETION.read(with_placeholder(row, names), names, tokenizer)
            yield replace(prompt, messages=prompt.messages[:-1])
        elif isinstance(row_format, ConversationFormat) and row_format.matches(row, names):
            yield row_format.read(row, names, tokenizer)
    except (PackError, KeyError):  # encoding names such rows
        return


@dataclass
class _Count:
    """How many parts of a kind were checked and are missing, and where the first of them is."""

    checked: int = 0
    missing: int = 0
    first: str = ""

    def add(self, is_missing: bool, place: str) -> None:
        self.checked += 1
        self.missing += is_missing
        if is_missing:
            self.first = self.first or place


class _Checks:
    """Parts of conversations that the chat template leaves out, and thoughts that it opens.

    Up to `_RENDERINGS` parts of each kind are checked, and the first part of each shape.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, _Count] = defaultdict(_Count)
        self._shapes: set[tuple] = set()
        self._opened = _Count()

    def add(self, conversation: Conversation) -> None:
        def is_checked(part: Part) -> bool:
            return self._kinds[part.kind].checked < _RENDERINGS or part.shape not in self._shapes

        for part, is_lost in checked_parts(conversation, is_checked):
            self._shapes.add(part.shape)
            self._kinds[part.kind].add(is_lost, f"{conversation.where}{part.place}")

        is_answer = conversation.messages[-1]["role"] == "assistant"
        if is_answer and self._opened.checked < _RENDERINGS:
            with suppress(RowError):  # the template does not take the prompt
                self._opened.add(_lacks_opened_thoughts(conversation), conversation.where)

    def notes(self) -> list[str]:
        notes = [
            f"the chat template leaves out {kind}: {count.missing:,} of {count.checked:,} checked, "
            f"the first in {count.first}. {remedy(kind)}"
            for kind, count in self._kinds.items()
            if count.missing
        ]

        if count := self._opened.missing:
            notes.append(
                f"the chat template opens thoughts at the end of a prompt, but {count:,} of "
                f"{self._opened.checked:,} answers checked have none, the first in "
                f"{self._opened.first}: in use they would count as thoughts. Write thoughts into "
                "them, or set a variable of the template that turns thoughts off, as in "
                "--template-kwargs '{\"enable_thinking\": false}'"
            )
        return notes


def _lacks_opened_thoughts(conversation: Conversation) -> bool:
    """Whether the prompt of the last answer ends with a mark that the answer lacks."""
    before = conversation.messages[:-1]
    prompt = conversation.render(before, True).rstrip()
    marks = (_THINK, getattr(conversation.tokenizer, "think_start", None) or _THINK)

    if not prompt.endswith(marks):
        return False
    return not conversation.render(conversation.messages).startswith(prompt)
