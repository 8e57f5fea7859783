"""The manifest of a pack: what every key must be, and what stock mlx-lm reads of it."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.choices import ARCHITECTURES, ArchitectureFacts, architecture_of
from ..config.parse import current_keys
from ..config.schema import COLUMN_SETTINGS
from ..errors import PackError

if TYPE_CHECKING:  # importing these loads MLX, and `packs list` reads manifests alone
    from ..adapters.spec import ModuleSpec, Specs

FORMAT_VERSION = 1
MANIFEST = "pack.json"
ADAPTERS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CARD = "README.md"
PIN = "hub.json"  # in a pulled pack, beyond what the manifest names: where it comes from
HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
MAIN = "main"  # the Hub's branch where none is named
# Metrics of embeddings, and their names for people.
METRICS = {
    "spearman": "Spearman",
    "pearson": "Pearson",
    "triplet_accuracy": "triplet accuracy",
    "mrr_at_10": "MRR@10",
    "ndcg_at_10": "NDCG@10",
    "recall_at_1": "recall@1",
}

_MISSING = object()
_ADAPTER_KINDS = ("lora", "dora", "embedding")


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53


def _is_number(value: object) -> bool:
    return _is_int(value, -(2**53)) or (isinstance(value, float) and math.isfinite(value))


_KINDS = {
    "text": lambda v: isinstance(v, str),
    "true or false": lambda v: isinstance(v, bool),
    "an integer of 0 or more": lambda v: _is_int(v, 0),
    "an integer above 0": lambda v: _is_int(v, 1),
    "an integer above 1": lambda v: _is_int(v, 2),
    "a number": _is_number,
    "a finite number above 0": lambda v: _is_number(v) and v > 0,
    "a mapping": lambda v: isinstance(v, dict),
    "a list": lambda v: isinstance(v, list),
    "a list of texts": lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
    "text or a list of texts": lambda v: isinstance(v, str) or _KINDS["a list of texts"](v),
    "a list of integers": lambda v: isinstance(v, list) and all(_is_int(x, 0) for x in v),
    "a list with something in it": lambda v: isinstance(v, list) and bool(v),
    "a mapping or null": lambda v: v is None or isinstance(v, dict),
}
_REQUIRED = {
    "base": "a mapping",
    "base.id": "text",
    "base.fingerprint": "text",
    "base.model_type": "text",
    "base.quantization": "a mapping or null",
    "base.num_layers": "an integer of 0 or more",
    "adapters": "a mapping",
    "adapters.parameters": "an integer of 0 or more",
    "adapters.groups": "a list",
    "adapters.modules": "a list",
    "files": "a mapping",
}
# What may be missing or null. A part stands before what is in it.
_OPTIONAL = {
    "method": "text",
    "profile": "text",
    "adapters.dtype": "text",
    "license": "text",
    "objective": "a mapping",
    "objective.loss_on": "text",
    "objective.task": "text",
    "objective.loss": "text",
    "objective.pooling": "text",
    "objective.normalize": "true or false",
    "objective.graph": "text",
    "objective.note": "text",
    "objective.stack": "a list of texts",
    "objective.ppl_before": "a number",
    "objective.ppl_after": "a number",
    "data": "a mapping",
    "data.source": "text",
    "data.rows": "a mapping",
    "recipe": "a mapping",
    "recipe.max_seq_length": "an integer above 1",
    "recipe.train_fp16_fallback": "true or false",
    **{f"recipe.{key}": "text" for key in ("quantize", *COLUMN_SETTINGS)},
    "versions": "a mapping",
    "measured": "a mapping",
    "measured.created": "text",
    "gates": "a mapping",
    "phases": "a list",
    "sum_of": "a list",
    "eval": "a mapping",
    "eval.split": "text",
    "eval.rows": "an integer of 0 or more",
    **{
        f"eval.{key}": "a number"
        for key in "ppl_before ppl_before_se ppl_after ppl_after_se".split()
    },
    **{f"eval.{name}_{when}": "a number" for name in METRICS for when in ("before", "after")},
}

_PHASE = {
    "name": "text",
    "data": "text",
    "steps": "an integer of 0 or more",
    "replay": "a number",
    "optimizer_state": "text",
    "before": "a mapping",
    "after": "a mapping",
}
_GATE = {"limit": "a number", "value": "a number", "passed": "true or false"}


def _check(key: str, value: object, kind: str) -> None:
    """Raise a ValueError that names the key, unless a value is of a kind."""
    if not _KINDS[kind](value):
        problem = "is missing" if value is _MISSING else f"is {repr(value)[:60]}"
        raise ValueError(f"{key} must be {kind}, but {problem}")


def _look_up(manifest: dict, key: str) -> object:
    value: object = manifest
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _check_keys(key: str, value: object, kinds: Mapping[str, str]) -> None:
    """Check a mapping and its keys."""
    _check(key, value, "a mapping")
    for name, kind in kinds.items():
        _check(f"{key}.{name}", value.get(name, _MISSING), kind)


def read_manifest(file: Path) -> dict:
    """Return the manifest in a file, with every key checked that this program reads.

    Raises:
        PackError: a key is faulty, or the format is newer than this program.
    """
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        _check("it", manifest, "a mapping")
        version = manifest.get("format_version", _MISSING)
        _check("format_version", version, "an integer above 0")
        if version <= FORMAT_VERSION:
            check_manifest(manifest)
            manifest |= {
                part: current_keys(manifest[part])
                for part in ("recipe", "measured")
                if manifest.get(part)
            }
    except (ValueError, RecursionError) as error:
        raise PackError(f"{file}: is not a manifest ({error}).", "unreadable") from None
    if version > FORMAT_VERSION:
        raise PackError(
            f"{file}: format {version} is newer than this program's ({FORMAT_VERSION}). Upgrade "
            "mlx-packs.",
            "unsupported",
        )
    return manifest


def check_manifest(manifest: dict, with_files: bool = True) -> None:
    """Check every key that is read.

    Args:
        manifest: as in a file.
        with_files: whether it must name the files of a pack.

    Raises:
        ValueError: a key is missing or faulty.
    """
    for key, kind in _REQUIRED.items():
        if key == "files" and not with_files:
            continue
        _check(key, _look_up(manifest, key), kind)
    for key, kind in _OPTIONAL.items():
        if (value := _look_up(manifest, key)) is not _MISSING and value is not None:
            _check(key, value, kind)
    if (q := manifest["base"]["quantization"]) is not None:
        check_quantization("base.quantization", q)
    for split, rows in ((manifest.get("data") or {}).get("rows") or {}).items():
        _check(f"data.rows.{split}", rows, "an integer of 0 or more")
    for name, gate in (manifest.get("gates") or {}).items():
        _check_keys(f"gates.{name}", gate, _GATE)
    for i, phase in enumerate(manifest.get("phases") or ()):
        _check_keys(f"phases[{i}]", phase, _PHASE)
        for when in ("before", "after"):
            for name, score in phase[when].items():
                _check_keys(f"phases[{i}].{when}.{name}", score, {"ppl": "a number"})
    files = manifest["files"] if with_files else {}
    for name in (ADAPTERS, *files) if with_files else ():
        kinds = {"bytes": "an integer of 0 or more", "sha256": "text"}
        _check_keys(f"files.{name}", files.get(name, _MISSING), kinds)
    for i, part in enumerate(manifest.get("sum_of") or ()):
        _check_keys(f"sum_of[{i}]", part, {"pack": "text", "weight": "a number"})
    _check_adapters(manifest["adapters"])


def check_quantization(key: str, q: object) -> None:
    """Check what MLX needs to know of quantized weights.

    Raises:
        ValueError: an entry is missing or faulty.
    """
    _check_keys(key, q, {"bits": "an integer above 0", "group_size": "an integer above 0"})
    _check(f"{key}.mode", q.get("mode", "affine"), "text")
    _check(f"{key}.keep", q.get("keep") or [], "a list of texts")


def _check_adapters(adapters: dict) -> None:
    for i, group in enumerate(adapters["groups"]):
        _check(f"adapters.groups[{i}]", group, "a list of texts")
    for i, module in enumerate(adapters["modules"]):
        _check_module(f"adapters.modules[{i}]", module)
    replaced = adapters.get("replaced")
    _check("adapters.replaced", [] if replaced is None else replaced, "a list")
    if not adapters["modules"] and not replaced:
        raise ValueError("adapters.modules must be a list with something in it, but is []")
    for i, tensor in enumerate(replaced or []):
        where, kinds = f"adapters.replaced[{i}]", {"name": "text", "shape": "a list of integers"}
        _check_keys(where, tensor, kinds)
        if not tensor["name"].rpartition(".")[0]:
            raise ValueError(
                f"{where}.name must be of a module's tensor, but is {tensor['name']!r}"
            )


def _check_module(key: str, module: object) -> None:
    kinds = {"path": "text", "in_features": "an integer above 0"}
    _check_keys(key, module, {**kinds, "slices": "a list with something in it"})
    kind = module.get("kind", "lora")
    if kind not in _ADAPTER_KINDS:
        raise ValueError(f"{key}.kind must be one of {', '.join(_ADAPTER_KINDS)}, but is {kind!r}")
    if (origin := module.get("base_key")) is not None:
        _check(f"{key}.base_key", origin, "text or a list of texts")
    if module.get("head") is not None:
        _check(f"{key}.head", module["head"], "true or false")
    if kind != "lora" and ("experts" in module or len(module["slices"]) > 1):
        raise ValueError(f"{key}: {kind} has one slice and no experts")
    if "experts" in module:
        _check(f"{key}.experts", module["experts"], "an integer above 0")
        if len(module["slices"]) > 1:
            raise ValueError(f"{key}: a switch linear has one slice, not {len(module['slices'])}")
    for i, part in enumerate(module["slices"]):
        where = f"{key}.slices[{i}]"
        kinds = {"name": "text", "width": "an integer above 0", "rank": "an integer of 0 or more"}
        _check_keys(where, part, kinds)
        alpha_kind = "a finite number above 0" if part["rank"] else "a number"
        _check(f"{where}.alpha", part.get("alpha", _MISSING), alpha_kind)


def spec_json(spec: "ModuleSpec", origin: str | list[str] | None = None) -> dict:
    """Return a module of the manifest.

    Args:
        spec: the module's adapter.
        origin: the tensor of the base's files that its adapter changes, if that is certain.
    """
    rest = {} if spec.experts is None else {"experts": spec.experts}
    rest |= {} if spec.kind == "lora" else {"kind": spec.kind}
    rest |= {} if spec.head is None else {"head": spec.head}
    return {
        "path": spec.path,
        "in_features": spec.in_features,
        **({} if origin is None else {"base_key": origin}),
        **rest,
        "slices": [asdict(s) for s in spec.slices],
    }


def specs_of(manifest: dict) -> "Specs":
    """Return the adapters of a manifest."""
    from ..adapters.spec import ModuleSpec, SliceSpec

    modules = manifest["adapters"]["modules"]
    return {
        m["path"]: ModuleSpec(
            m["path"],
            int(m["in_features"]),
            tuple(
                SliceSpec(s["name"], int(s["width"]), int(s["rank"]), float(s["alpha"]))
                for s in m["slices"]
            ),
            m.get("experts"),
            m.get("kind", "lora"),
            m.get("head"),
        )
        for m in modules
    }


def replaced_of(manifest: dict) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of tensors stored in full (PEFT's modules_to_save)."""
    return {t["name"]: tuple(t["shape"]) for t in manifest["adapters"].get("replaced") or []}


