"""`packs train --supervise`: a run in a process of its own, which continues after it was killed.

Its messages reach the terminal at once, as if it had it to itself.
"""

import fcntl
import os
import pty
import re
import select
import shlex
import subprocess
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGHUP, SIGKILL, SIGTERM, Signals

from .. import macos, signals
from ..display import Display
from ..distributed.link import GONE
from ..errors import Code, PackError, RunStopped
from ..memory.pressure import LOW, memory_pressure, oom_kills
from ..terminal import echo, has_terminal, pass_on, terminal_size
from ..training.checkpoint import batches_of
from ..training.run_folder import checkpoints, run_folder
from ..training.unattended import SUPERVISED, announce, program

_TICK_S = 1.0  # between two calls of ``watch``
_TAIL_BYTES = 1 << 14  # of its messages that are stored
_SHOW_CURSOR = b"\x1b[?25h\n"  # which the progress bar of a process that was killed has hidden
PROGRAM = (*program("cli.main"), "train")
# Exit codes of runs that are over.
_FINAL = {0, 1, 2, *(128 + number for number in signals.NUMBERS)}
MAX_RESTARTS = 5  # by default
_SHORT_S = 10.0  # before a kill, in which memory pressure counts as its cause
_IDLE = 2  # attempts in a row without a new checkpoint, after which it gives up
_KEPT_AGENT = (SIGTERM, SIGHUP)  # sent by a Mac that shuts down
# What MLX prints about its GPU (mlx/backend/metal/device.cpp throws Metal's own words), and what
# this program prints if it ends by itself.
_WATCHDOG = re.compile(
    "kIOGPUCommandBufferCallbackError(Timeout|Hang|ImpactingInteractivity)|GPU Timeout"
)
_NO_MEMORY = re.compile(
    "kIOGPUCommandBufferCallbackErrorOutOfMemory|^packs: memory is (exhausted|short)", re.MULTILINE
)


@dataclass(frozen=True)
class Ended:
    """The end of a child process.

    Attributes:
        code: its exit code; -n if signal n killed it.
        result: what it wrote to stdout.
        messages: the end of what it wrote to stderr.
    """

    code: int
    result: str
    messages: str


class Child:
    """A process in a session of its own, which only gets the signals that `send` passes to it.

    Its stderr is a terminal if that of this process is one; its stdout is collected.

    Args:
        command: the program and its arguments.
        variables: of its environment, beside those of this process.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._live = has_terminal()
        self._read, write = _terminal() if self._live else os.pipe()
        self._stdout = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                command,
                stdout=self._stdout,
                stderr=write,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        finally:
            os.close(write)

        self._tail = b""
        self._is_open = True

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def wait(self, watch: Callable[[], None]) -> Ended:
        """Wait for the end, and call ``watch`` about once a second until then."""
        while self._process.poll() is None:
            self._pass_on(_TICK_S)
            watch()

        while self._pass_on(0):
            pass
        os.close(self._read)

        if self._live and self._process.returncode < 0:
            pass_on(_SHOW_CURSOR)

        with self._stdout as file:
            file.seek(0)
            result = file.read().decode(errors="replace")
        return Ended(self._process.returncode, result, self._tail.decode(errors="replace"))

    def _pass_on(self, seconds: float) -> bool:
        """Pass on what there is to read within a time; return whether there was anything."""
        if not self._is_open:  # nobody writes any more
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return False
        if not select.select([self._read], [], [], seconds)[0]:
            return False

        try:
            data = os.read(self._read, 1 << 16)
        except OSError:  # on Linux: nobody has the terminal open any more
            data = b""

        self._is_open = bool(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        pass_on(data)
        return bool(data)


def _terminal() -> tuple[int, int]:
    """Return both ends of a new terminal of this one's size, which passes text on unchanged."""
    read, write = pty.openpty()
    tty.setraw(write)
    if size := terminal_size():
        fcntl.ioctl(write, termios.TIOCSWINSZ, size)
    return read, write


@dataclass(frozen=True)
class Supervised:
    """A run that is supervised.

    Attributes:
        first: arguments of `packs train` that start it; they name the pack.
        again: arguments that continue it.
        at_login: arguments for a LaunchAgent, which start or continue it.
        pack: its folder.
        resumes: whether ``first`` continues an existing run.
        batch_size: examples of a batch.
        micro_batches: pieces that a batch is split into at the start.
        seconds: maximum training time; None without a limit.
        max_restarts: how often it is restarted at most.
    """

    first: tuple[str, ...]
    again: tuple[str, ...]
    at_login: tuple[str, ...]
    pack: Path
    resumes: bool = False
    batch_size: int = 1
    micro_batches: int = 1
    seconds: float | None = None
    max_restarts: int = MAX_RESTARTS


