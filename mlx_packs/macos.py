"""Features of macOS: thermal and power states, `caffeinate`.

Nothing else in this package starts a program of macOS but `packs bench`, by `output`. None of it
ever ran on a Mac: tests put programs of the same names in their place, which print what is known
of those.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# Darwin's notification com.apple.system.thermalpressurelevel
THERMAL = ("nominal", "moderate", "heavy", "trapping", "sleeping")
THERMAL_NOTIFICATION = "com.apple.system.thermalpressurelevel"
_ANSWER_TIMEOUT_S = 10.0


def is_macos() -> bool:
    return sys.platform == "darwin"


def output(command: Sequence[str]) -> str | None:
    """Return the output of a program; None if it cannot be run, or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout + done.stderr


def number(pattern: str, text: str) -> int | None:
    """Return the integer that the first group of a pattern has in a text; None without a match."""
    match = re.search(pattern, text)
    return int(match[1]) if match else None


def low_power_mode() -> bool | None:
    """Return whether macOS saves energy; None where it does not say."""
    mode = number(r"(?m)^\s*(?:lowpowermode|powermode)\s+(\d)", output(["pmset", "-g"]) or "")
    return None if mode is None else mode == 1


def thermal_pressure() -> str | None:
    """Return one of `THERMAL`, by the notification; None where unknown."""
    level = number(
        r"thermalpressurelevel\s+(\d+)", output(["notifyutil", "-g", THERMAL_NOTIFICATION]) or ""
    )
    return dict(enumerate(THERMAL)).get(level)


def sysctl(name: str) -> int:
    """Return a 32-bit number of the kernel; 0 where it has none of this name."""
    value = ctypes.c_int32(0)
    length = ctypes.c_size_t(ctypes.sizeof(value))
    call = ctypes.CDLL(None).sysctlbyname
    failed = call(name.encode(), ctypes.byref(value), ctypes.byref(length), None, 0)
    return 0 if failed else value.value


@contextmanager
def kept_awake(say: Callable[[str, str], object]) -> Iterator[None]:
    """Keep the Mac, but not its display, from sleeping while the block or this process lasts.

    ``say`` shows a label and a text: whether there is `caffeinate`, which does it.
    """
    # -i: no sleep when idle; -s: none at all on AC power; -w: until this process ends
    command = ["caffeinate", "-i", "-s", "-w", str(os.getpid())]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)

    try:  # in a session of its own, which Ctrl-C does not reach while the run is saved
        process = subprocess.Popen(command, start_new_session=True, **quiet)
    except OSError:
        say("note", "caffeinate cannot be run: this Mac may sleep during the run")
        yield
        return

    say("awake", "this Mac does not sleep until the run ends (--no-awake lets it)")
    try:
        yield
    finally:
        process.terminate()
        process.wait()
