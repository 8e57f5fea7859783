"""The folder of a pack: what may be in it, whether it is complete, where one may be written."""

from pathlib import Path

from ..errors import PackError
from ..leftovers import recover
from ..reading import sha256
from .manifest import ADAPTER_CONFIG, ADAPTERS, MANIFEST, read_manifest


def open_folder(folder: Path) -> dict:
    """The manifest; the sizes of the files are checked."""
    recover(folder)
    if not folder.is_dir():
        raise PackError(f"{folder}: no such pack folder.", "not-found")

    file = folder / MANIFEST
    if not file.is_file():
        kind = "an mlx-lm adapter" if (folder / ADAPTERS).is_file() else "not a pack"
        hint = ""
        if (folder / ADAPTER_CONFIG).is_file():
            hint = f" `packs import {folder} --out PACK` makes one of it."
        raise PackError(f"{folder}: is {kind}: it has no {MANIFEST}.{hint}", "not-found")

    manifest = read_manifest(file)
    check_sizes(folder, manifest)
    return manifest


def check_sizes(folder: Path, manifest: dict) -> None:
    for name, facts in manifest["files"].items():
        size = facts["bytes"]
        digest = facts["sha256"]
        part = folder / name
        if part.name != name:
            raise PackError(
                f"{folder / MANIFEST}: names a file outside the pack: {name!r}.", "unreadable"
            )

        if not part.is_file() or (part.is_symlink() and not _is_hub_blob(part)):
            raise PackError(f"{part}: is named in {MANIFEST} but is not a file here.", "not-found")

        if part.stat().st_size != size:
            raise PackError(
                f"{part}: has {part.stat().st_size} bytes, but {MANIFEST} says "
                f"{size} (sha256 {digest[:12]}…). Copy the pack again.",
                "unreadable",
            )


def verify_hashes(folder: Path, manifest: dict) -> None:
    for name, facts in manifest["files"].items():
        check_hash(folder / name, facts["sha256"], str(folder / name))


def check_hash(file: Path, expected: str, where: str) -> None:
    """``where`` is for errors."""
    if (digest := sha256(file)) != expected:
        raise PackError(
            f"{where}: sha256 is {digest[:12]}…, but {MANIFEST} says {expected[:12]}…. The file "
            "was changed or damaged.",
            "unreadable",
        )


def check_output(folder: Path, overwrite: bool) -> None:
    """Check that nothing else is at ``folder``, and no pack unless ``overwrite``."""
    recover(folder)

    if folder.exists() and not folder.is_dir():
        raise PackError(f"--out {folder}: is a file. Choose another path.", "exists")
    if not folder.exists() or not any(folder.iterdir()):
        return

    if not (folder / MANIFEST).is_file():
        raise PackError(
            f"--out {folder}: already exists and is not a pack. Choose another path.", "exists"
        )
    if not overwrite:
        raise PackError(
            f"--out {folder}: is a pack already. Choose another path or pass --overwrite.",
            "exists",
        )


def _is_hub_blob(link: Path) -> bool:
    """Whether a link is in a snapshot of the Hub's cache, to a file that belongs to it."""
    snapshots = link.parent.parent
    target = link.resolve()
    return snapshots.name == "snapshots" and target.parent == snapshots.resolve().parent / "blobs"
