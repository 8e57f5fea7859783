"""Processes are killed at many points: runs end as if nothing had been, a pack is the old or the new.

Points are every kind of file operation that a command makes, before it, after it and in its middle,
and moments in between.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_packs import Pack
from mlx_packs.bases.files import RECORD
from mlx_packs.bases.writer import verify
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.state import ADAPTERS, OPTIMIZER
from tests.crash.cases import OVERWRITES, RUNS, hidden_names, weights_of
from tests.crash.operations import MOMENTS
from tests.crash.server import Ended, Kill, Server
from tests.helpers.local_hub import LocalHub, Repo, local_hub

# Points at which a command is killed by the slow tests, and by the nightly ones
FEW, MANY = (
    pytest.param(4, marks=pytest.mark.slow),
    pytest.param(16, marks=pytest.mark.nightly(seconds=15)),
)
BY_TWO_RENAMES = ("train", "quantize")  # a pack and a base, each written by code of its own
TIMES = 4  # one point of so many is a moment, not an operation


def points(uninterrupted: Ended, count: int) -> Iterator[Kill]:
    """Yield so many places to kill at, spread over the operations of a run and over its time.

    Each kind of operation has its share, however rare it is.
    """
    kinds = uninterrupted.kinds
    for n in range(count // TIMES):
        yield Kill(after_s=uninterrupted.seconds * (n + 0.5) / (count // TIMES))
    left = count - count // TIMES
    at_kind = {
        kind: [i for i, k in enumerate(kinds, 1) if k == kind] for kind in sorted(set(kinds))
    }
    for n in range(left):
        places = list(at_kind.values())[n % len(at_kind)]
        rounds, this = -(-left // len(at_kind)), n // len(at_kind)
        at = places[min(len(places) - 1, (2 * this + 1) * len(places) // (2 * rounds))]
        yield Kill(at, MOMENTS[(n + this) % len(MOMENTS)])


@dataclass
class Killer:
    """Runs commands in folders of their own, and kills them."""

    server: Server
    folder: Path
    hub: str = ""
    number: int = 0

    def fresh(self, copy: Path | None = None) -> Path:
        """Return a new folder, empty or a copy."""
        self.number += 1
        folder = self.folder / str(self.number)
        if copy:
            shutil.copytree(copy, folder, symlinks=True)
        else:
            folder.mkdir()
        return folder

    def run(self, args: list[str], folder: Path, kill: Kill | None = None, **options) -> Ended:
        return self.server.run(args, folder, kill, hub=self.hub, **options)

    def completed(self, args: list[str], folder: Path) -> Ended:
        """Run a command to its end, which is good."""
        ended = self.run(args, folder)
        assert ended.code == 0, ended.text
        return ended


@pytest.fixture
def killer(server, tmp_path) -> Killer:
    return Killer(server, tmp_path)


def visible(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if "cache" not in path.parts
    }


def check_killed(ended: Ended, kill: Kill) -> None:
    """Check that a process was killed; by a moment it may have been over."""
    assert ended.code is None or (ended.code == 0 and not kill.at), ended.text


def check_run(killer: Killer, args: list[str], uninterrupted: Path, kill: Kill) -> None:
    """Kill a run, resume it, and compare the result with that of the uninterrupted run."""
    folder = killer.fresh()
    ended = killer.run(args, folder, kill)
    check_killed(ended, kill)
    resumed = killer.run([*args, "--resume"], folder)
    if resumed.code == 2 and not RunFolder(folder / "x-run").checkpoints():
        resumed = killer.run([*args, "--overwrite"], folder)  # killed before there was anything
    assert resumed.code == 0, resumed.text
    assert weights_of(folder / "x") == weights_of(uninterrupted / "x")
    Pack.open(folder / "x").verify()
    assert not hidden_names(folder)
    assert visible(folder) == visible(uninterrupted)


def check_overwrite(
    killer: Killer, args: list[str], old: Path, new: Path, kill: Kill, exchange: bool
) -> None:
    """Kill a command that replaces ``x``: the old one or the new is there; the next run ends."""
    folder = killer.fresh(copy=old)
    ended = killer.run(args, folder, kill, exchange=exchange)
    check_killed(ended, kill)

    if not exchange and not (folder / "x").exists():  # killed between two renames
        (old_folder,) = folder.glob(".x.old-*")
        old_folder.rename(folder / "x")
    check_whole(folder / "x")
    assert weights_of(folder / "x") in (weights_of(old / "x"), weights_of(new / "x"))

    again = killer.run(args, folder, exchange=exchange)
    assert again.code == 0, again.text
    assert weights_of(folder / "x") == weights_of(new / "x")
    check_whole(folder / "x")
    assert not hidden_names(folder)


def check_whole(folder: Path) -> None:
    """Read a pack or a checkpoint as commands do, and check every hash."""
    if (folder / RECORD).is_file():
        verify(folder)
    else:
        Pack.open(folder).verify()


def at_points(count: int, whole: Ended, check: Callable[[Kill], None]) -> None:
    """Call a check for so many places to kill at, and say which one failed."""
    for kill in points(whole, count):
        try:
            check(kill)
        except AssertionError as error:
            kind = whole.kinds[kill.at - 1] if kill.at else "a moment"
            raise AssertionError(f"{kill}, {kind}: {error}") from error


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(places) -> Iterator[LocalHub]:
    """A substitute for the Hub with the packs me/old and me/new."""
    with local_hub() as hub:
        for name, pack in zip(("me/old", "me/new"), places.packs, strict=True):
            hub.repos[name] = Repo()
            hub.repos[name].commit(contents(pack))
        yield hub


@pytest.mark.parametrize("count", [FEW, MANY])  # 25 s for many: each time the run is resumed
@pytest.mark.parametrize("name", RUNS)
def test_killed_runs_end_bit_identical(killer, places, name, count):
    args, uninterrupted = RUNS[name](places), killer.fresh()
    whole = killer.completed(args, uninterrupted)
    at_points(count, whole, lambda kill: check_run(killer, args, uninterrupted, kill))


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize(
    ("name", "exchange"),
    [(name, True) for name in OVERWRITES] + [(name, False) for name in BY_TWO_RENAMES],
)
def test_a_killed_overwrite_leaves_old_or_new(killer, places, hub, name, exchange, count):
    killer.hub = hub.url
    (command, of_old, of_new), old = OVERWRITES[name], killer.fresh()
    killer.completed(command(places, *of_old), old)
    new = killer.fresh(copy=old)
    args = command(places, *of_new)
    whole = killer.run(args, new, exchange=exchange)
    assert whole.code == 0 and weights_of(new / "x") != weights_of(old / "x"), whole.text

    def check(kill: Kill) -> None:
        check_overwrite(killer, args, old, new, kill, exchange)

    at_points(count // 2, whole, check)


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_killed_export_leaves_nothing_half(killer, places, count):
    """Export replaces nothing: its folder is there whole, or not at all."""
    args = ["export", str(places.packs[0]), "--to", "peft", "--out", "x"]
    uninterrupted = killer.fresh()
    whole = killer.completed(args, uninterrupted)

    def check(kill: Kill) -> None:
        folder = killer.fresh()
        check_killed(killer.run(args, folder, kill), kill)
        if not (folder / "x").exists():
            killer.completed(args, folder)
        assert contents(folder / "x") == contents(uninterrupted / "x")
        killer.completed(["import", "x", "--model", str(places.base), "--out", "y"], folder)
        assert not hidden_names(folder)

    at_points(count // 2, whole, check)


@pytest.mark.slow
def test_a_full_disk_stops_a_run(killer, places):
    """Full when the adapters are written, or the state of their optimizer."""
    args, uninterrupted = RUNS["plain"](places), killer.fresh()
    killer.completed(args, uninterrupted)
    newest = RunFolder(uninterrupted / "x-run").checkpoints()[-1]
    sizes = {name: (newest / name).stat().st_size for name in (ADAPTERS, OPTIMIZER)}
    for limit in (sizes[ADAPTERS] - 100, sizes[OPTIMIZER] - 100):
        folder = killer.fresh()
        failed = killer.run(args, folder, largest_file=limit)
        assert failed.code == 2 and "cannot be written" in failed.text, failed.text
        assert "Traceback" not in failed.text and not (folder / "x").exists()
        assert not hidden_names(folder)
        killer.completed([*args, "--overwrite"], folder)
        assert weights_of(folder / "x") == weights_of(uninterrupted / "x")
