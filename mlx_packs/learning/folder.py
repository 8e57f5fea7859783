"""The folder of ``packs serve --learn``: rated answers, versions of the pack, and which is served.

``current`` has the number of the served version, and is replaced atomically. Version 0 is what the
server began with: a pack, of which ``versions/0000`` has a copy, or the base model alone.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import filesystem
from ..bases.files import TINY
from ..errors import PackError
from ..files import atomic_folder, atomic_write, make_folder, to_json
from ..packs.manifest import MANIFEST
from ..packs.pack import Pack
from ..reading import read_json, read_text
from .rows import FILES, read_rows

if TYPE_CHECKING:
    from ..bases.model import BaseModel

FACTS = "learning.json"
FIGURES = "figures.json"
PACK = "pack"
_README = "README.txt"
_FORMAT = "mlx_packs learning 1"
_VERSION = re.compile(r"[0-9]{4}")
_LONGEST = 64  # characters of the file `current`
_TEXT = """\
Kept here

A server of mlx-packs that was started with --learn writes this folder. It keeps an answer only if
somebody rates or corrects it, with the conversation up to it, the rating or the correction, tools
and variables of the chat template, the name and version of the pack, and a random number. It keeps
no other answers, no addresses and no names of clients. Nothing is sent to another machine.

kto.jsonl    rated answers
dpo.jsonl    corrected answers, each with its correction
chat.jsonl   corrections, and answers that were rated up
versions     packs that `packs learn` trained on these rows
candidate    the pack that it trained last, unless that became a version
current      the number of the version that is served; 0 is the model that the server started with

