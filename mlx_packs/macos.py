"""Features of macOS: thermal and power states, `caffeinate`, notifications, LaunchAgents.

Nothing else in this package starts a program of macOS but `packs bench`, by `output`. None of it
ever ran on a Mac: tests put programs of the same names in their place, which print what is known
of those.
"""

import ctypes
import hashlib
import os
import plistlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .files import atomic_write, exclusive_writer, make_folder

# Darwin's notification com.apple.system.thermalpressurelevel
THERMAL = ("nominal", "moderate", "heavy", "trapping", "sleeping")
THERMAL_NOTIFICATION = "com.apple.system.thermalpressurelevel"
_SECONDS = 10.0  # that a program may take to answer
_END_S = 120  # that launchd leaves a run to save its checkpoint
# What a LaunchAgent keeps of the environment; tokens are not among it.
_KEPT = re.compile(r"PATH|PYTHONPATH|HF_HOME|HF_HUB_(CACHE|OFFLINE)|MLX_(?!PACKS_SUPERVISED)\w+")

Read = Callable[[Sequence[str]], str | None]


def is_macos() -> bool:
    return sys.platform == "darwin"


def output(command: Sequence[str]) -> str | None:
    """Return the output of a program; None if it cannot be run, or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout + done.stderr


def number(pattern: str, text: str) -> int | None:
    """Return the integer that the first group of a pattern has in a text; None without a match."""
    match = re.search(pattern, text)
    return int(match[1]) if match else None


def low_power_mode(read: Read = output) -> bool | None:
    """Return whether macOS saves energy; None where it does not say."""
    mode = number(r"(?m)^\s*(?:lowpowermode|powermode)\s+(\d)", read(["pmset", "-g"]) or "")
    return None if mode is None else mode == 1


def thermal_pressure(read: Read = output) -> str | None:
    """Return one of `THERMAL`, by the notification or else `pmset -g therm`; None where unknown."""
    level = number(
        r"thermalpressurelevel\s+(\d+)", read(["notifyutil", "-g", THERMAL_NOTIFICATION]) or ""
    )

    if level is not None and level < len(THERMAL):
        return THERMAL[level]
    therm = read(["pmset", "-g", "therm"]) or ""
    level = number(r"(?i)thermal warning level\s*[:=]\s*(\d+)", therm)
    if level is None:  # on Apple silicon, a missing warning means nothing
        return None
    return "heavy" if level else "nominal"


def sysctl(name: str) -> int:
    """Return a 32-bit number of the kernel; 0 where it has none of this name."""
    value = ctypes.c_int32(0)
    length = ctypes.c_size_t(ctypes.sizeof(value))
    call = ctypes.CDLL(None).sysctlbyname
    failed = call(name.encode(), ctypes.byref(value), ctypes.byref(length), None, 0)
    return 0 if failed else value.value


@contextmanager
def kept_awake() -> Iterator[bool]:
    """Keep the Mac from sleeping for as long as the block, or this process, lasts.

    The display may sleep. Yields whether there is `caffeinate`, which does it.
    """
    # -i: no sleep when idle; -s: none at all on AC power; -w: until this process ends
    command = ["caffeinate", "-i", "-s", "-w", str(os.getpid())]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)

    try:  # in a session of its own, which Ctrl-C does not reach while the run is saved
        process = subprocess.Popen(command, start_new_session=True, **quiet)
    except OSError:
        yield False
        return

    try:
        yield True
    finally:
        process.terminate()
        process.wait()


def notify(title: str, text: str) -> None:
    """Show a notification; both texts are arguments of a script, and never part of it."""
    script = []
    for line in (
        "on run argv",
        "display notification (item 2 of argv) with title (item 1 of argv)",
        "end run",
    ):
        script += ["-e", line]
    output(["osascript", *script, title, text])


@dataclass(frozen=True)
class LaunchAgent:
    """A file in ``~/Library/LaunchAgents``, whose command launchd runs at each login.

    It exists from the start of a run to its end: while it exists, the run continues at login.
    """

    label: str

    @classmethod
    def of(cls, pack: Path) -> "LaunchAgent":
        path = str(pack.absolute())
        name = re.sub(r"[^A-Za-z0-9-]", "-", pack.name)
        return cls(f"mlx-packs.{name}.{hashlib.sha256(path.encode()).hexdigest()[:8]}")

    @property
    def file(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{self.label}.plist"

    @property
    def log(self) -> Path:
        return Path.home() / "Library" / "Logs" / f"{self.label}.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time be that of the agent; a PackError if another one is."""
        make_folder(self.file.parent)
        with exclusive_writer(self.file):
            yield

    def write(self, command: Sequence[str]) -> None:
        """Write the file: at login, the command runs in what is the current folder now."""
        variables = {k: v for k, v in os.environ.items() if _KEPT.fullmatch(k)}
        settings = {
            "Label": self.label,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(Path.cwd()),
            "EnvironmentVariables": variables,
            "RunAtLoad": True,
            "ProcessType": "Interactive",  # others are slowed down
            "ExitTimeOut": _END_S,
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }

        make_folder(self.log.parent)
        atomic_write(self.file, plistlib.dumps(settings).decode())

    def remove(self) -> None:
        """Remove the file; launchd forgets its command at the next login."""
        with suppress(FileNotFoundError):
            self.file.unlink()
