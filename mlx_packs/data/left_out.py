"""What rows say that no token shows: unused columns, and parts the chat template leaves out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..bases.chat_template import unread_variables
from ..bases.tokenizer import with_template
from ..bases.turns import answer_end_note
from ..config.data import DataConfig
from ..errors import PackError, any_of
from .chat_formats import ConversationFormat, completion_row
from .conversations import Conversation
from .formats import COMPLETION, PREFERENCE, PROMPT, Row, RowFormat, suggested_tasks
from .near_copies import compared
from .preferences import both_completions
from .rendered_parts import lost_parts, remedy
from .row_format import RowError, optional
from .sources import as_rows

_LOOKED_AT = 10_000  # rows of a larger split
_MOST_ANSWERS = 300  # that are searched for thoughts
_THINK = "<think>"


def template_notes(
    rows: Sequence[Row], row_format: RowFormat, names: DataConfig, tokenizer: Any
) -> list[str]:
    """Return a note for each kind of thing in rows that nothing is trained on.

    An unusual end of answers has one, too. From more rows than `_LOOKED_AT`, blocks are read.
    """
    tokenizer = with_template(tokenizer, names.chat_template)
    unused: dict[str, None] = {}
    tasks: list[str] = []  # that train on columns which are not used
    rendered = _Rendered()

    for _, row in compared(as_rows(rows), _LOOKED_AT):
        try:
            if not isinstance(row.value, Mapping):
                continue
        except RowError:  # encoding names such rows
            continue

        used = row_format.used(row, names)
        columns = [c for c in row.value if c not in used and optional(row, c) is not None]
        if any(column not in unused for column in columns):
            unused |= dict.fromkeys(columns)
            tasks = tasks or suggested_tasks(row, names, columns)
        for conversation in conversations_of(row, row_format, names, tokenizer):
            rendered.add(conversation)

    notes = rendered.notes(tokenizer)
    if unused:
        note = f"columns that are not used: {', '.join(unused)}"
        if tasks:
            note += f"; train on them with --task {any_of(tasks)}"
        notes.insert(0, note)
    is_rendered = isinstance(row_format, ConversationFormat) or row_format in (PREFERENCE, PROMPT)
    if is_rendered and (end := answer_end_note(tokenizer)):
        notes.append(end)
    return notes


@dataclass
class _Rendered:
    """What the chat template does with conversations, and the first place of each fault."""

    variables: dict[str, str] = field(default_factory=dict)
    shapes: set[tuple] = field(default_factory=set)  # of parts that are rendered
    lost: dict[str, str] = field(default_factory=dict)  # by kinds of parts
    bare_answer: str = ""  # it lacks the thoughts that its prompt opens
    answers: int = 0

    def add(self, conversation: Conversation) -> None:
        self.variables = dict.fromkeys(conversation.variables, conversation.where) | self.variables
        for kind, place in lost_parts(conversation, self.shapes, lambda k: k not in self.lost):
            self.lost.setdefault(kind, f"{conversation.where}{place}")

        if not self.bare_answer and self.answers < _MOST_ANSWERS:
            self.answers += 1
            if _lacks_opened_thoughts(conversation):
                self.bare_answer = conversation.where

    def notes(self, tokenizer: Any) -> list[str]:
        notes = []
        if unread := unread_variables(tokenizer, self.variables):
            notes.append(
                f"the chat template does not read {', '.join(unread)}, the first in "
                f"{self.variables[unread[0]]}. Check the names in --template-kwargs and in the "
                "column chat_template_kwargs"
            )

        for kind, place in self.lost.items():
            notes.append(
                f"the chat template leaves out {kind}, the first in {place}. {remedy(kind)}"
            )
        if self.bare_answer:
            notes.append(
                "the chat template opens thoughts at the end of a prompt, but the answer in "
                f"{self.bare_answer} has none: in use it would count as thoughts. Write thoughts "
                "into the answers, or set a variable of the template that turns thoughts off, as "
                "in --template-kwargs '{\"enable_thinking\": false}'"
            )
        return notes


def conversations_of(
    row: Row, row_format: RowFormat, names: DataConfig, tokenizer: Any = None
) -> Iterator[Conversation]:
    """Yield the conversations that the chat template renders; a bad row has none."""
    try:
        if row_format is PREFERENCE:
            for side in both_completions([row], names):
                yield COMPLETION.read(side, names, tokenizer)
        elif row_format is PROMPT:
            prompt = completion_row(row, names, row.value[names.prompt_feature])
            prompt = COMPLETION.read(prompt, names, tokenizer)
            yield replace(prompt, messages=prompt.messages[:-1])
        elif isinstance(row_format, ConversationFormat) and row_format.matches(row, names):
            yield row_format.read(row, names, tokenizer)
    except (PackError, KeyError):  # encoding names such rows
        return


def _lacks_opened_thoughts(conversation: Conversation) -> bool:
    """Whether the prompt of the last answer ends with a mark that the answer lacks."""
    if conversation.messages[-1]["role"] != "assistant":
        return False

    marks = (_THINK, getattr(conversation.tokenizer, "think_start", None) or _THINK)
    try:
        prompt = conversation.render(conversation.messages[:-1], True).rstrip()
        if not prompt.endswith(marks):
            return False
        return not conversation.render(conversation.messages).startswith(prompt)
    except RowError:  # the template does not take the prompt
        return False
