"""What commands print: a report as JSON or as lines, and the gates that failed."""

import json
import re
from collections.abc import Iterable, Sequence

import click

from ..errors import printable


def print_report(report: dict | list, as_json: bool, lines: Iterable[str]) -> None:
    """Print a report as JSON, or lines about it; neither can steer a terminal."""
    if not as_json:
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