@dataclass(frozen=True)
class Cause:
    """Why a run ended early, and whether a smaller step may help."""

    text: str
    by_size: bool = False
    code: Code = "interrupted"


@dataclass
class Supervisor:
    """Starts a run, and restarts it from its last checkpoint as long as that helps."""

    run: Supervised
    display: Display
    asked: list[int] = field(default_factory=list, init=False)  # signals that end the run
    _child: Child | None = field(default=None, init=False)
    _pressed: float = field(default=-_SHORT_S, init=False)  # when memory was short
    _kills: int | None = field(default=None, init=False)  # for want of memory, before an attempt
    _others: frozenset = field(default_factory=frozenset, init=False)  # checkpoints of other runs

    def __post_init__(self) -> None:
        self._folder = run_folder(self.run.pack)
        self._start = time.monotonic()
        self._parts = self.run.micro_batches
        if not self.run.resumes:
            self._others = frozenset(map(_identity, checkpoints(self._folder)))

    def supervise(self) -> int:
        """Return the exit code of the run, whose result is printed.

        Raises:
            PackError: it is not restarted; `exit_code` is its last attempt's.
        """
        with signals.forwarded(self._send):
            arguments = self.run.first
            reached = self._batches()
            idle = 0

            for restarts in range(self.run.max_restarts + 1):
                ended = self._attempt(arguments)
                is_exhausted = ended.code == 2 and _NO_MEMORY.search(ended.messages)
                is_final = ended.code in _FINAL and not is_exhausted
                if self.asked or is_final:
                    echo(ended.result, end="")
                    return _exit_code(ended)

                cause = self._cause(ended)
                smaller = cause.by_size and self._use_smaller_pieces()
                before = reached
                reached = self._batches()
                idle += 1
                if reached > before or smaller:
                    idle = 0

                if idle == _IDLE:
                    when = "the second time in a row without a new checkpoint"
                    raise self._given_up(ended, cause, when)
                if restarts < self.run.max_restarts:
                    self._say(restarts + 1, cause, smaller)
                    arguments = self._next()

            limit = f"and --max-restarts is {self.run.max_restarts}"
            raise self._given_up(ended, cause, limit)

    def _attempt(self, arguments: Sequence[str]) -> Ended:
        self._kills = oom_kills()
        self._child = Child([*PROGRAM, *arguments], {SUPERVISED: "1"})
        for number in self.asked:  # signals that came before the process started
            self._child.send(number)
        return self._child.wait(self._watch)

    def _send(self, number: int) -> None:
        self.asked.append(number)
        if self._child is not None:
            self._child.send(number)

    def _watch(self) -> None:
        """Note when memory was short, unless the system counts what it kills for that."""
        if self._kills is None and memory_pressure().level >= LOW:
            self._pressed = time.monotonic()

    def _cause(self, ended: Ended) -> Cause:
        if _WATCHDOG.search(ended.messages):
            return Cause("macOS ended the run's work on the GPU, which took too long", True)
        if _NO_MEMORY.search(ended.messages):
            return Cause("memory was exhausted", True, "memory")
        if ended.code == -SIGKILL and self._was_short():
            return Cause("the system killed the run for want of memory", True, "memory")
        if ended.code == GONE:
            return Cause("another machine of the run had gone")
        if ended.code < 0:
            return Cause(f"the run was killed ({Signals(-ended.code).name})")
        return Cause(f"the run crashed (exit code {ended.code})")

    def _was_short(self) -> bool:
        """Return whether memory was the likely reason of a kill just now."""
        if self._kills is not None:
            return (oom_kills() or 0) > self._kills
        return time.monotonic() - self._pressed < _SHORT_S

    def _use_smaller_pieces(self) -> bool:
        """Split batches into twice as many pieces; return whether they have enough examples."""
        if 2 * self._parts > self.run.batch_size:
            return False
        self._parts *= 2
        return True

    def _own(self) -> list[Path]:
        """Return the checkpoints of this run, oldest first."""
        return [f for f in checkpoints(self._folder) if _identity(f) not in self._others]

    def _batches(self) -> int:
        own = self._own()
        return batches_of(own[-1]) if own else 0

    def _next(self) -> list[str]:
        arguments = list(self.run.again if self._own() else self.run.first)
        if self._parts > self.run.micro_batches:
            arguments += ["--micro-batches", str(self._parts)]
        if self.run.seconds is not None:
            left = self.run.seconds - (time.monotonic() - self._start)
            arguments += ["--time", f"{max(left, 1):.0f}s"]
        return arguments

    def _say(self, number: int, cause: Cause, smaller: bool) -> None:
        own = self._own()
        place = "starts again, as it had no checkpoint"
        if own:
            place = f"continues from {own[-1].name}"

        size = ""
        if smaller:
            size = f", each batch in {self._parts} pieces"
        elif cause.by_size:
            size = ", though its pieces are one example each already"

        text = f"{cause.text}; it {place}{size} ({number} of {self.run.max_restarts})"
        self.display.line("restart", text)

    def _given_up(self, ended: Ended, cause: Cause, when: str) -> PackError:
        reason = f"{cause.text}, {when}"
        code = cause.code
        command = shlex.join(["packs", "train", *self._next()])

        if own := self._own():
            error = RunStopped(reason, own[-1], self.run.pack, code)
            error.continue_with(command)
        else:
            error = PackError(
                f"{reason}. It has no checkpoint. Start again with `{command}`.", code
            )

        error.exit_code = _exit_code(ended)
        announce(self._start, self.run.pack, f"ended early: {reason}")
        return error