def shapes_of(manifest: dict) -> dict[str, tuple[int, ...]]:
    """Return every tensor that the manifest promises, and its shape."""
    shapes = replaced_of(manifest)
    for spec in specs_of(manifest).values():
        shapes |= spec.shapes
    return shapes


def architecture_facts(manifest: dict) -> ArchitectureFacts:
    """Return what is known of the architecture of a pack's base."""
    return ARCHITECTURES[architecture_of(manifest["base"]["model_type"])]


def adapter_config_of(specs: "Specs") -> dict | None:
    """Return ``adapter_config.json`` for stock mlx-lm, or None where it cannot express adapters.

    It has one rank and one scale, either LoRA or DoRA, and adapters of embeddings act on a tied
    head.
    """
    kinds = {spec.kind == "dora" for spec in specs.values()}
    if len(kinds) != 1 or any(spec.head is False for spec in specs.values()):
        return None
    ranks = {spec.rank for spec in specs.values()}
    scales = {s.scale for spec in specs.values() for s in spec.slices if s.rank}
    if len(ranks) != 1 or len(scales) != 1:
        return None
    return {
        "fine_tune_type": "dora" if kinds.pop() else "lora",
        "num_layers": -1,
        "lora_parameters": {
            "rank": ranks.pop(),
            "scale": scales.pop(),
            "dropout": 0.0,
            "keys": list(specs),
        },
    }


def adapter_config(manifest: dict) -> dict | None:
    """Return ``adapter_config.json`` of a pack, or None where stock mlx-lm cannot load it.

    It loads tensors stored in full as those of a full fine-tuning, over dense ones.
    """
    if not architecture_facts(manifest).in_mlx_lm:
        return None
    if not replaced_of(manifest):
        return adapter_config_of(specs_of(manifest))
    if manifest["adapters"]["modules"] or manifest["base"]["quantization"]:
        return None
    return {"fine_tune_type": "full", "num_layers": -1}


def read_pin(folder: Path) -> dict | None:
    """Return where a pulled pack comes from (repo, revision, commit); None if it was not pulled.

    ``manifest_sha256``, of the manifest as it was pulled, is present unless an older program wrote
    the file.
    """
    try:
        pin = json.loads((folder / PIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    keys = ("repo", "revision", "commit")
    if not isinstance(pin, dict) or not all(isinstance(pin.get(key), str) for key in keys):
        return None
    return {key: pin[key] for key in (*keys, "manifest_sha256") if isinstance(pin.get(key), str)}
