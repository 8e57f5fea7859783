"""Packs to and from PEFT and mlx-lm: `export_pack` writes a folder, `import_adapter` reads one.

Every conversion is proven by numbers (`foreign.prove`). A folder that was exported here carries the
pack's manifest beside what the other tool reads, so that it comes back to the byte; once the other
tool has changed it, it is read by its own config.
"""

import json
import math
import re
from pathlib import Path

from .. import __version__
from ..bases.files import TINY
from ..bases.loading import lazy_base
from ..errors import PackError
from ..files import atomic_folder, read_tensors, save_tensors, sha256, to_json, write_tensors
from ..packs.manifest import FORMAT_VERSION, check_manifest, replaced_of, shapes_of, specs_of
from ..packs.pack import Pack, grouped, manifest_of, modules_json, versions_line
from ..runtime import mx
from . import mlx_lm as mlx_lm_format
from . import peft as peft_format
from .external import (
    CONFIG,
    Foreign,
    Tensors,
    folded,
    plain_file,
    prove,
    refuse_pack,
    refuse_pickle,
    scale_of,
    specs_for,
    unfolded,
)

FORMATS = {"mlx-lm": mlx_lm_format, "peft": peft_format}
SIDECAR = "mlx_packs.json"
ORIGINALS = "mlx_packs.safetensors"  # lora_b that cannot be had back from what it was folded into


def export_pack(pack: str | Path | Pack, to: str, out: str | Path) -> dict:
    """Write a pack as a folder of another tool; whole or not at all.

    Args:
        to: ``peft`` or ``mlx-lm``.
    Returns: what `packs export --json` prints.
    Raises: PackError naming what the other format has no place for, and why.
    """
    if to not in FORMATS:
        raise PackError(f"--to {to}: must be one of {', '.join(FORMATS)}.")
    pack = pack if isinstance(pack, Pack) else Pack.open(pack)
    out, form = Path(out).expanduser(), FORMATS[to]
    tensors, config, notes = form.write(pack)
    prove(pack.specs, pack.load_tensors(), _formulas(to, tensors, config, pack.manifest), out)
    originals = _not_invertible(pack, config, to)
    with atomic_folder(out) as partial:
        write_tensors(partial / form.TENSORS, tensors, tensors.items(), _KINDS[to])
        (partial / CONFIG).write_text(to_json(config), encoding="utf-8")
        names = [form.TENSORS, CONFIG]
        if originals:
            save_tensors(partial / ORIGINALS, originals)
            names.append(ORIGINALS)
        manifest = {k: v for k, v in pack.manifest.items() if k not in ("files", "profile")}
        sidecar = {
            "format_version": FORMAT_VERSION,
            "about": "what packs import needs to give the pack back to the byte",
            "sha256": {name: sha256(partial / name) for name in names},
            "pack": manifest,
        }
        (partial / SIDECAR).write_text(to_json(sidecar), encoding="utf-8")
    size = sum(f.stat().st_size for f in out.iterdir())
    return {
        "out": str(out),
        "to": to,
        "modules": len(pack.specs),
        "tensors": len(tensors),
        "mb": round(size / 1e6, 3),
        "notes": notes,
    }


_KINDS = {"mlx-lm": "mlx", "peft": "pt"}


def _formulas(kind: str, tensors: Tensors, config: dict, manifest: dict) -> dict:
    if kind == "peft":
        return peft_format.formulas(tensors, config, manifest["base"]["model_type"])
    return mlx_lm_format.formulas(tensors, config)


def _scale_there(spec, config: dict, kind: str) -> float:
    """What scale a module of ours has in a folder that was exported."""
    return scale_of(spec) if kind == "peft" else config["lora_parameters"]["scale"]


def _not_invertible(pack: Pack, config: dict, kind: str) -> Tensors:
    """Each lora_b that dividing by its factors does not give back to the bit."""
    kept = {}
    for path, spec in pack.specs.items():
        b, scale = pack.load_tensors()[f"{path}.lora_b"], _scale_there(spec, config, kind)
        back = unfolded(spec, folded(spec, b, scale), scale)
        if back.dtype != b.dtype or not mx.array_equal(back, b).item():
            kept[f"{path}.lora_b"] = b
    return kept


