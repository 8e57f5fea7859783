"""What is fuzzed: a kind makes a valid subject once, and says what to run over a mutant of it.

The subject stands in the folder ``subject`` of a sandbox, which is the current folder; commands may
write to ``out`` alone.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutate import Mutator

SUBJECT, OUT = "subject", "out"
_PLACES = ("missing", "empty", "folder", "fifo", "link out", "link to itself", "unreadable")


@dataclass(frozen=True)
class Call:
    """One use of a mutant."""

    name: str  # for reports
    args: tuple[str, ...] = ()  # of `packs`, which runs in this process through click
    function: Callable[[], object] | None = None  # of the library, instead of ``args``
    gated: bool = False  # whether a gate may fail (exit code 1)


def command(*args: str, gated: bool = False) -> Call:
    """Return the call of `packs ARGS`."""
    return Call(f"packs {' '.join(args)}", args, gated=gated)


def library(function: Callable[[], object], name: str) -> Call:
    """Return the call of a function."""
    return Call(name, function=function)


@dataclass
class Case:
    """One mutant of a subject."""

    files: dict[str, bytes]  # the valid subject, by relative path
    rng: random.Random  # of this case, from kind, seed and number alone
    mutator: Mutator

    def write(self, name: str, data: bytes) -> None:
        """Replace a file of the subject, or add one."""
        file = Path(SUBJECT, name)
        _remove(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def edit(self, name: str, **more: object) -> None:
        """Replace a file by a mutant of it; ``more`` are keys that its JSON has besides."""
        data = self.files[name]
        if more:
            data = json.dumps(json.loads(data) | more).encode()
        self.mutator.note(name)
        self.write(name, self.mutator.file(name, data))

    def some(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return up to two of some values."""
        keys = self.rng.sample(list(values), self.rng.choice((0, 1, 2)))
        return {key: values[key] for key in keys}

    def replace(self, name: str) -> None:
        """Put something else in the place of a file: nothing, a folder, a FIFO, a link."""
        file = Path(SUBJECT, name)
        place = self.rng.choice(_PLACES)
        self.mutator.note(f"{name} is {place}")
        _remove(file)

        if place == "empty":
            file.touch()
        elif place == "folder":
            (file / "x").mkdir(parents=True)
        elif place == "fifo":
            os.mkfifo(file)
        elif place == "link out":
            file.symlink_to(Path("..", *[".."] * name.count("/"), "elsewhere", "file"))
        elif place == "link to itself":
            file.symlink_to(file.name)
        elif place == "unreadable":
            file.write_bytes(self.files.get(name, b""))
            file.chmod(0)

    def restore(self) -> None:
        """Make the subject valid again."""
        shutil.rmtree(SUBJECT)
        for name, data in self.files.items():
            self.write(name, data)


class Kind:
    """A kind of input."""

    name = ""
    words: Sequence[str] = ()  # that mean something to the reader; a mutant may put them elsewhere
    parts: Mapping[str, float] = {}  # the files that are changed, and how often each is drawn
    share = 0.02  # of the mutants that go through a whole command, which takes longer
    in_place = False  # whether calls write into the subject

    def make(self, folder: Path) -> None:
        """Write the valid subject into a folder that does not exist, and load what calls need."""
        raise NotImplementedError

    def mutate(self, case: Case) -> None:
        """Change one of the `parts`, or now and then put something else in its place."""
        name = case.rng.choices(list(self.parts), list(self.parts.values()))[0]
        if case.rng.random() < 0.03:
            case.replace(name)
        else:
            self.change(case, name)

    def change(self, case: Case, name: str) -> None:
        """Change a file of the subject."""
        case.edit(name)

    def cheap(self) -> list[Call]:
        """Return what takes a few milliseconds."""
        raise NotImplementedError

    def whole(self) -> list[Call]:
        """Return commands that take longer."""
        return []

    def calls(self, case: Case) -> list[Call]:
        """Return what is run over a mutant: one of the cheap calls, now and then a whole one."""
        calls = [case.rng.choice(self.cheap())]
        if self.whole() and case.rng.random() < self.share:
            calls.append(case.rng.choice(self.whole()))
        return calls[-1:] if self.in_place else calls

    def left(self) -> list[str]:
        """Return what a call that failed has left behind; hidden files and a run may stay."""
        names = [file.name for file in Path(OUT).iterdir()]
        return sorted(name for name in names if name[0] != "." and not name.endswith("-run"))

    def close(self) -> None:
        """Release what `make` started."""


def _remove(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
