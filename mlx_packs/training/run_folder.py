"""The run folder: step-NNNNNN checkpoints, metrics.jsonl, config.json; locked while a run lasts."""

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from ..config.data import DataConfig
from ..config.other_names import without_removed
from ..errors import PackError, file_errors, older_version
from ..files import atomic_write, exclusive_writer, is_pattern, make_folder, to_json, write_errors
from ..filesystem import discard, sweep
from ..packs.folder import check_output
from ..reading import (
    DOCUMENT_BYTES,
    SEAL,
    check_seal,
    json_objects,
    read_json,
    sealed,
    tail,
    without_seal,
)
from ..report.facts import PAGE
from .state import ADAPTERS, METRICS, STEP, batches_of, check_checkpoint, read_training_state

CONFIG = "config.json"
REPORT = "report.json"  # what the run reported at its end
STATUS = "status.json"  # what the run is doing, and how it ended
WAITING = "waiting.json"  # of a run that a queue will start
LOG = "log.txt"  # what the process printed, if whoever started it keeps that
SAMPLES = "samples.jsonl"
RUN_FORMAT_VERSION = 1
_RUN_FORMAT = "mlx_packs run "  # and the version
# Settings that every run records; without one of them an older version wrote it.
_SETTINGS = {"share_prefix", "template_date"}
_SEED_RUN = re.compile(r"seed-\d+-run")
# Fields of metrics.jsonl that are not numbers: the phase, and the events passed to `on_event`.
_OF_EVENTS = ("phase", "memory_pressure", "fault", "action", "to", "rows")


def run_folder(pack: Path) -> Path:
    if pack.name in ("", ".."):
        raise PackError(f"--out {pack}: must name a folder of its own.", "invalid")
    return pack.with_name(pack.name + "-run")


