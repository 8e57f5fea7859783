"""Commands of `packs` as child processes of the studio, which itself loads no model."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import PackError
from ..reading import parse_json


def command_of(*arguments: str) -> list[str]:
    """Return the command line of `packs` with these arguments, by this Python."""
    return [sys.executable, "-m", "mlx_packs", *arguments]


def report_of(home: Path, *arguments: str) -> dict[str, Any]:
    """Return the JSON report of a command that runs in the home; raise its error."""
    *_, report = reports_of(home, *arguments)
    return report


def reports_of(home: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of JSON that a command prints while it works, and then its report.

    The command is killed when the caller reads no further.

    Raises:
        PackError: the command failed: its own error, with code and flag.
    """
    # a file, since a full pipe would stop a command whose other output is read
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command_of(*arguments, "--json"),
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
        )
        last = ""
        with process:
            try:
                for line in process.stderr:
                    last = line.decode("utf-8", "replace").strip() or last
                    if (parsed := _object(last)) is not None:
                        yield parsed
            finally:
                process.kill()
        output.seek(0)
        text = output.read().decode("utf-8", "replace")

    report = _object(text)
    if report is None:
        raise PackError(f"packs {arguments[0]}: {last or 'ended without a report'}", "unsupported")
    error = report.get("error")
    if isinstance(error, dict):  # a number in reports of packs learn
        raise PackError(error["message"], error["code"], error["flag"])
    yield report


def _object(text: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        value = parse_json(text)
        if isinstance(value, dict):
            return value
    return None
