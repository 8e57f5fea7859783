"""A Mac as far as `mlx_packs.macos` sees it: programs of its names on PATH, and numbers of its kernel."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlx_packs import macos

PMSET = """case "$*" in
  "-g") printf 'Currently in use:\\n lowpowermode         %s\\n sleep                1\\n' "$(cat {folder}/saving)" ;;
  "-g therm") echo 'Note: No thermal warning level has been recorded' ;;
esac"""
NOTIFYUTIL = 'echo "$2 $(cat {folder}/thermal)"'
LOG = 'for part in "$@"; do printf "%s\\n" "$part"; done >> {folder}/{name}.log'


@dataclass
class Mac:
    """A folder with the programs, what they answer, and what they were asked."""

    folder: Path
    patch: pytest.MonkeyPatch
    kernel: dict[str, int] = field(default_factory=lambda: {"memory": 1})

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.answer(thermal=0, saving=0)
        self.program("pmset", PMSET)
        self.program("notifyutil", NOTIFYUTIL)
        self.program("caffeinate", LOG + "\necho $$ > {folder}/caffeinate.pid\nexec sleep 60")
        self.patch.setenv("PATH", f"{self.folder}{os.pathsep}{os.environ['PATH']}")
        self.patch.setenv("HOME", str(self.folder / "home"))
        self.patch.setattr(macos, "is_macos", lambda: True)
        self.patch.setattr(macos, "sysctl", lambda name: self.kernel["memory"])

    def answer(self, **numbers: int) -> None:
        """Let the programs answer ``thermal`` and ``saving`` by these numbers from now on."""
        for name, number in numbers.items():
            (self.folder / name).write_text(str(number))

    def program(self, name: str, script: str) -> None:
        text = script.replace("{folder}", str(self.folder)).replace("{name}", name)
        file = self.folder / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    def asked(self, name: str) -> list[str]:
        """Return the arguments that a program was started with, those of all times."""
        log = self.folder / f"{name}.log"
        return log.read_text().splitlines() if log.is_file() else []
