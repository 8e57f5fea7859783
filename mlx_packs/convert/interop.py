"""Packs to and from other tools: `export_pack` writes a folder, `import_adapter` reads one.

Every conversion is numerically verified. A folder that was exported here has the pack's manifest
beside what the other tool reads, so that import restores the pack bit-identically; once the other
tool has changed it, it is read by its own config.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import __version__
from ..adapters.spec import SCORE_WEIGHT, check_shapes
from ..bases.files import CHAT_TEMPLATE, TINY, public_name, resolve_checkpoint
from ..bases.loading import lazy_base
from ..config.arguments import checked_arguments
from ..data.labels import SINGLE, Classes
from ..errors import PackError
from ..files import atomic_folder, is_hub_id, to_json
from ..packs.base import Base, name_of
from ..packs.compatibility import check_checkpoint
from ..packs.making import untrained_pack
from ..packs.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    chat_template_of,
    check_manifest,
    has_score_head,
    replaced_of,
    shapes_of,
    specs_of,
    template_kwargs_of,
)
from ..packs.pack import Pack
from ..reading import read_json, sha256
from ..runtime import mx
from ..tensors import read_tensors, save_tensors
from .adapter_texts import differing_texts
from .external import (
    CONFIG,
    SIDECAR,
    StoredAdapter,
    Tensors,
    check_no_pickle,
    folded,
    plain_file,
    specs_for,
    unfolded,
    verify_numerically,
)
from .formats import DESTINATIONS, FORMATS, AdapterFormat, format_of
from .peft import readme_of_gguf

ORIGINALS = "mlx_packs.safetensors"  # lora_b that cannot be restored from what it was folded into


@checked_arguments
def export_pack(
    pack: str | Path | Pack, to: str, out: str | Path, start: str | None = None
) -> dict:
    """Convert a pack for another program, atomically.

    Args:
        pack: A pack or its folder.
        to: ``"peft"`` or ``"mlx-lm"``, which `import_adapter` reads back, or a program: ``"gguf"``
            (llama.cpp), ``"ollama"``, ``"lmstudio"`` or ``"swift"`` (mlx-swift-lm).
        out: Folder to write.
        start: The base model as the program names it: a model of Ollama, or for LM Studio the
            checkpoint to merge into, by default the one that the pack was trained on.

    Returns:
        The output of `packs export --json`.

    Raises:
        PackError: If the other format cannot store a part of the pack.
    """
    if to not in (*FORMATS, *DESTINATIONS):
        raise PackError(
            f"--to {to}: must be one of {', '.join((*FORMATS, *DESTINATIONS))}.", "unknown"
        )

    if not isinstance(pack, Pack):
        pack = Pack.open(pack)
    if has_score_head(pack.manifest) and to != "peft":
        raise PackError(
            f"--to {to}: {pack.name} is a reward model or classifier, whose head {to} has no place "
            "for. Pass --to peft.",
            "unsupported",
            "to",
        )

    out = Path(out).expanduser()
    if to in DESTINATIONS:
        report = DESTINATIONS[to].write(pack, out, start)
    else:
        report = _export_adapter(pack, to, out)

    size = sum(f.stat().st_size for f in out.iterdir())
    return {
        "out": str(out),
        "to": to,
        "modules": len(pack.specs),
        "mb": round(size / 1e6, 3),
        "template_kwargs": template_kwargs_of(pack.manifest),
        **report,
    }


def _export_adapter(pack: Pack, to: str, out: Path) -> dict:
    """Write a pack so that `import_adapter` gives it back bit-identically."""
    form = FORMATS[to]
    stored = form.convert(pack, out / form.tensor_file)
    deltas = form.deltas(stored, pack.manifest["base"]["model_type"])
    verify_numerically(pack.specs, pack.load_tensors(), deltas, out)

    notes = list(stored.notes)
    with atomic_folder(out) as partial:
        names = form.save(stored, partial)
        if template := chat_template_of(pack.manifest):
            (partial / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
            names.append(CHAT_TEMPLATE)
        if to == "peft" and (readme := readme_of_gguf(pack, out.name)):
            (partial / "README.md").write_text(readme, encoding="utf-8")
            notes.append(f"transformers opens the base by gguf_file: code is in {out}/README.md")
        if originals := _not_invertible(pack, stored.config, form):
            save_tensors(partial / ORIGINALS, originals)
            names.append(ORIGINALS)

        sidecar = {
            "format_version": FORMAT_VERSION,
            "about": "what packs import needs to restore the pack byte for byte",
            "sha256": {name: sha256(partial / name) for name in names},
            "pack": {k: v for k, v in pack.manifest.items() if k not in ("files", "profile")},
        }
        (partial / SIDECAR).write_text(to_json(sidecar), encoding="utf-8")

    return {"tensors": len(stored.tensors), "notes": notes}


def _not_invertible(pack: Pack, config: dict, form: AdapterFormat) -> Tensors:
    """Return each lora_b that `unfolded` does not restore bit-identically."""
    originals = {}
    for path, spec in pack.specs.items():
        b = pack.load_tensors()[f"{path}.lora_b"]
        scale = form.scale_of(spec, config)
        restored = unfolded(spec, folded(spec, b, scale), scale)
        if restored.dtype != b.dtype or not mx.array_equal(restored, b).item():
            originals[f"{path}.lora_b"] = b
    return originals


@checked_arguments
def import_adapter(
    folder: str | Path,
    out: str | Path,
    base: Base | str | Path | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    labels: Sequence[str] = (),
) -> dict:
    """Convert an adapter of PEFT or mlx-lm to a pack.

    An adapter of PEFT's task ``SEQ_CLS`` with several outputs becomes a classifier of texts with
    one label each, and with one output a reward model, or a reranker if one was exported there.

    Args:
        folder: Folder with ``adapter_config.json`` and safetensors files.
        out: Folder to write the pack to.
        base: The base model of the adapter: a folder, a Hub id, or a loaded one. None takes the one
            that its config names, if that is a Hub id. A folder that `export_pack` wrote, and that
            is unchanged, needs none.
        overwrite: Whether to replace a pack at ``out``.
        trust_remote_code: Whether to allow executing Python code shipped with the base model.
        labels: Names of the labels of a classifier, in the order of its outputs. By default
            the exported pack's names, or ``LABEL_0``, ``LABEL_1``, ...

    Returns:
        The output of `packs import --json`.

    Raises:
        PackError: If a part of the adapter cannot be converted.
    """
    folder = Path(folder).expanduser()
    check_no_pickle(folder)
    if not folder.is_dir():
        raise PackError(f"{folder}: no such folder.", "not-found")
    if (folder / MANIFEST).is_file():
        raise PackError(f"{folder}: is a pack already. There is nothing to import.", "conflict")

    model = None if base is None else name_of(base)
    config = read_json(plain_file(folder, CONFIG))
    name = format_of(config, folder / CONFIG)
    form = FORMATS[name]
    form.check_config(config, folder / CONFIG)
    file = plain_file(folder, form.tensor_file)
    stored = StoredAdapter(read_tensors(file), config, file)

    note = ""
    sidecar = _read_sidecar(folder)
    unchanged = sidecar is not None and _is_unchanged(folder, sidecar, (form.tensor_file, CONFIG))
    if unchanged:
        if labels:
            raise PackError(f"--labels: {folder} has its own. Leave it out.", "conflict")
        pack = _restored(folder, form, stored, sidecar)
        if model is not None:
            check_checkpoint(pack, model)
            note = differing_texts(folder, resolve_checkpoint(model), public_name(str(model)))
    else:
        model = _base_name(model, config, folder)
        facts = {}
        if sidecar is not None:
            labels = labels or _names_of(sidecar["pack"].get("classifier"))
            facts = _reranker(sidecar["pack"].get("objective"))
        pack = _converted(name, stored, model, trust_remote_code, labels, facts)
        note = differing_texts(folder, resolve_checkpoint(model), public_name(str(model)))

    deltas = form.deltas(stored, pack.manifest["base"]["model_type"])
    verify_numerically(pack.specs, pack.tensors, deltas, file)
    pack.save(out, overwrite)

    return {
        "out": str(pack.path),
        "from": name,
        "base": pack.manifest["base"]["id"],
        "modules": len(pack.specs),
        "kinds": sorted({spec.kind for spec in pack.specs.values()}),
        "ranks": sorted({spec.rank for spec in pack.specs.values()}),
        "replaced": list(replaced_of(pack.manifest)),
        "exported_here": unchanged,
        "pack_mb": round(pack.size_mb, 3),
        "notes": [note] if note else [],
    }


def _base_name(model: str | Path | None, config: dict, folder: Path) -> str | Path:
    if model is not None:
        return model

    name = config.get("base_model_name_or_path") or config.get("model")
    # a path that a downloaded file names is not followed
    is_id = isinstance(name, str) and is_hub_id(name)
    if name == TINY or (is_id and ".." not in name):
        return name
    raise PackError(
        f"{folder}: names no base that can be looked up ({name!r}). Pass --model M.",
        "not-found",
        "model",
    )


def _read_sidecar(folder: Path) -> dict | None:
    if not (folder / SIDECAR).exists():
        return None

    file = plain_file(folder, SIDECAR)
    sidecar = read_json(file)

    version = sidecar.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise PackError(
            f"{file}: format_version must be a number above 0, but is {version!r}.", "unreadable"
        )
    if version > FORMAT_VERSION:
        raise PackError(
            f"{file}: format {version} is newer than this program's ({FORMAT_VERSION}). "
            "Upgrade mlx-packs.",
            "unsupported",
        )

    hashes = sidecar.get("sha256")
    if not isinstance(hashes, dict) or not isinstance(sidecar.get("pack"), dict):
        raise PackError(
            f"{file}: has no 'sha256' and 'pack'. Remove it to import by {CONFIG}.", "unreadable"
        )
    if outside := next((name for name in hashes if Path(name).name != name), None):
        raise PackError(f"{file}: names a file outside: {outside!r}.", "unreadable")

    return sidecar


def _is_unchanged(folder: Path, sidecar: dict, names: tuple[str, str]) -> bool:
    """Return whether tensors and config, and what else was written, are what was exported."""
    hashes = sidecar["sha256"]
    return set(names) <= set(hashes) and all(
        (folder / name).exists() and sha256(plain_file(folder, name)) == digest
        for name, digest in hashes.items()
    )


def _restored(folder: Path, form: AdapterFormat, stored: StoredAdapter, sidecar: dict) -> Pack:
    where = folder / SIDECAR
    manifest = sidecar["pack"]
    try:
        check_manifest(manifest, with_files=False)
    except ValueError as error:
        raise PackError(f"{where}: is not a manifest ({error}).", "unreadable") from None

    specs = specs_of(manifest)
    ranks = {path: spec.rank for path, spec in specs.items()}
    adapter = form.read(stored, manifest["base"]["model_type"], ranks)
    tensors = adapter.full_tensors | adapter.tensors

    originals = {}
    if ORIGINALS in sidecar["sha256"]:
        originals = read_tensors(plain_file(folder, ORIGINALS))
    shapes = {name: tensor.shape for name, tensor in (tensors | originals).items()}
    check_shapes(shapes_of(manifest), shapes, str(where))

    for path, spec in specs.items():
        name = f"{path}.lora_b"
        if name in tensors and name not in originals:
            tensors[name] = unfolded(spec, tensors[name], form.scale_of(spec, stored.config))

    return Pack(manifest, tensors | originals)


def _converted(
    name: str,
    stored: StoredAdapter,
    model: str | Path,
    trust: bool,
    labels: Sequence[str],
    facts: Mapping[str, object],
) -> Pack:
    base = lazy_base(model, trust)
    form = FORMATS[name]
    adapter = form.read(stored, base.config["model_type"])
    form.drop_copies(adapter, base, stored.file)
    specs = specs_for(base, adapter, stored.file)

    base_id = stored.config.get("base_model_name_or_path") or stored.config.get("model")
    if not isinstance(base_id, str):
        base_id = None
    source = {"from": name, "base": base_id, "by": f"mlx-packs {__version__}"}
    full = adapter.full_tensors
    facts = {**facts, **_classifier(full, labels, stored.file)}
    return untrained_pack(base, specs, adapter.tensors, full, imported=source, **facts)


def _names_of(classifier: object) -> list[str]:
    """Return the labels in a part of a manifest that was not checked; empty without any."""
    if not isinstance(classifier, Mapping):
        return []
    labels = classifier.get("labels")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        return []
    return labels


def _reranker(objective: object) -> dict:
    """Return the part ``objective`` of a manifest, which was not checked, if it is a reranker's.

    Without it a head of one output would be a reward model's.
    """
    if not isinstance(objective, Mapping) or objective.get("task") != "rerank":
        return {}

    kept = {name: objective.get(name) for name in ("instruction", "head")}
    texts = {name: text for name, text in kept.items() if isinstance(text, str)}
    return {"objective": {"task": "rerank", **texts}}


def _classifier(tensors: Tensors, labels: Sequence[str], where: Path) -> dict:
    """Return the part ``classifier`` of a manifest for a head with several outputs, else nothing.

    Raises a PackError if there is another number of labels than of outputs.
    """
    head = tensors.get(SCORE_WEIGHT)
    outputs = 1
    if head is not None:
        outputs = head.shape[0]

    names = tuple(labels)
    if not names and outputs > 1:
        names = tuple(f"LABEL_{i}" for i in range(outputs))
    if outputs == 1 and not names:
        return {}

    if len(set(names)) != outputs or outputs == 1:
        raise PackError(
            f"--labels: names {len(set(names))} different labels, but {where} has a head of "
            f"{outputs} outputs.",
            "mismatch",
        )
    return {"classifier": Classes(SINGLE, names).to_json()}
