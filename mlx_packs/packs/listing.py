"""List packs below a folder or in the caches of the Hub, from manifests alone."""

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import PackError
from .folder import check_sizes
from .manifest import MANIFEST, METRICS, read_manifest, read_pin

_ID_DIGITS = 7  # of a commit, beside the name of a pack of the Hub


def list_packs(folder: str | Path | None = ".", hub_cache: bool = False) -> list[dict]:
    """List every pack below a folder, or in the Hub's caches; neither tensors nor hashes are read.

    Links to folders are not followed, hidden folders are skipped. Without a ``folder`` only the caches are searched.

    Returns:
        An object for each, by name: ``pack`` (folder), ``name``, ``error`` (None if it is
        complete) and, from its manifest, ``base``, ``fingerprint``, ``model_type``, ``quantization``,
        ``ranks``, ``parameters``, ``pack_mb``, ``ppl_before``, ``ppl_after`` (of an encoder null,
        with ``metric``, ``metric_before``, ``metric_after`` instead), ``created``, ``license``,
        ``hub`` (repo, revision, commit of a pulled one).

    Raises:
        PackError: there is no such folder.
    """
    packs = []
    if folder is not None:
        top = Path(folder).expanduser()
        if not top.is_dir():
            raise PackError(
                f"{top}: {'is a file' if top.exists() else 'no such folder'}. Name a "
                "folder with packs below it.",
                "not-found",
                "folder",
            )
        packs += [(str(path.relative_to(top)), path) for path in _packs_below(top)]
        packs = [(top.resolve().name if name == "." else name, path) for name, path in packs]
    if hub_cache:
        packs += _packs_of_hub()
    return [_entry(name, path) for name, path in sorted(packs)]


def _packs_below(top: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(top):
        if MANIFEST in files:
            folders.clear()
            yield Path(path)
        folders[:] = [name for name in folders if not name.startswith(".")]


def _packs_of_hub() -> Iterator[tuple[str, Path]]:
    """Yield packs that were pulled by name, and those in snapshots of the Hub's own cache."""
    from .hub import cache_roots

    pulled, snapshots = cache_roots()
    for file in pulled.glob(f"*/[!.]*/{MANIFEST}"):
        yield _hub_name(file.parent.parent.name, file.parent.name), file.parent
    for file in snapshots.glob(f"models--*/snapshots/*/{MANIFEST}"):
        repo = file.parents[2].name.removeprefix("models--")
        yield _hub_name(repo, file.parent.name), file.parent


def _hub_name(folder: str, commit: str) -> str:
    return f"{folder.replace('--', '/', 1)}@{commit[:_ID_DIGITS]}"


def _entry(name: str, folder: Path) -> dict:
    """Return the entry of a pack; with an error where its manifest or a file is damaged."""
    entry = dict.fromkeys(
        "base fingerprint model_type quantization ranks parameters pack_mb ppl_before ppl_after "
        "metric metric_before metric_after created license".split()
    )
    entry = {"pack": str(folder), "name": name, "error": None, **entry, "hub": read_pin(folder)}
    try:
        manifest = read_manifest(folder / MANIFEST)
        base, adapters, files = (manifest[key] for key in ("base", "adapters", "files"))
        slices = [s for module in adapters["modules"] for s in module["slices"]]
        own = (folder / MANIFEST).stat().st_size
        result, measured = (manifest.get(key) or {} for key in ("eval", "measured"))
        entry |= {
            **{key: base[key] for key in ("fingerprint", "model_type", "quantization")},
            "base": base["id"],
            "ranks": sorted({s["rank"] for s in slices if s["rank"]}),
            "parameters": adapters["parameters"],
            "pack_mb": round((own + sum(facts["bytes"] for facts in files.values())) / 1e6, 3),
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
        entry["error"] = f"{MANIFEST}: {error.strerror or error}"
    return entry


def _metric(result: dict) -> dict:
    """Return the metric that stands for a pack of an encoder; empty if it has none."""
    name = next((name for name in METRICS if f"{name}_after" in result), None)
    values = {when: result.get(f"{name}_{when}") for when in ("before", "after")}
    return {} if name is None else {"metric": name} | {f"metric_{k}": v for k, v in values.items()}


def table(entries: list[dict], width: int) -> list[str]:
    """Return the list as a table, in lines of at most ``width`` columns (60 or more)."""
    gap = "  " if width >= 80 else " "
    rows = [("pack", "base", "MB", "rank", "PPL", "made"), *map(_cells, entries)]
    wide = [max(len(row[i]) for row in rows) for i in range(6)]
    left = width - sum(wide[2:]) - 5 * len(gap)
    base = min(wide[1], max(8, left - wide[0], left * 2 // 5))
    wide[:2] = [min(wide[0], left - base), base]
    lines = []
    for row, entry in zip(rows, [None, *entries], strict=True):
        if entry is not None and entry["error"]:
            name = _cut(row[0], wide[0])
            lines.append(_cut(f"{name:<{wide[0]}}{gap}damaged: {entry['error']}", width))
            continue
        cells = [_cut(cell, wide[i]) for i, cell in enumerate(row)]
        shown = [
            f"{c:<{w}}" if i < 2 else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip(cells, wide, strict=True))
        ]
        lines.append(gap.join(shown).rstrip())
    return lines


def _cells(entry: dict) -> tuple[str, ...]:
    if entry["error"]:
        return (entry["name"], "", "", "", "", "")
    ranks, before, after = entry["ranks"], entry["ppl_before"], entry["ppl_after"]
    some = [f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"] if ranks else ["full"]
    measured = before is not None and after is not None
    moved = f"{_short(before)}→{_short(after)}" if measured else "-"
    if (name := entry["metric"]) and entry["metric_before"] is not None:
        moved = f"{METRICS[name]} {entry['metric_before']:.2f}→{entry['metric_after']:.2f}"
    return (
        entry["name"],
        entry["base"].rsplit("/", 1)[-1],
        f"{entry['pack_mb']:.1f}",
        *some,
        moved,
        (entry["created"] or "-")[:10],
    )


def _short(value: float) -> str:
    """Return a perplexity in at most five characters, where that is possible."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"
