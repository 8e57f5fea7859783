"""Packs to and from other tools: `export_pack` writes a folder, `import_adapter` reads one.

Every conversion is numerically verified. A folder that was exported here has the pack's manifest
beside what the other tool reads; import takes from it what no other tool stores.
"""

from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..adapters.spec import SCORE_WEIGHT
from ..bases.files import CHAT_TEMPLATE, TINY, public_name, resolve_checkpoint
from ..bases.loading import lazy_base
from ..config.arguments import checked_arguments
from ..data.labels import SINGLE, Classes
from ..errors import PackError
from ..files import is_hub_id, to_json
from ..kinds import check_kind
from ..packs.base import Base, name_of
from ..packs.making import untrained_pack
from ..packs.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    chat_template_of,
    check_manifest,
    has_score_head,
    replaced_of,
    template_kwargs_of,
)
from ..packs.pack import Pack
from ..reading import read_json, read_text
from ..tensors import read_tensors
from .external import (
    CONFIG,
    SIDECAR,
    StoredAdapter,
    Tensors,
    check_choice,
    check_no_pickle,
    plain_file,
    specs_for,
    unreadable,
    unsupported,
    verify_numerically,
)
from .formats import DESTINATIONS, FORMATS, format_of, write_adapter

# Parts of an exported pack's manifest that say how it is used, which no other tool stores.
_PARTS = ("objective", "classifier", "recipe")


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
    check_choice("to", to, (*FORMATS, *DESTINATIONS))
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
        report = DESTINATIONS[to](pack, out, start)
    else:
        report = _export_adapter(pack, to, out)

    files = sorted(out.iterdir())
    size = sum(file.stat().st_size for file in files)
    return {
        "out": str(out),
        "to": to,
        "modules": len(pack.specs),
        "mb": round(size / 1e6, 3),
        "files": [file.name for file in files],
        "template_kwargs": template_kwargs_of(pack.manifest),
        **report,
    }


def _export_adapter(pack: Pack, to: str, out: Path) -> dict:
    """Write a pack as another tool reads it, with its manifest."""
    form = FORMATS[to]
    manifest = {k: v for k, v in pack.manifest.items() if k not in ("files", "profile")}
    texts = {SIDECAR: to_json({"format_version": FORMAT_VERSION, "pack": manifest})}
    if template := chat_template_of(pack.manifest):
        texts[CHAT_TEMPLATE] = template
    return write_adapter(pack, form, form.convert(pack, out / form.tensor_file), texts)


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
            that its config names, if that is a Hub id.
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

    model = _base_name(model, config, folder)
    exported = _exported_manifest(folder)
    pack = _converted(name, stored, model, trust_remote_code, labels, exported)
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
        "exported_here": bool(exported),
        "pack_mb": round(pack.size_mb, 3),
        "notes": _template_notes(pack, folder, model),
    }


def _template_notes(pack: Pack, folder: Path, model: str | Path) -> list[str]:
    """A note on an adapter that was trained with another chat template than its base has.

    Trainers save their tokenizer next to an adapter. A pack has none, and answers by its base's.
    """
    template = _template(folder)
    is_own = chat_template_of(pack.manifest) is None
    if not is_own or template is None or template == _template(resolve_checkpoint(model)):
        return []
    return [
        "the adapter was trained with another chat template: the pack answers as "
        f"{public_name(str(model))} does. To answer as it was trained, use a copy of the base with "
        "the adapter's tokenizer and template files"
    ]


def _template(folder: Path) -> str | None:
    if (file := folder / CHAT_TEMPLATE).is_file():
        return read_text(file).strip()
    file = folder / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.is_file() else None
    return template.strip() if isinstance(template, str) else None


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


def _exported_manifest(folder: Path) -> dict:
    """Return the manifest of the pack that was exported to a folder; empty without one."""
    if not (folder / SIDECAR).exists():
        return {}

    file = plain_file(folder, SIDECAR)
    sidecar = read_json(file)
    version = sidecar.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise unsupported(
            file,
            f"format {version} is newer than this program's ({FORMAT_VERSION}). Upgrade mlx-packs.",
        )

    manifest = sidecar.get("pack")
    try:
        check_kind("pack", manifest, "a mapping")
        check_manifest(manifest, with_files=False)
    except ValueError as error:
        raise unreadable(
            file, f"is not a manifest ({error}). Remove it to import by {CONFIG}."
        ) from None
    return manifest


def _converted(
    name: str,
    stored: StoredAdapter,
    model: str | Path,
    trust: bool,
    labels: Sequence[str],
    exported: dict,
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
    facts = _facts(exported, full, labels, stored.file)
    return untrained_pack(base, specs, adapter.tensors, full, imported=source, **facts)


def _facts(exported: dict, tensors: Tensors, labels: Sequence[str], where: Path) -> dict:
    """Return optional parts of a manifest: the exported pack's, and the head's classes."""
    facts = {part: exported[part] for part in _PARTS if part in exported}
    head = tensors.get(SCORE_WEIGHT)
    shape = None if head is None else head.shape
    has_other_head = not exported or replaced_of(exported).get(SCORE_WEIGHT) != shape
    if labels or has_other_head:
        facts.pop("classifier", None)
        facts |= _classifier(tensors, labels, where)
    return facts


def _classifier(tensors: Tensors, labels: Sequence[str], where: Path) -> dict:
    """Return the part ``classifier`` of a manifest for a head with several outputs, else nothing.

    Raises a PackError if there is another number of labels than of outputs.
    """
    head = tensors.get(SCORE_WEIGHT)
    outputs = head.shape[0] if head is not None else 1

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
