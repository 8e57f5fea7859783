"""The folder of a pack: what may be in it, whether it is complete, and lists of such folders."""

import os
from collections.abc import Iterator
from pathlib import Path

from ..adapters.spec import ranks_of
from ..config.arguments import checked_arguments
from ..config.choices import METRICS
from ..errors import PackError
from ..reading import sha256
from ..terminal import short
from .manifest import ADAPTER_CONFIG, ADAPTERS, MANIFEST, read_manifest, read_pin, specs_of

_ID_DIGITS = 7  # of a commit, beside the name of a pack of the Hub


def open_folder(folder: Path) -> dict:
    """The manifest; the sizes of the files are checked."""
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


def cache_root() -> Path:
    """The folder of packs that were pulled by name."""
    from huggingface_hub import constants

    return Path(constants.HF_ASSETS_CACHE) / "mlx_packs"


@checked_arguments
def list_packs(folder: str | Path | None = ".", hub_cache: bool = False) -> list[dict]:
    """List the packs below a folder or in the cache of pulled packs; no tensor or hash is read.

    Links to folders are not followed, and hidden folders are skipped.

    Args:
        folder: Folder to search with its subfolders; None searches no folder.
        hub_cache: Whether to list the pulled packs in the cache.

    Returns:
        A mapping for each pack, sorted by name. ``pack`` is the folder, ``name`` the name, and
        ``error`` is None if the pack is complete. From the manifest it has ``base``,
        ``fingerprint``, ``model_type``, ``quantization``, ``ranks``, ``parameters``, ``pack_mb``,
        ``ppl_before``, ``ppl_after`` (for an encoder None, with ``metric``, ``metric_before`` and
        ``metric_after`` instead), ``created``, ``license`` and, for a pulled pack, ``hub`` (repo,
        revision, commit).

    Raises:
        PackError: If there is no such folder.
    """
    packs: list[tuple[str, Path, OSError | None]] = []
    if folder is not None:
        top = Path(folder).expanduser()
        if not top.is_dir():
            kind = "is a file" if top.exists() else "no such folder"
            raise PackError(
                f"{top}: {kind}. Name a folder with packs below it.", "not-found", "folder"
            )

        for path, fault in packs_below(top):
            name = top.resolve().name if path == top else str(path.relative_to(top))
            packs.append((name, path, fault))

    if hub_cache:
        packs += [(name, path, None) for name, path in _packs_of_hub()]

    return [_entry(*pack) for pack in sorted(packs, key=lambda pack: pack[:2])]


def packs_below(top: Path) -> Iterator[tuple[Path, OSError | None]]:
    """Each folder with a manifest, and each that cannot be read with the reason."""
    waiting = [top]
    while waiting:
        path = waiting.pop()
        try:
            with os.scandir(path) as entries:
                is_folder = {e.name: e.is_dir(follow_symlinks=False) for e in entries}
        except OSError as error:
            yield path, error
            continue

        if is_folder.get(MANIFEST) is False:
            yield path, None
        else:
            visible = [name for name, is_one in is_folder.items() if is_one and name[0] != "."]
            waiting += [path / name for name in visible]


def _packs_of_hub() -> Iterator[tuple[str, Path]]:
    for file in cache_root().glob(f"*/[!.]*/{MANIFEST}"):
        folder = file.parent
        name = folder.parent.name.replace("--", "/", 1)
        yield f"{name}@{folder.name[:_ID_DIGITS]}", folder


def _entry(name: str, folder: Path, fault: OSError | None) -> dict:
    """A damaged manifest or file is its error, as ``fault`` is: the folder cannot be read."""
    entry = dict.fromkeys(
        "base fingerprint model_type quantization ranks parameters pack_mb ppl_before ppl_after "
        "metric metric_before metric_after created license".split()
    )
    entry = {"pack": str(folder), "name": name, "error": None, **entry, "hub": None}

    try:
        if fault is not None:
            raise fault

        entry["hub"] = read_pin(folder)
        manifest = read_manifest(folder / MANIFEST)
        base = manifest["base"]
        sizes = [facts["bytes"] for facts in manifest["files"].values()]
        result = manifest.get("eval") or {}
        measured = manifest.get("measured") or {}

        entry |= {
            **{key: base[key] for key in ("fingerprint", "model_type", "quantization")},
            "base": base["id"],
            "ranks": ranks_of(specs_of(manifest)),
            "parameters": manifest["adapters"]["parameters"],
            "pack_mb": round(((folder / MANIFEST).stat().st_size + sum(sizes)) / 1e6, 3),
            "ppl_before": result.get("ppl_before"),
            "ppl_after": result.get("ppl_after"),
            **_metric(result),
            "created": measured.get("created"),
            "license": manifest.get("license"),
        }

        check_sizes(folder, manifest)
    except PackError as error:
        entry["error"] = error.message.removeprefix(f"{folder}{os.sep}")
    except OSError as error:
        entry["error"] = f"{Path(error.filename or MANIFEST).name}: {error.strerror or error}"

    return entry


def _metric(result: dict) -> dict:
    for name in METRICS:
        if f"{name}_after" in result:
            return {
                "metric": name,
                "metric_before": result.get(f"{name}_before"),
                "metric_after": result[f"{name}_after"],
            }
    return {}


def table(entries: list[dict]) -> list[str]:
    """Return entries of `list_packs` as lines below a heading; a damaged pack has its fault."""
    rows = [["pack", "base", "MB", "rank", "PPL", "created"], *map(_cells, entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]

    lines = []
    for (name, base, *numbers), entry in zip(rows, [None, *entries], strict=True):
        if entry is not None and entry["error"]:
            lines.append(f"{name:<{widths[0]}}  damaged: {entry['error']}")
            continue
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", f"{base:<{widths[1]}}", *cells]))
    return lines


def _cells(entry: dict) -> list[str]:
    if entry["error"]:
        return [entry["name"], "", "", "", "", ""]

    rank = "full"
    if ranks := entry["ranks"]:
        rank = "-".join(map(str, dict.fromkeys([ranks[0], ranks[-1]])))

    change = "-"
    before = entry["ppl_before"]
    after = entry["ppl_after"]
    if before is not None and after is not None:
        change = f"{short(before)}→{short(after)}"
    if (name := entry["metric"]) and entry["metric_before"] is not None:
        change = f"{METRICS[name].label} {entry['metric_before']:.2f}→{entry['metric_after']:.2f}"

    base = entry["base"].rsplit("/", 1)[-1]
    created = (entry["created"] or "-")[:10]
    return [entry["name"], base, f"{entry['pack_mb']:.1f}", rank, change, created]
