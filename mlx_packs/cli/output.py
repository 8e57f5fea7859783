"""What commands print: a report as JSON or as lines, and the gates that failed."""

import json
import re
from collections.abc import Iterable, Sequence

import click

from ..errors import printable

JSON = "mlx_packs.json"  # in `click.Context.meta`


def wants_json() -> bool:
    """Return whether the command that runs was called with --json."""
    return click.get_current_context().meta.get(JSON, False)


def print_report(report: dict | list, lines: Iterable[str]) -> None:
    """Print a report as JSON after --json, else lines about it; neither can steer a terminal."""
    if not wants_json():
        click.echo("\n".join(map(printable, lines)))
        return
    text = json.dumps(report, indent=2, ensure_ascii=False)
    click.echo(re.sub(r"[\x7f-\x9f]", lambda control: f"\\u{ord(control[0]):04x}", text))


def exit_if_failed(failures: Sequence[str]) -> None:
    """Print a line for each gate that failed and exit with code 1; return if none did."""
    for failure in failures:
        click.echo(f"packs: {failure}", err=True)
    if failures:
        raise click.exceptions.Exit(1)
