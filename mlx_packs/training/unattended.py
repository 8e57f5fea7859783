"""A run that nobody watches: a Mac stays awake while it trains."""

from collections.abc import Iterator
from contextlib import contextmanager

from .. import macos
from ..display import Display


@contextmanager
def unattended(awake: bool, display: Display) -> Iterator[None]:
    """Keep a Mac ``awake`` during a run, and say so; elsewhere do nothing."""
    if not (awake and macos.is_macos()):
        yield
        return

    with macos.kept_awake() as is_kept:
        if is_kept:
            display.line("awake", "this Mac does not sleep until the run ends (--no-awake lets it)")
        else:
            display.line("note", "caffeinate cannot be run: this Mac may sleep during the run")
        yield
