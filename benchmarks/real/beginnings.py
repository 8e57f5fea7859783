"""What the examples of a part begin with, before their own question: a system prompt."""

from collections.abc import Callable, Sequence

_SHOTS = 3
_COMMANDS = (
    "You are an assistant for the command line. You get the name of a tool and a purpose, and answer "
    "with one command that serves it, and with nothing else: no explanation, no quotation marks, no "
    "prompt sign. Write what the user has to replace in double braces, such as {{path/to/file}}. "
    "Prefer long options to short ones where the tool has both, and never use an option that the tool "
    "does not have."
)


def labels(rows: Sequence[dict]) -> str:
    """Return an instruction that lists all answers of rows."""
    answers = sorted({message["content"] for message in _messages(rows, "assistant")})
    return f"Answer with the intent of the message, which is one of: {', '.join(answers)}."


def shots(rows: Sequence[dict]) -> str:
    """Return an instruction with the last rows as worked examples."""
    chosen = rows[-_SHOTS:]
    questions, answers = _messages(chosen, "user"), _messages(chosen, "assistant")
    examples = [
        f"{question['content']}\n{answer['content']}"
        for question, answer in zip(questions, answers, strict=True)
    ]
    return "\n\n".join(["Solve the problem as in these examples.", *examples])


def commands(rows: Sequence[dict]) -> str:
    """Return an instruction for answers that are commands."""
    return _COMMANDS


def _messages(rows: Sequence[dict], role: str) -> list[dict]:
    return [message for row in rows for message in row["messages"] if message["role"] == role]


BEGINNINGS: dict[str, Callable[[Sequence[dict]], str]] = {
    "labels": labels,
    "shots": shots,
    "commands": commands,
}


def beginning_with(rows: Sequence[dict], text: str) -> list[dict]:
    """Return rows whose system prompt is a text."""
    system = {"role": "system", "content": text}
    return [{**row, "messages": [system, *row["messages"]]} for row in rows]