def import_adapter(
    folder: str | Path,
    out: str | Path,
    model: str | Path | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> dict:
    """Make a pack of another tool's adapter.

    Args:
        folder: with ``adapter_config.json`` and safetensors, of PEFT or mlx-lm.
        model: the base that it is for; None takes the one that its config names, if that is a hub
            id, or none at all where the folder was exported here and is as it was.
    Returns: what `packs import --json` prints.
    Raises: PackError naming what cannot be converted, and why.
    """
    folder = Path(folder).expanduser()
    refuse_pickle(folder)
    if not folder.is_dir():
        raise PackError(f"{folder}: no such folder.")
    refuse_pack(folder)
    config = _read_json(plain_file(folder, CONFIG))
    kind = _kind(config, folder)
    form = FORMATS[kind]
    form.check_config(config, folder / CONFIG)
    file = plain_file(folder, form.TENSORS)
    tensors = read_tensors(file)
    sidecar = _read_sidecar(folder)
    unchanged = sidecar is not None and _is_unchanged(folder, sidecar, (form.TENSORS, CONFIG))
    if unchanged:
        pack = _given_back(folder, kind, config, tensors, sidecar)
        if model is not None:
            pack.check_checkpoint(model)
    else:
        pack = _converted(
            file, kind, config, tensors, _base_name(model, config, folder), trust_remote_code
        )
    prove(pack.specs, pack.tensors, _formulas(kind, tensors, config, pack.manifest), file)
    pack.save(out, overwrite)
    kinds = sorted({spec.kind for spec in pack.specs.values()})
    return {
        "out": str(pack.path),
        "from": kind,
        "base": pack.manifest["base"]["id"],
        "modules": len(pack.specs),
        "kinds": kinds,
        "ranks": sorted({spec.rank for spec in pack.specs.values()}),
        "replaced": list(replaced_of(pack.manifest)),
        "exported_here": unchanged,
        "pack_mb": round(pack.size_mb, 3),
    }


def _read_json(file: Path) -> dict:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PackError(f"{file}: is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise PackError(f"{file}: must hold a mapping.")
    return found


def _kind(config: dict, folder: Path) -> str:
    if "peft_type" in config:
        return "peft"
    if "lora_parameters" in config or "fine_tune_type" in config:
        return "mlx-lm"
    raise PackError(
        f"{folder / CONFIG}: is of neither PEFT (peft_type) nor mlx-lm (lora_parameters)."
    )


def _base_name(model: str | Path | None, config: dict, folder: Path) -> str | Path:
    if model is not None:
        return model
    named = config.get("base_model_name_or_path") or config.get("model")
    # a path that a downloaded file names is not followed
    is_id = isinstance(named, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", named)
    if named == TINY or (is_id and ".." not in named):
        return named
    raise PackError(f"{folder}: names no base that can be looked up ({named!r}); pass --model M.")


def _read_sidecar(folder: Path) -> dict | None:
    if not (folder / SIDECAR).exists():
        return None
    file = plain_file(folder, SIDECAR)
    found = _read_json(file)
    version = found.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise PackError(f"{file}: format_version must be a number above 0, but is {version!r}.")
    if version > FORMAT_VERSION:
        raise PackError(
            f"{file}: format {version} is newer than this program's ({FORMAT_VERSION});"
            " upgrade mlx-packs."
        )
    hashes = found.get("sha256")
    if not isinstance(hashes, dict) or not isinstance(found.get("pack"), dict):
        raise PackError(f"{file}: has no 'sha256' and 'pack'; remove it to import by {CONFIG}.")
    if outside := next((name for name in hashes if Path(name).name != name), None):
        raise PackError(f"{file}: names a file outside: {outside!r}.")
    return found


def _is_unchanged(folder: Path, sidecar: dict, names: tuple[str, str]) -> bool:
    """Whether tensors and config, and what else was noted, are what was exported."""
    hashes = sidecar["sha256"]
    return set(names) <= set(hashes) and all(
        (folder / name).exists() and sha256(plain_file(folder, name)) == digest
        for name, digest in hashes.items()
    )


def _given_back(folder: Path, kind: str, config: dict, tensors: Tensors, sidecar: dict) -> Pack:
    """The very pack that was exported."""
    where, manifest = folder / SIDECAR, sidecar["pack"]
    try:
        check_manifest(manifest, with_files=False)
    except ValueError as error:
        raise PackError(f"{where}: is not a manifest ({error}).") from None
    specs = specs_of(manifest)
    found = _read(kind, tensors, config, manifest, folder, {p: s.rank for p, s in specs.items()})
    ours = dict(found.whole)
    for path, spec in specs.items():
        ours |= {n: found.tensors[n] for n in spec.shapes if n in found.tensors}
        name = f"{path}.lora_b"
        if name in ours:
            ours[name] = unfolded(spec, ours[name], _scale_there(spec, config, kind))
    if ORIGINALS in sidecar["sha256"]:
        ours |= read_tensors(plain_file(folder, ORIGINALS))
    wanted = shapes_of(manifest)
    for name in sorted(set(wanted) | set(ours)):
        shape = tuple(ours[name].shape) if name in ours else None
        if shape != wanted.get(name):
            raise PackError(
                f"{where}: {name} is {shape}, but its manifest says {wanted.get(name)}."
            )
    return Pack(manifest, ours)


def _read(
    kind: str, tensors: Tensors, config: dict, manifest: dict, folder: Path, ranks=None
) -> Foreign:
    where = folder / FORMATS[kind].TENSORS
    if kind == "peft":
        return peft_format.read(tensors, config, manifest["base"]["model_type"], where)
    return mlx_lm_format.read(tensors, config, where, ranks)


def _converted(
    file: Path, kind: str, config: dict, tensors: Tensors, model: str | Path, trust: bool
) -> Pack:
    """A pack of tensors that another tool wrote, held against the base."""
    base = lazy_base(model, trust)
    facts = {"base": {"model_type": base.config["model_type"]}}
    found = _read(kind, tensors, config, facts, file.parent)
    if kind == "peft":
        found = peft_format.without_copies(found, base)
        found = peft_format.without_tied_head(found, base, file)
    specs = specs_for(base, found, file)
    ours = {**found.tensors, **found.whole}
    adapters = {
        "parameters": sum(math.prod(s) for spec in specs.values() for s in spec.shapes.values()),
        "groups": [],
        "modules": modules_json(base, specs),
    }
    if found.whole:
        adapters["replaced"] = [{"name": n, "shape": list(t.shape)} for n, t in found.whole.items()]
    source = {
        "from": kind,
        "base": config.get("base_model_name_or_path") or config.get("model"),
        "by": f"mlx-packs {__version__}",
    }
    source["base"] = source["base"] if isinstance(source["base"], str) else None
    pack = Pack(manifest_of(base, adapters, imported=source, versions=versions_line()), ours)
    return grouped(pack, base)  # no weight of the base is read
