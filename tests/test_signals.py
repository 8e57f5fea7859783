"""SIGINT, SIGTERM and SIGHUP: raised, deferred, left to others, restored."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_packs import signals
from mlx_packs.signals import NUMBERS, Signalled
from tests.helpers.interpreter import run_python


@pytest.fixture(autouse=True)
def handlers():
    """What handles signals is the same afterwards."""
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_a_signal_unwinds_like_ctrl_c():
    for number in NUMBERS:
        with pytest.raises(KeyboardInterrupt) as raised, signals.handled():
            os.kill(os.getpid(), number)
        assert signals.number_of(raised.value) == number


def test_a_deferred_signal_waits_and_the_second_does_not():
    with pytest.raises(Signalled), signals.deferred() as waiting:
        os.kill(os.getpid(), signal.SIGTERM)
        assert waiting == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGHUP)
        raise AssertionError("the second signal did not end the work")


def test_a_deferred_signal_that_nobody_saw_is_raised():
    with pytest.raises(Signalled) as raised, signals.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
    assert raised.value.number == signal.SIGTERM


def test_signals_are_forwarded_each_time_and_raise_nothing():
    sent = []
    with signals.handled(), signals.forwarded(sent.append):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]


def test_ignored_signals_and_own_handlers_stay(monkeypatch):
    seen = []
    before = [signal.signal(signal.SIGHUP, signal.SIG_IGN)]
    before.append(signal.signal(signal.SIGTERM, lambda *_: seen.append("own")))
    try:
        with signals.deferred() as waiting:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            assert waiting == [] and seen == ["own"]
        with signals.forwarded(seen.append):
            os.kill(os.getpid(), signal.SIGHUP)
        assert seen == ["own"]
    finally:
        for number, handler in zip((signal.SIGHUP, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def test_other_threads_leave_signals_alone():
    def work():
        with signals.deferred() as waiting:
            return signal.getsignal(signal.SIGTERM), waiting

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == (signal.SIG_DFL, [])


def test_the_system_ends_what_two_signals_did_not():
    code = """
import os, signal
from mlx_packs import signals
with signals.handled():
    for _ in range(2):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            pass
"""
    with pytest.raises(AssertionError):
        run_python(code)  # ended by the second, outside of `deferred`


def test_a_signal_is_announced_before_its_handler_runs():
    """The code of a subprocess blocks in the C library, where no handler of Python runs."""
    code = """
import ctypes, os, threading, time
from mlx_packs import signals

libc = ctypes.CDLL(None)
start = time.monotonic()
sooner = []
try:
    with signals.announced(lambda: sooner.append(time.monotonic())), signals.deferred() as waiting:
        threading.Timer(0.1, os.kill, (os.getpid(), 2)).start()
        end = start + 0.6
        while (left := end - time.monotonic()) > 0:
            libc.usleep(int(left * 1e6))
except signals.Signalled:
    print(waiting, sooner[0] - start < 0.5)
"""
    assert run_python(code).split() == ["[2]", "True"]


def test_nothing_is_announced_without_a_signal():
    said = []
    with signals.announced(lambda: said.append(1)):
        pass
    assert not said and signal.set_wakeup_fd(-1) == -1