def name_of_run(run: Path) -> str:
    """Return the name of the pack that the run of a folder writes."""
    return run.name.removesuffix("-run")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a resumed run continues from: the newest that is not damaged."""

    folder: Path
    damaged: tuple[str, ...] = ()  # what is wrong with each newer checkpoint


@dataclass(frozen=True)
class RunFolder:
    """What is in the folder of a run: its identity, checkpoints, metrics and records."""

    path: Path

    @classmethod
    def of(cls, pack: Path) -> "RunFolder":
        """Return the folder of the run that writes a pack."""
        return cls(run_folder(pack))

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        if not self.path.is_dir():
            return []

        named = [entry for entry in self.path.iterdir() if STEP.fullmatch(entry.name)]
        folders = [entry for entry in named if entry.is_dir() and not entry.is_symlink()]
        return sorted(folders, key=batches_of)

    def latest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint that is not damaged; None without one."""
        try:
            return self.resume_point().folder
        except PackError:
            return None

    def best_checkpoint(self, after: int = 0, best_by: str | None = None) -> Path | None:
        """Return the checkpoint with the best validation score; None if none was measured.

        ``after`` leaves out earlier batches, since each phase has validation examples of its own;
        ``best_by`` is what ``--best`` names.
        """
        best = None
        highest = None
        for folder in self.checkpoints():
            try:
                score = read_training_state(folder).score(best_by)
            except PackError:
                continue
            if score and batches_of(folder) > after and score.is_better_than(highest):
                best = folder
                highest = score
        return best

    def resume_point(self) -> ResumePoint:
        """Return where a run is resumed; a PackError if no checkpoint is whole."""
        damaged: list[str] = []
        for folder in reversed(self.checkpoints()):
            try:
                check_checkpoint(folder)
            except PackError as error:
                damaged.append(error.message)
            else:
                return ResumePoint(folder, tuple(damaged))

        if damaged:
            text = damaged[0]
            if damaged[1:]:
                text += f" So are {len(damaged) - 1} older ones."
            raise PackError(f"--resume: {text} Start again with --overwrite.", "unreadable")
        raise self._without_checkpoint()

    def check_resumable(self) -> dict:
        """Return the identity of a run; it must have a checkpoint to continue from."""
        if not self.checkpoints():
            raise self._without_checkpoint()
        return self.read_identity()

    def read_identity(self) -> dict:
        """Return what `write_identity` wrote."""
        identity = self._parsed_identity()
        if SEAL not in identity or not _SETTINGS <= set(identity["recipe"]):
            raise older_version(self.path, "Train again, with --overwrite.")
        with file_errors(self.path / CONFIG, self._without_identity()):
            check_seal(identity)

        return without_seal(identity) | {"recipe": without_removed(identity["recipe"])}

    def write_identity(self, identity: dict) -> None:
        """Write the ``recipe`` of a run, and the fingerprints of its ``base`` and ``data``.

        A resumed run takes the ``matmul_path`` that is there, the choice of ``auto``.
        """
        content = {"format": f"{_RUN_FORMAT}{RUN_FORMAT_VERSION}", **identity}
        atomic_write(self.path / CONFIG, to_json(sealed(content)))

    def matmul_path(self) -> str | None:
        """Return the matmul path that ``auto`` chose when a run began; None if it chose none."""
        path = self.read_identity().get("matmul_path")
        if isinstance(path, str):
            return path
        return None

    def reference_file(self, start: int) -> Path:
        """Return the file of the parameters that a phase starts from, after ``start`` batches."""
        return self.path / f"reference-{start:06d}.safetensors"

    def clear(self) -> None:
        """Remove the checkpoints, the metrics and the records of an earlier run."""
        for folder in self.checkpoints():
            discard(folder, folder)
        had = ("not_finite.jsonl", "loss.png")  # runs of earlier versions
        for name in (METRICS, REPORT, PAGE, SAMPLES, *had):
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob("reference-*.safetensors"):
            file.unlink()

    def is_run(self) -> bool:
        """Return whether the folder is a run's, or waits for one."""
        if not self.path.is_dir():
            return False
        if {entry.name for entry in self.path.iterdir()} <= {STATUS, WAITING, LOG}:
            return True
        try:
            return bool(self._parsed_identity())
        except PackError:
            return False

    def metrics_until(self, batches: int) -> list[dict]:
        """Return the lines of metrics.jsonl up to a batch, and remove all others from it."""
        if not (self.path / METRICS).is_file():
            return []
        lines = [line for line in self.metrics(math.inf) if line["batch"] <= batches]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        atomic_write(self.path / METRICS, text)
        return lines

    def metrics(self, most: float = DOCUMENT_BYTES) -> list[dict]:
        """Return the lines of a run in metrics.jsonl, of its last ``most`` bytes."""
        return [line for line in self._lines(METRICS, most) if _is_of_metrics(line)]

    def samples(self, most: float = DOCUMENT_BYTES) -> list[dict]:
        """Return the lines of samples.jsonl: batch, prompt, expected (or None) and answer.

        Only its last ``most`` bytes are read.
        """
        kinds = {"prompt": str, "answer": str, "expected": str | None}
        return [
            line
            for line in self._lines(SAMPLES, most)
            if all(isinstance(line.get(name, 0), kind) for name, kind in kinds.items())
        ]

    def _lines(self, name: str, most: float) -> Iterator[dict]:
        """Yield the lines of a file that are of a batch; there may be no file."""
        for line in json_objects(tail(self.path / name, most=most).lines):
            if type(line.get("batch")) is int:
                yield line

    def _parsed_identity(self) -> dict:
        """Return the content of the identity file, with the required types."""
        file = self.path / CONFIG
        try:
            identity = read_json(file, object)
        except (OSError, PackError):
            raise PackError(
                f"{file}: cannot be read as JSON. {self._without_identity()}", "unreadable"
            ) from None

        version = _format_version(identity)
        if version > RUN_FORMAT_VERSION:
            raise PackError(
                f"{file}: format {version} is newer than this program's ({RUN_FORMAT_VERSION}). "
                "Upgrade mlx-packs.",
                "unsupported",
            )

        kinds = {"recipe": dict, "base": str, "data": dict}
        if not version or not all(isinstance(identity.get(k), kind) for k, kind in kinds.items()):
            needed = f"format '{_RUN_FORMAT}{RUN_FORMAT_VERSION}', recipe, base, data"
            raise PackError(
                f"{file}: belongs to no run (it needs {needed}). {self._without_identity()}",
                "unreadable",
            )
        return identity

    def _without_identity(self) -> str:
        """Return the remedy for a run whose identity cannot be read."""
        if not (folders := self.checkpoints()):
            return "This is no run folder."
        return (
            "Restore it from a backup, or start a new run from the adapters with "
            f"--resume-adapter-file {folders[-1] / ADAPTERS}."
        )

    def _without_checkpoint(self) -> PackError:
        """Return the error of a run that ended before its first checkpoint, or never began."""
        text = "is no run. Check --out, or start a run without --resume."
        if self.path.is_dir():
            text = "has no checkpoint. Repeat the command that started it, with --overwrite."
        return PackError(f"--resume: {self.path} {text}", "not-found")


