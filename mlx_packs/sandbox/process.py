"""Sandboxes: processes that work on what strangers wrote, and are ended beyond their limits.

A chat template is a program, a tokenizer has regular expressions and replacements, and an image may
be decoded for minutes. No check beforehand can bound what they cost, so they run in processes of
their own. One that takes too much is killed, and another one starts with the next call.
"""

import atexit
import json
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from ..errors import PackError
from .child import HEADER

CPU_S = 2.0
MEMORY_BYTES = 256 << 20
_POLL_S = 0.05
_WALL_FACTOR = 15  # of the CPU time, on a busy machine
_CODE = (
    "import sys; path, library = sys.argv[1:]; sys.path[:] = path.split(chr(0x1f)); "
    "from mlx_packs.sandbox.child import main; main(library)"
)
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
_DEADLINE: ContextVar[float | None] = ContextVar("deadline", default=None)


class LimitExceeded(Exception):  # noqa: N818
    """A call took more time or memory than it may; the text continues "the template …"."""


class Fault(Exception):  # noqa: N818
    """What a call raised in the sandbox: the name of its class, and its message on one line."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason or kind)
        self.kind = kind


class Sandbox:
    """Calls the functions of a module of this package in a process with limits.

    The process starts with the first call, or before it with `start`. Calls of several threads wait
    for each other.
    """

    def __init__(self, library: str) -> None:
        self.library = library
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self.generation = 0  # how many processes there have been; each starts without state
        _ALL.append(self)

    def start(self) -> None:
        """Start the process, if it does not run; it imports its library meanwhile."""
        with self._lock:
            self._running()

    def call(
        self, name: str, *arguments: Any, more_cpu_s: float = 0.0, more_memory: int = 0
    ) -> tuple[Any, bytes]:
        """Return the result of a function, as JSON has it, and the bytes beside it.

        Args:
            name: The function of the module.
            arguments: Its arguments, which are pickled.
            more_cpu_s: Seconds beyond the limit, for a large input of the user's own.
            more_memory: Bytes beyond the limit, likewise.

        Raises:
            LimitExceeded: It takes more than 2 s of CPU time or 256 MB.
            Fault: It raises an exception.
            PackError: The deadline of a request passes (code ``timeout``).
        """
        cpu_s = CPU_S + more_cpu_s
        memory_bytes = MEMORY_BYTES + more_memory
        content = pickle.dumps((name, arguments, cpu_s, memory_bytes), pickle.HIGHEST_PROTOCOL)

        with _locked(self._lock):
            process = self._running()
            assert process.stdin is not None
            try:
                with suppress(BrokenPipeError):  # the reply says that it has ended
                    process.stdin.write(content)
                    process.stdin.flush()
                reply = _reply(process, cpu_s, memory_bytes)
            except BaseException:  # Ctrl-C too: the next call must not get its reply
                self.end()
                raise

        answer, body = reply
        if "error" not in answer:
            return answer["result"], body
        if answer["error"] == "MemoryError":
            raise LimitExceeded(_too_much_memory(memory_bytes))
        raise Fault(answer["error"], answer["reason"])

    def _running(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = _started(self.library)
            self.generation += 1
        return self._process

    def end(self) -> None:
        """End the process; the next call starts another one."""
        process = self._process
        self._process = None
        if process is None:
            return

        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()


@contextmanager
def deadline(end: float | None) -> Iterator[None]:
    """Let calls inside the block end at a time of `time.monotonic`; None sets no end."""
    token = _DEADLINE.set(end)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


@contextmanager
def _locked(lock: threading.Lock) -> Iterator[None]:
    """Wait for a lock until the deadline."""
    if not lock.acquire(timeout=_left()):
        raise _too_late()
    try:
        yield
    finally:
        lock.release()


def _left() -> float:
    """The seconds until the deadline; -1 without one, as locks have it."""
    end = _DEADLINE.get()
    return -1 if end is None else max(0.0, end - time.monotonic())


def _too_late() -> PackError:
    return PackError("The request took too long.", "timeout")


def _started(library: str) -> subprocess.Popen:
    """Start a process that sees no token or key of the environment, nor the current folder."""
    package = str(Path(__file__).parents[2])
    path = "\x1f".join([package, *(os.path.abspath(entry) for entry in sys.path if entry)])
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CODE, path, library],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment, "MALLOC_ARENA_MAX": "2"},
    )


def _reply(
    process: subprocess.Popen, cpu_s: float, memory_bytes: int
) -> tuple[dict[str, Any], bytes]:
    """Return what a process writes; raise `LimitExceeded` if it takes too much, or ends."""
    pipe = process.stdout
    assert pipe is not None
    _watch(process.pid, pipe, cpu_s, memory_bytes)

    header = pipe.read(HEADER.size)
    if len(header) == HEADER.size:
        lengths = HEADER.unpack(header)
        text, body = (pipe.read(length) for length in lengths)
        if len(text) == lengths[0] and len(body) == lengths[1]:
            return json.loads(text), body
    raise LimitExceeded(f"{_too_much_memory(memory_bytes)}, or makes a library crash")


def _watch(pid: int, pipe: IO[bytes], cpu_s: float, memory_bytes: int) -> None:
    """Wait until a process replies or ends; raise `LimitExceeded` when it takes too much."""
    end = time.monotonic() + _WALL_FACTOR * cpu_s
    before: tuple[float, int] | None = None

    while not select.select([pipe], [], [], _POLL_S)[0]:
        if _left() == 0:
            raise _too_late()

        usage = usage_of(pid)
        before = before or usage
        if usage is not None and before is not None and usage[1] - before[1] > memory_bytes:
            raise LimitExceeded(_too_much_memory(memory_bytes))
        is_over = usage is not None and before is not None and usage[0] - before[0] > cpu_s
        if is_over or time.monotonic() > end:
            raise LimitExceeded(f"takes more than {cpu_s:.0f} seconds of CPU time")


def _too_much_memory(memory_bytes: int) -> str:
    return f"needs more than {memory_bytes >> 20} MB of memory"


def usage_of(pid: int) -> tuple[float, int] | None:
    """Return the CPU seconds and the bytes in memory of a process; None if it has ended."""
    if sys.platform != "linux":
        return _usage_by_ps(pid)
    if not (fields := _stat(pid)):
        return None
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def start_of(pid: int) -> str:
    """Return when a process started, as the system writes it; empty if there is none.

    It differs between two processes that have had the same number.
    """
    if sys.platform == "linux":
        return "".join(_stat(pid)[19:20])
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    environment = {**os.environ, "LC_ALL": "C"}
    with suppress(OSError, subprocess.SubprocessError):
        text = subprocess.check_output(command, stderr=subprocess.DEVNULL, env=environment)
        return text.decode().strip()
    return ""


def _stat(pid: int) -> list[str]:
    """Return what Linux knows of a process, from its state on; empty if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _usage_by_ps(pid: int, run: Callable[..., str] = subprocess.check_output) -> Any:
    """As `usage_of`, for macOS: its ``ps`` writes 0:01.50 for 1.5 s, and memory in KB."""
    try:
        text = run(["ps", "-o", "time=,rss=", "-p", str(pid)], text=True, stderr=subprocess.DEVNULL)
        cpu, resident = text.split()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None

    seconds = 0.0
    for part in cpu.replace("-", ":").split(":"):
        seconds = 60 * seconds + float(part)
    return seconds, int(resident) << 10


def end_all() -> None:
    """End the processes of all sandboxes."""
    for sandbox in _ALL:
        sandbox.end()


def forget_all() -> None:
    """Leave the processes to the one that this process was forked from."""
    for sandbox in _ALL:
        sandbox._lock = threading.Lock()
        sandbox._process = None


_ALL: list[Sandbox] = []
atexit.register(end_all)
os.register_at_fork(after_in_child=forget_all)
TEMPLATES = Sandbox("templates")
TOKENIZERS = Sandbox("tokens")
IMAGES = Sandbox("images")
