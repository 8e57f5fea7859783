"""Output of commands: a report as JSON or as lines, and the gates that failed."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from ..errors import Interrupted, PackError
from ..files import to_json
from ..terminal import echo, printable, printable_text

JSON = "mlx_packs.json"  # in `click.Context.meta`


def wants_json() -> bool:
    """Return whether the command that runs was called with --json."""
    return click.get_current_context().meta.get(JSON, False)


@contextmanager
def errors_in_json(meta: Mapping[str, Any]) -> Iterator[None]:
    """Print an error to stdout, too, if ``meta`` of the context says that JSON is wanted."""
    try:
        yield
    except PackError as error:
        if meta.get(JSON) and not isinstance(error, Interrupted):
            with suppress(OSError):  # of a pipe that is closed
                echo(to_json(error.to_json()), end="")
        raise


def print_report(report: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print a report as JSON after --json, else lines about it; neither can steer a terminal."""
    if not wants_json():
        echo("\n".join(_fitted(_runnable(printable(line))) for line in lines))
        return

    assert isinstance(report, Mapping), "--json prints one object"
    echo(to_json(report), end="")


def _runnable(line: str) -> str:
    """Return a line whose command runs as printed, even if `packs` is not on PATH."""
    program = Path(sys.argv[0])
    if program.name != "packs" or shutil.which("packs"):
        return line
    command = shlex.quote(str(program))
    return re.sub(r"(try:? +|^|\| )packs (?=\S)", lambda m: f"{m[1]}{command} ", line, count=1)


def _fitted(line: str) -> str:
    """Wrap a line between words for a terminal; for files and pipes it stays as it is."""
    if not sys.stdout.isatty():
        return line
    from ..display import hanging

    return hanging(line, shutil.get_terminal_size((100, 24)).columns)


def text_table(head: list[str], rows: list[list[str]], width: int = 1000) -> list[str]:
    """Return the lines of a table; the first column is cut to the width, numbers never."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    widths[0] = min(widths[0], max(8, width - sum(each + 2 for each in widths[1:])))

    lines = []
    for name, *figures in [head, *rows]:
        if len(name) > widths[0]:
            name = name[: widths[0] - 1] + "…"
        cells = [f"  {figure:>{each}}" for figure, each in zip(figures, widths[1:], strict=True)]
        lines.append(f"{name:<{widths[0]}}{''.join(cells)}".rstrip())

    return lines


def print_spans(title: str, spans: Iterable[tuple[str, bool]]) -> None:
    """Print texts one after the other below a title: those marked green, or between ⟦ and ⟧."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    colour = console.is_terminal and not console.no_color
    console.print(Text(printable(title), "bold"))

    line = Text()
    for text, marked in spans:
        shown = printable_text(text)
        if marked and not colour:
            shown = f"⟦{shown}⟧"
        line.append(shown, "green" if marked else "dim")

    console.print(line)


def exit_if_failed(failures: Sequence[str]) -> None:
    """Print a line for each gate that failed and exit with code 1; return if none did."""
    for failure in failures:
        echo(f"packs: {printable(failure)}", err=True)
    if failures:
        raise click.exceptions.Exit(1)
