"""The output folders of a run: locked while it lasts; what is there already is not lost."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..config.data import DataConfig
from ..errors import PackError
from ..files import exclusive_writer, is_pattern, make_folder, write_errors
from ..filesystem import sweep
from ..packs.folder import check_output
from .run_folder import RunFolder, run_folder


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
