"""Runs on a Mac at night, by stand-ins for its programs: awake, observed."""

import json
import os
import time

import pytest

from mlx_packs import macos
from mlx_packs.reading import sha256
from mlx_packs.training.checkpoint import ADAPTERS
from mlx_packs.training.observers import machine
from mlx_packs.training.observers.machine import described, shares_of
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.observers import observe
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


def test_heat_and_power_are_in_the_log_and_their_shares_in_the_report(mac, train, monkeypatch):
    monkeypatch.setattr(machine, "_EVERY", 0.0)

    def warm_up(line):
        mac.answer(thermal=2 if line["batch"] == 1 else 0, saving=int(line["batch"] == 3))

    observe(monkeypatch, on_step=warm_up)
    run = train(iters=4, awake=False)
    lines = [line for line in run.curve if "loss" in line]
    assert [line["thermal_pressure"] for line in lines] == [2, 0, 0, 0]
    assert [line["low_power_mode"] for line in lines] == [0, 0, 1, 0]
    assert [line["memory_pressure_level"] for line in lines] == [0, 0, 0, 0]
    shares = run.report["machine"]
    assert 0 < shares["throttled_share"] < 1 and 0 < shares["low_power_mode_share"] < 1
    assert shares["memory_pressure_share"] == 0 and shares["thermal_pressure"] == "heavy"
    assert any(line.startswith("machine throttled") for line in train.lines)


def test_a_resumed_run_counts_whole_and_what_is_unknown_is_left_out():
    curve = [
        {"batch": 1, "trained_tokens": 100, "tokens_per_s": 10.0, "thermal_pressure": 1},  # 10 s
        {"batch": 1, "valid_loss": 2.0},
        {"batch": 2, "trained_tokens": 200, "tokens_per_s": 5.0},  # 20 s, unknown
        {"batch": 3, "trained_tokens": 500, "tokens_per_s": 10.0, "thermal_pressure": 0},  # 30 s
    ]
    assert shares_of(curve, "tokens") == {"thermal_pressure": 0.25}
    assert shares_of([], "tokens") == {}
    assert shares_of([{"batch": 1, "loss": 1.0}], "tokens") == {}
    line = described({"throttled_share": 0.25, "thermal_pressure": "moderate"})
    assert line == "throttled 25% of the training time (thermal pressure moderate at most)"


def test_elsewhere_the_log_has_no_such_fields(trained):
    run = trained / "o-run"
    assert "machine" not in json.loads((run / "report.json").read_text()) or macos.is_macos()
    assert not any(name in line for line in RunFolder(run).metrics() for name in machine.SHARES)


def test_batches_in_pieces_are_the_same_update_and_a_resumed_run_may_change_them(train):
    one, two = (train(str(pieces), micro_batches=pieces) for pieces in (1, 2))
    losses = [[line["loss"] for line in run.curve if "loss" in line] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert sha256(one.pack.path / ADAPTERS) != sha256(two.pack.path / ADAPTERS)
    assert train("1", iters=3, micro_batches=2, resume=True).report["batches"] == 3