def _identity(checkpoint: Path) -> tuple[str, int, int]:
    """Return an identity that differs for a later checkpoint of the same name."""
    status = checkpoint.stat()
    return checkpoint.name, status.st_ino, status.st_mtime_ns


def _exit_code(ended: Ended) -> int:
    """Return an exit code as a shell reports it: 128 + n after signal n."""
    return ended.code if ended.code >= 0 else 128 - ended.code


def supervise(run: Supervised, display: Display, with_agent: bool) -> int:
    """Supervise a run until it ends, perhaps after reboots, too; return its exit code.

    With an agent, a LaunchAgent continues it at login until it has ended.

    Raises:
        PackError: it is not restarted, or there can be no LaunchAgent.
    """
    start = time.monotonic()
    with ExitStack() as stack:
        if with_agent:
            agent = macos.LaunchAgent.of(run.pack)
            stack.enter_context(agent.locked())
            run = _with_agent(run, agent, display)

        supervisor = Supervisor(run, display)
        if with_agent:
            stack.callback(_end_agent, agent, supervisor.asked, display)

        code = supervisor.supervise()
        if not supervisor.asked:
            announce(start, run.pack, "is ready" if code == 0 else f"ended with exit code {code}")
        return code


def check_agent(overwrite: bool, pack: Path) -> None:
    """Check that a LaunchAgent can continue a run.

    Raises:
        PackError: this is no Mac, or checkpoints of an earlier run could be taken for its own.
    """
    if not macos.is_macos():
        raise PackError(
            "--launch-agent: is for macOS, which starts LaunchAgents at login. "
            "Use --supervise here.",
            "unsupported",
        )

    run = run_folder(pack)
    if not overwrite or macos.LaunchAgent.of(pack).file.exists():
        return

    if checkpoints(run) or pack.exists():
        earlier = f"{run} has checkpoints" if checkpoints(run) else f"{pack} is the pack"
        raise PackError(
            f"--overwrite: {earlier} of an earlier run, which could be taken for that of this one "
            "after a reboot. Remove the folder, or choose another --out.",
            "conflict",
        )


def _with_agent(run: Supervised, agent: macos.LaunchAgent, display: Display) -> Supervised:
    """Write the agent's file; return the run, which resumes if the file existed before."""
    if agent.file.exists() and checkpoints(run_folder(run.pack)):
        run = replace(run, first=run.again, resumes=True)
    agent.write([*PROGRAM, *run.at_login])
    display.line("agent", f"{agent.file}: continues the run at login, until it has ended")
    return run


def _end_agent(agent: macos.LaunchAgent, asked: Sequence[int], display: Display) -> None:
    """Remove the agent's file, unless the Mac may be shutting down."""
    if set(asked) & set(_KEPT_AGENT):
        text = (
            f"{agent.file} stays: the run continues at the next login; without the file it does not"
        )
        display.line("agent", text)
    else:
        agent.remove()