To forget an answer, remove its line from each of the .jsonl files, while the server runs, too, the
folder candidate, and the versions that were trained on it, after `packs learn DIR --use` with the
number of another one. Also remove ~/.cache/mlx_packs/tokens (or where MLX_PACKS_CACHE says): it has
the tokens of more than 2 MB of rows for 30 days. To delete everything, stop the server and remove
both folders.
"""


@dataclass(frozen=True)
class LearningFolder:
    """A folder of rated answers and versions, and the pack and base model that it is for."""

    path: Path
    name: str  # of the pack, as requests name it
    model: str  # as `load_base` takes it
    fingerprint: str  # of the base model
    pack: str | None  # hash of the adapters of version 0; None for the base model alone

    @classmethod
    def begin(cls, path: Path, name: str, base: "BaseModel", pack: Pack | None) -> "LearningFolder":
        """Make a folder for a pack of a base, or open the one that is there, which must be of it.

        Raises:
            PackError: the folder is of another pack or base, or cannot be written.
        """
        model = str(base.name)
        if model != TINY and os.path.exists(os.path.expanduser(model)):
            model = str(Path(model).expanduser().resolve())

        adapters = pack._adapters_hash if pack is not None else None

        folder = cls(path, name, model, base.fingerprint, adapters)

        if (path / FACTS).exists():
            folder._check_same(cls.at(path))
            return folder

        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise PackError(
                f"--learn {path}: is not empty, and not a folder of --learn. Name another folder.",
                "exists",
                "learn",
            )
        try:
            folder._make(pack)
        except PackError as error:
            if error.code != "unwritable" or not path.exists():
                raise
            raise PackError(
                f"--learn {error.message} If it is a volume, or the folder around it is read-only, "
                "name a folder inside it, which is made.",
                error.code,
                "learn",
            ) from None

        return folder

    @classmethod
    def at(cls, path: Path) -> "LearningFolder":
        """Open a folder that `begin` made."""
        file = path / FACTS
        if not file.is_file():
            raise PackError(
                f"{path}: is no folder of rated answers. `packs serve --learn {path}` makes one.",
                "not-found",
                "folder",
            )

        facts = read_json(file)
        stated = facts.pop("format", None)
        kinds = {field.name: str for field in fields(cls) if field.name != "path"}
        texts = [facts.get(name) for name in kinds if name != "pack"]

        if stated != _FORMAT or not all(isinstance(text, str) for text in texts):
            text = f"{file}: belongs to no folder of --learn ({_FORMAT})."
            raise PackError(text, "unreadable")
        return cls(path, **{name: facts.get(name) for name in kinds})

    @property
    def candidate(self) -> Path:
        """The folder of the pack that is trained, or that was trained last and did not win."""
        return self.path / "candidate"

    @property
    def versions_folder(self) -> Path:
        return self.path / "versions"

    @property
    def current(self) -> int:
        file = self.path / "current"
        if not file.exists():
            return 0

        text = read_text(file, _LONGEST).strip()
        if not (text.isascii() and text.isdecimal()):
            raise PackError(
                f"{file}: must be the number of a version. Set it: packs learn {self.path} --use 0",
                "unreadable",
            )
        return int(text)

    def to_json(self) -> dict[str, Any]:
        """Return the versions with their figures, and the rows of each task.

        ``missing`` has the lack of rows of each task; None if one task has enough.
        """
        splits = {task: read_rows(self.path, task) for task in FILES}
        faults = {task: split.fault for task, split in splits.items()}
        return {
            "name": self.name,
            "current": self.current,
            "versions": [{"number": n, **figures} for n, figures in self.versions().items()],
            "rows": {task: split.count for task, split in splits.items()},
            "missing": faults if all(faults.values()) else None,
        }

    def serve(self, number: int) -> None:
        """Make a version the one that is served; a running server follows."""
        self.pack_of(number)
        atomic_write(self.path / "current", f"{number}\n")

    def pack_of(self, number: int) -> Pack | None:
        """Return the pack of a version; None for version 0 if that is the base model alone."""
        if number == 0 and self.pack is None:
            return None

        folder = self.version_folder(number) / PACK
        if not folder.is_dir():
            numbers = ", ".join(map(str, self.versions()))
            raise PackError(
                f"{self.path}: has no version {number}. It has {numbers}: packs learn {self.path} "
                "--use N.",
                "not-found",
                "use",
            )
        return Pack.open(folder)

    def versions(self) -> dict[int, Mapping[str, Any]]:
        """Return the figures of the comparison that each version won; version 0 has none."""
        versions: dict[int, Mapping[str, Any]] = {0: {}}
        if not self.versions_folder.is_dir():
            return versions

        for folder in sorted(self.versions_folder.iterdir()):
            is_version = _VERSION.fullmatch(folder.name) and (folder / PACK / MANIFEST).is_file()
            if is_version and int(folder.name):
                versions[int(folder.name)] = read_json(folder / FIGURES)
        return versions

    def version_folder(self, number: int) -> Path:
        return self.versions_folder / f"{number:04d}"

    def add_version(self) -> int:
        """Make the candidate the next version, atomically, and return its number."""
        make_folder(self.versions_folder)
        number = max(self.versions()) + 1

        filesystem.sync_tree(self.candidate)
        os.rename(self.candidate, self.version_folder(number))
        filesystem.sync(self.versions_folder)
        return number

    def _make(self, pack: Pack | None) -> None:
        facts = {"format": _FORMAT, **asdict(self)}
        del facts["path"]

        with atomic_folder(self.path, replace=self.path.exists()) as partial:
            partial.chmod(0o700)
            (partial / _README).write_text(_TEXT, encoding="utf-8")
            (partial / FACTS).write_text(to_json(facts), encoding="utf-8")

            if pack is not None:
                first = replace(self, path=partial).version_folder(0)
                shutil.copytree(str(pack.path), first / PACK)

    def _check_same(self, earlier: "LearningFolder") -> None:
        """Raise a PackError if a folder is of another base model, pack or name."""
        if replace(earlier, path=self.path, model=self.model) != self:
            raise PackError(
                f"--learn {self.path}: its answers are of '{earlier.name}' on {earlier.model}, and "
                "this base model, pack or name is another. Serve that, or name another folder.",
                "conflict",
                "learn",
            )
