"""A run that nobody watches: the Mac stays awake while it trains, and notifies of its end."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from .. import macos
from ..display import Display, clock
from ..errors import PackError

# Set by a sweep for its trials: it notifies of its end itself.
SUPERVISED = "MLX_PACKS_SUPERVISED"
# The exit code of a program that a defect ends.
CRASHED = 70
NOTIFIED_S = 600.0  # from which on the end of a run is worth a notification


def program(module: str) -> tuple[str, ...]:
    """Return the command that calls ``main`` of a module of this package in a new process.

    It is `python -m` without the current folder on the path, whose files may be called as modules.
    """
    code = (
        f"import sys; sys.path = [*filter(None, sys.path), {str(Path(__file__).parents[2])!r}]; "
        f"from mlx_packs.{module} import main; main()"
    )
    return (sys.executable, "-c", code)


@contextmanager
def unattended(awake: bool, pack: Path, display: Display) -> Iterator[None]:
    """Keep a Mac ``awake`` during a run, and notify of its end; elsewhere do nothing."""
    start = time.monotonic()
    keeping = macos.kept_awake() if awake and macos.is_macos() else nullcontext(None)

    with keeping as is_kept:
        if is_kept:
            display.line("awake", "this Mac does not sleep until the run ends (--no-awake lets it)")
        elif is_kept is False:
            display.line("note", "caffeinate cannot be run: this Mac may sleep during the run")

        try:
            yield
        except Exception as error:
            reason = error.message if isinstance(error, PackError) else type(error).__name__
            if not (isinstance(error, PackError) and error.code == "interrupted"):
                announce(start, pack, f"ended early: {reason}")
            raise
    announce(start, pack, "is ready")


def announce(start: float, pack: Path, what: str) -> None:
    """Notify on a Mac that a run is over, if it took long and no parent process will say so.

    ``start`` is as `time.monotonic` has it; ``what`` is true of the pack now.
    """
    seconds = time.monotonic() - start
    if seconds >= NOTIFIED_S and macos.is_macos() and SUPERVISED not in os.environ:
        macos.notify("mlx-packs", f"{pack} {what} ({clock(seconds)})")
