"""Runs on a Mac at night, by stand-ins for its programs: it stays awake."""

import os
import time

import pytest

from mlx_packs import macos
from mlx_packs.reading import sha256
from mlx_packs.training.state import ADAPTERS
from tests.helpers.runs import Lines


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def caffeinate_of(mac) -> int:
    """Return the process of caffeinate, which may still be at its start."""
    file, end = mac.folder / "caffeinate.pid", time.monotonic() + 20
    while not (file.is_file() and file.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.01)
    return int(file.read_text())


def test_a_mac_is_kept_awake_for_the_length_of_a_run_and_its_display_is_not(mac):
    lines = Lines()
    with pytest.raises(ZeroDivisionError), macos.kept_awake(lines.line):
        process = caffeinate_of(mac)
        assert is_running(process)
        assert mac.asked("caffeinate") == ["-i", "-s", "-w", str(os.getpid())]
        raise ZeroDivisionError
    assert not is_running(process)
    assert len(lines.lines) == 1


def test_a_mac_may_sleep_without_the_setting_or_without_caffeinate(mac, train, monkeypatch):
    train("asleep", awake=False)
    assert not mac.asked("caffeinate")
    train("awake")
    assert "-w" in mac.asked("caffeinate")
    monkeypatch.setenv("PATH", "/nowhere")
    lines = Lines()
    with macos.kept_awake(lines.line):
        assert lines.lines[0].startswith("note caffeinate")


def test_batches_in_pieces_are_the_same_update_and_a_resumed_run_may_change_them(train):
    one, two = (train(str(pieces), micro_batches=pieces) for pieces in (1, 2))
    losses = [[line["loss"] for line in run.curve if "loss" in line] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert sha256(one.pack.path / ADAPTERS) != sha256(two.pack.path / ADAPTERS)
    assert train("1", iters=3, micro_batches=2, resume=True).report["batches"] == 3
