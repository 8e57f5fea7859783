"""Signals that end a command: SIGINT (Ctrl-C), SIGTERM (docker stop), SIGHUP (a closed terminal).

The first one unwinds the work like Ctrl-C, as `Signalled`; where the work requests it (`deferred`)
it waits for the next good moment instead. A second one unwinds at once, and after that the system
ends the process.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signalled(KeyboardInterrupt):
    """A signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def number_of(error: BaseException) -> int:
    """Return the signal behind a KeyboardInterrupt."""
    return error.number if isinstance(error, Signalled) else signal.SIGINT


_deferred: list[int] | None = None  # signals that wait, where they are deferred
_deferring = 0  # blocks that defer them


def _handle(number: int, _: object) -> None:
    if _deferred == []:
        _deferred.append(number)
        return

    for each in NUMBERS:
        if signal.getsignal(each) is _handle:
            signal.signal(each, signal.SIG_DFL)
    raise Signalled(number)


def _takes_over(number: int) -> bool:
    """Return whether a signal may be handled here: nohup and a caller's own handlers stay."""
    default = (signal.SIG_DFL, signal.default_int_handler)
    now = signal.getsignal(number)
    return now in default or (number == signal.SIGINT and callable(now) and now is not _handle)


def handled() -> AbstractContextManager[None]:
    """Raise `Signalled` for the signals that end a command."""
    return _handled_by(_handle, [number for number in NUMBERS if _takes_over(number)])


def forwarded(send: Callable[[int], object]) -> AbstractContextManager[None]:
    """Call ``send`` with each signal that ends a command, while another process does the work.

    An ignored SIGHUP and a caller's own handlers stay, as in `handled`.
    """
    ours = [n for n in NUMBERS if signal.getsignal(n) is _handle or _takes_over(n)]
    return _handled_by(lambda number, _: send(number), ours)


@contextmanager
def _handled_by(handler: Callable[[int, Any], object], numbers: Iterable[int]) -> Iterator[None]:
    """Handle signals in a ``with`` block; earlier handlers are restored.

    Outside the main thread, where Python delivers no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def deferred() -> Iterator[list[int]]:
    """Yield a list that receives the first signal, which is raised at the end at the latest.

    A second signal is raised at once. Blocks that overlap have one list, and the last to end raises
    the signal.
    """
    global _deferred, _deferring
    if threading.current_thread() is not threading.main_thread():
        yield []
        return

    if _deferred is None:
        _deferred = []
    waiting = _deferred
    _deferring += 1

    with handled():
        try:
            yield waiting
        finally:
            _deferring -= 1
            if not _deferring:
                _deferred = None

        if waiting and not _deferring:
            raise Signalled(waiting[0])


@contextmanager
def announced(say: Callable[[], object]) -> Iterator[None]:
    """Call ``say`` in a thread when the first signal comes, also while native code computes.

    Python calls handlers between two of its own instructions, so that a long step delays them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:  # an event loop's, or of a run that overlaps with this one
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()
        yield
        return

    def wait() -> None:
        while received := reader.recv(1):
            if received[0] in NUMBERS:
                say()
                return

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        writer.close()
        thread.join()
        reader.close()
