"""The folder of a pack: what may be in it, whether it is complete, where one may be written."""

from pathlib import Path

from ..errors import PackError
from ..files import sha256
from .manifest import ADAPTER_CONFIG, ADAPTERS, MANIFEST, read_manifest


def open_folder(folder: Path) -> dict:
    """Return the manifest of a pack's folder, after checking the sizes of its files.

    Raises:
        PackError: it is not a pack, or a file is missing or has another size.
    """
    file = folder / MANIFEST
    if not folder.is_dir():
        raise PackError(f"{folder}: no such pack folder.", "not-found")
    if not file.is_file():
        is_external = (folder / ADAPTER_CONFIG).is_file()
        hint = f" `packs import {folder} --out PACK` makes one of it." if is_external else ""
        kind = "an mlx-lm adapter" if (folder / ADAPTERS).is_file() else "not a pack"
        raise PackError(f"{folder}: is {kind}: it has no {MANIFEST}.{hint}", "not-found")
    manifest = read_manifest(file)
    for name, facts in manifest["files"].items():
        size, digest = facts["bytes"], facts["sha256"]
        if Path(name).name != name:
            raise PackError(f"{file}: names a file outside the pack: {name!r}.", "unreadable")
        part = folder / name
        if not part.is_file() or (part.is_symlink() and not _is_hub_blob(part)):
            raise PackError(f"{part}: is named in {MANIFEST} but is not a file here.", "not-found")
        if part.stat().st_size != size:
            raise PackError(
                f"{part}: has {part.stat().st_size} bytes, but {MANIFEST} says "
                f"{size} (sha256 {digest[:12]}…). Copy the pack again.",
                "unreadable",
            )
    return manifest


def verify_hashes(folder: Path, manifest: dict) -> None:
    """Hash every file of a pack.

    Raises:
        PackError: a hash differs from the manifest's.
    """
    for name, facts in manifest["files"].items():
        check_hash(folder / name, facts["sha256"], str(folder / name))


def check_hash(file: Path, expected: str, where: str) -> None:
    """Raise a PackError, which says ``where``, unless a file has the SHA-256 of its manifest."""
    if (digest := sha256(file)) != expected:
        raise PackError(
            f"{where}: sha256 is {digest[:12]}…, but {MANIFEST} says {expected[:12]}…. The file "
            "was changed or damaged.",
            "unreadable",
        )


def check_output(folder: Path, overwrite: bool) -> None:
    """Check that a pack may be written to a folder.

    Raises:
        PackError: something else is there, or a pack and not ``overwrite``.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise PackError(f"--out {folder}: is a file. Choose another path.", "exists")
    if not any(folder.iterdir()):
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
    """Return whether a link is in a snapshot of the Hub's cache, to a file that belongs to it."""
    snapshots, target = link.parent.parent, link.resolve()
    return snapshots.name == "snapshots" and target.parent == snapshots.resolve().parent / "blobs"