def seed_runs(folder: Path) -> list[Path]:
    """Return the run folders of `packs train --seeds` in a folder, the smallest seed first."""
    if not folder.is_dir():
        return []

    runs = [run for run in folder.iterdir() if _SEED_RUN.fullmatch(run.name)]
    return sorted(runs, key=lambda run: int(run.name.split("-")[1]))


def check_unchanged(where: str, then: Mapping, now: Mapping) -> None:
    """Check that a run continues with the settings, by name, that it began with."""
    for name, value in now.items():
        if then.get(name) != value:
            raise PackError(
                f"{where}: {name} is {value!r:.200} but the run used "
                f"{then.get(name)!r:.200}. Resume with the original settings.",
                "mismatch",
                name.rpartition(".")[2],
            )


def _format_version(identity: object) -> int:
    """Return the version of a run's format; 0 if it is no run's."""
    stated = identity.get("format") if isinstance(identity, dict) else None
    if not isinstance(stated, str):
        return 0

    match = re.fullmatch(_RUN_FORMAT + r"([1-9][0-9]{0,8})", stated)
    if match is None:
        return 0
    return int(match[1])


def _is_of_metrics(line: Mapping) -> bool:
    """Return whether a line has numbers by name, and perhaps an event, or scores by phase."""
    scores = line.get("held_out", {})
    if not isinstance(scores, dict) or not all(isinstance(s, dict) for s in scores.values()):
        return False

    values = {k: v for k, v in line.items() if k not in ("held_out", *_OF_EVENTS)}
    numbers = list(values.values())
    for score in scores.values():
        numbers += score.values()
    return all(type(number) in (int, float, NoneType) for number in numbers)


@contextmanager
def output_folders(
    out: str | Path | None, columns: DataConfig, overwrite: bool, resume: bool
) -> Iterator[tuple[Path, Path]]:
    """Yield the folders of pack and run, which no other process writes meanwhile.

    Without ``out`` the pack is named after its data, with a number if that name is taken; the
    name is reserved by creating the run folder. Folders still empty at the end are removed.
    """
    if out is None:
        if resume:
            raise PackError("--resume: needs the pack of the run. Name it with --out.", "conflict")
        folder = Path("packs") / _data_name(columns)
    else:
        folder = Path(out).expanduser()
        run_folder(folder)  # checks the name
        check_output(folder, overwrite or resume)

    parent = next(p for p in folder.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        name = folder if out is None else out
        raise PackError(
            f"--out {name}: cannot be written ({parent} is no folder to write in).", "unwritable"
        )

    created = [p for p in folder.absolute().parents if not p.exists()]
    try:
        make_folder(folder.parent)
        if out is None:
            folder = _reserved(folder)
            created.insert(0, run_folder(folder).absolute())
        run = run_folder(folder)
        with exclusive_writer(run):
            sweep(folder.parent)
            sweep(run)
            if out is not None and not resume:
                _check_run(run, overwrite)
            yield folder, run
    finally:
        for path in created:
            with suppress(OSError):  # it is not empty
                path.rmdir()


def _reserved(folder: Path) -> Path:
    """Create the run folder of the first free name, with a number if needed; return the pack's."""
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    for free in itertools.chain([folder], numbered):
        with write_errors(free), suppress(FileExistsError):
            if not free.exists():
                run_folder(free).mkdir()
                return free


def _check_run(run: Path, overwrite: bool) -> None:
    if run.exists() and not RunFolder(run).is_run():
        raise PackError(f"{run}: already exists and is not a run. Choose another --out.", "exists")
    if RunFolder(run).checkpoints() and not overwrite:
        raise PackError(
            f"{run}: has checkpoints of an earlier run. Continue it with --resume, replace it "
            "with --overwrite, or choose another --out.",
            "exists",
        )


def _data_name(columns: DataConfig) -> str:
    """Return the default name of a pack, after its data or the first of several sources."""
    first = columns.hf_dataset
    if isinstance(first, list) and first:
        first = first[0]

    if isinstance(first, dict) and isinstance(first.get("path"), str):
        return Path(first["path"]).expanduser().resolve().name or "pack"

    name = columns.data
    if name.startswith("hf:"):
        name = name.removeprefix("hf:").partition("[")[0]
    path = Path(name).expanduser().resolve()
    if is_pattern(columns.data):  # the first folder above it that is no pattern
        path = next(above for above in path.parents if not is_pattern(str(above)))
    return path.stem or "pack"
