"""Mutants of every kind of input: each is accepted or rejected in one line, and nothing else."""

import os
import time
from pathlib import Path

import pytest

from mlx_packs.errors import PackError
from tests.fuzz import runner
from tests.fuzz.kind import OUT, SUBJECT, Kind, command, library
from tests.fuzz.kinds import KINDS
from tests.fuzz.runner import Fuzzer, Report, fuzz, sandbox, supervise

SEED = 18


def check(report: Report) -> None:
    """Assert that no mutant did what none may do."""
    assert not report.failures, "\n".join(report.lines())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(12), id="12"),
        pytest.param(range(12, 100), id="88 more", marks=pytest.mark.nightly),
    ],
)
def test_100_mutants(kind, numbers):
    report = fuzz(kind, numbers, SEED)
    check(report)
    assert report.accepted and report.rejected  # mutants that all fail early would test little


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(100, 16, marks=pytest.mark.slow),
        pytest.param(116, 884, marks=pytest.mark.nightly(seconds=15)),  # calls that read each
    ],
)
def test_mutants_in_another_process(kind, first, count):
    check(supervise(kind, count, SEED, first=first))


class Misbehaving(Kind):
    """A kind whose one call has given behaviour; its subject is a text."""

    name = "misbehaving"
    deed = None

    def make(self, folder):
        folder.mkdir()
        (folder / "a.txt").write_text("text")

    def mutate(self, case):
        case.edit("a.txt")

    def cheap(self):
        return [command("list", SUBJECT) if self.deed is None else library(self.deed, "deed")]


def _half_written():
    Path(OUT, "pack").mkdir()
    raise PackError("no")


DEEDS = {
    "traceback": lambda: {}["x"],
    "hang": lambda: time.sleep(60),
    "memory": lambda: bytearray(os.urandom(1) * 60_000_000),
    "outside": lambda: Path("elsewhere", "file").write_text("changed"),
    "half-written": _half_written,
    "control": lambda: os.write(2, b"\x1b[31mred"),
}


@pytest.mark.parametrize("fault", DEEDS)
def test_a_misbehaving_call_is_noticed(fault, monkeypatch):
    monkeypatch.setattr(runner, "SPARE_BYTES", 30e6)
    if fault == "hang":
        monkeypatch.setattr(runner, "HANG_S", 0.2)
    kind = Misbehaving()
    with sandbox() as root:
        fuzzer = Fuzzer(kind, SEED, root)
        kind.deed = DEEDS[fault]
        report = Report(kind.name)
        fuzzer.run(0, report)
    assert [failure.fault for failure in report.failures] == [fault]


def test_a_mutant_is_a_function_of_kind_seed_and_number():
    with sandbox() as root:
        fuzzer = Fuzzer(Misbehaving(), SEED, root)
        mutants = []
        for case in map(fuzzer._case, (0, 1, 0)):
            fuzzer.kind.mutate(case)
            mutants.append(Path(SUBJECT, "a.txt").read_bytes())
    assert mutants[0] == mutants[2] != mutants[1]
