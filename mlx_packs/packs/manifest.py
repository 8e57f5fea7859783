"""The manifest of a pack: what every key must be, and what people and mlx-lm read of it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.choices import ENCODERS
from ..config.parse import current_keys
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
# What a pack of an encoder is measured by, and how people call it.
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


def _is_int(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53


def _is_number(value) -> bool:
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
    **{
        f"recipe.{key}": "text"
        for key in "quantize chat_feature prompt_feature completion_feature text_feature".split()
    },
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


def _hold(key: str, value, kind: str) -> None:
    """Raises: ValueError naming the key, unless a value is of a kind."""
    if not _KINDS[kind](value):
        shown = "is missing" if value is _MISSING else f"is {repr(value)[:60]}"
        raise ValueError(f"{key} must be {kind}, but {shown}")


def _look_up(manifest: dict, key: str):
    value = manifest
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _hold_all(key: str, value, kinds: Mapping[str, str]) -> None:
    """Hold a mapping and its keys."""
    _hold(key, value, "a mapping")
    for name, kind in kinds.items():
        _hold(f"{key}.{name}", value.get(name, _MISSING), kind)


def read_manifest(file: Path) -> dict:
    """The manifest in a file, with every key held that this program reads.

    Raises: PackError naming the file and the key, or a format that is newer than this program.
    """
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        _hold("it", manifest, "a mapping")
        version = manifest.get("format_version", _MISSING)
        _hold("format_version", version, "an integer above 0")
        if version <= FORMAT_VERSION:
            check_manifest(manifest)
            manifest |= {
                part: current_keys(manifest[part])
                for part in ("recipe", "measured")
                if manifest.get(part)
            }
    except (ValueError, RecursionError) as error:
        raise PackError(f"{file}: is not a manifest ({error}).") from None
    if version > FORMAT_VERSION:
        raise PackError(
            f"{file}: format {version} is newer than this program's ({FORMAT_VERSION}); upgrade "
            "mlx-packs."
        )
    return manifest


def check_manifest(manifest: dict, with_files: bool = True) -> None:
    """Hold every key that is read. Raises: ValueError naming the first that is not as it must."""
    for key, kind in _REQUIRED.items():
        if key == "files" and not with_files:
            continue
        _hold(key, _look_up(manifest, key), kind)
    for key, kind in _OPTIONAL.items():
        if (value := _look_up(manifest, key)) is not _MISSING and value is not None:
            _hold(key, value, kind)
    if (q := manifest["base"]["quantization"]) is not None:
        check_quantization("base.quantization", q)
    for split, rows in ((manifest.get("data") or {}).get("rows") or {}).items():
        _hold(f"data.rows.{split}", rows, "an integer of 0 or more")
    for name, gate in (manifest.get("gates") or {}).items():
        _hold_all(f"gates.{name}", gate, _GATE)
    for i, phase in enumerate(manifest.get("phases") or ()):
        _hold_all(f"phases[{i}]", phase, _PHASE)
        for when in ("before", "after"):
            for name, found in phase[when].items():
                _hold_all(f"phases[{i}].{when}.{name}", found, {"ppl": "a number"})
    files = manifest["files"] if with_files else {}
    for name in (ADAPTERS, *files) if with_files else ():
        kinds = {"bytes": "an integer of 0 or more", "sha256": "text"}
        _hold_all(f"files.{name}", files.get(name, _MISSING), kinds)
    for i, part in enumerate(manifest.get("sum_of") or ()):
        _hold_all(f"sum_of[{i}]", part, {"pack": "text", "weight": "a number"})
    for i, group in enumerate(manifest["adapters"]["groups"]):
        _hold(f"adapters.groups[{i}]", group, "a list of texts")
    for i, module in enumerate(manifest["adapters"]["modules"]):
        _check_module(f"adapters.modules[{i}]", module)
    replaced = manifest["adapters"].get("replaced")
    _hold("adapters.replaced", [] if replaced is None else replaced, "a list")
    if not manifest["adapters"]["modules"] and not replaced:
        raise ValueError("adapters.modules must be a list with something in it, but is []")
    for i, tensor in enumerate(replaced or []):
        where, kinds = f"adapters.replaced[{i}]", {"name": "text", "shape": "a list of integers"}
        _hold_all(where, tensor, kinds)
        if not tensor["name"].rpartition(".")[0]:
            raise ValueError(
                f"{where}.name must be of a module's tensor, but is {tensor['name']!r}"
            )


def check_quantization(key: str, q) -> None:
    """Hold what MLX needs to know of packed weights. Raises: ValueError naming the key."""
    _hold_all(key, q, {"bits": "an integer above 0", "group_size": "an integer above 0"})
    _hold(f"{key}.mode", q.get("mode", "affine"), "text")
    _hold(f"{key}.keep", q.get("keep") or [], "a list of texts")


def _check_module(key: str, module) -> None:
    kinds = {"path": "text", "in_features": "an integer above 0"}
    _hold_all(key, module, {**kinds, "slices": "a list with something in it"})
    if module.get("kind", "lora") not in _ADAPTER_KINDS:
        raise ValueError(
            f"{key}.kind must be one of {', '.join(_ADAPTER_KINDS)}, but is {module['kind']!r}"
        )
    if (origin := module.get("base_key")) is not None:
        _hold(f"{key}.base_key", origin, "text or a list of texts")
    if module.get("head") is not None:
        _hold(f"{key}.head", module["head"], "true or false")
    if module.get("kind", "lora") != "lora" and ("experts" in module or len(module["slices"]) > 1):
        raise ValueError(f"{key}: {module['kind']} has one slice and no experts")
    if "experts" in module:
        _hold(f"{key}.experts", module["experts"], "an integer above 0")
        if len(module["slices"]) > 1:
            raise ValueError(f"{key}: a switch linear has one slice, not {len(module['slices'])}")
    for i, part in enumerate(module["slices"]):
        where = f"{key}.slices[{i}]"
        kinds = {"name": "text", "width": "an integer above 0", "rank": "an integer of 0 or more"}
        _hold_all(where, part, kinds)
        kind = "a finite number above 0" if part["rank"] else "a number"
        _hold(f"{where}.alpha", part.get("alpha", _MISSING), kind)


def spec_json(spec: "ModuleSpec", origin: str | list[str] | None = None) -> dict:
    """A module of the manifest.

    Args:
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
    """Tensors of the base that a pack brings whole (PEFT's modules_to_save): name and shape."""
    return {t["name"]: tuple(t["shape"]) for t in manifest["adapters"].get("replaced") or []}


def shapes_of(manifest: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor that the manifest promises, and its shape."""
    shapes = replaced_of(manifest)
    for spec in specs_of(manifest).values():
        shapes |= spec.shapes
    return shapes


def is_of_encoder(manifest: dict) -> bool:
    """Whether a pack is of an encoder, which makes embeddings."""
    return manifest["base"]["model_type"] in ENCODERS


def mlx_lm_config(specs: "Specs") -> dict | None:
    """``adapter_config.json`` for stock mlx-lm, or None where its one rank and scale do not do.

    Neither do LoRA and DoRA in one, nor an embedding's adapter that leaves the tied head alone.
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
    """``adapter_config.json`` of a pack, or None where stock mlx-lm cannot load it.

    Weights that are brought whole it loads as those of a full fine-tuning, over dense ones.
    """
    if not replaced_of(manifest):
        return mlx_lm_config(specs_of(manifest))
    if manifest["adapters"]["modules"] or manifest["base"]["quantization"]:
        return None
    return {"fine_tune_type": "full", "num_layers": -1}


def model_card(manifest: dict, name: str) -> str:
    """README.md of a pack: what it is, what it was measured to do, how to use it."""
    base = manifest["base"]
    specs = specs_of(manifest)
    ranks = sorted({s.rank for spec in specs.values() for s in spec.slices if s.rank})
    targets = sorted({path.rsplit(".", 1)[-1] for path in specs})
    what = f"rank {', '.join(map(str, ranks))} on {', '.join(targets)}"
    if not specs:
        what = f"{len(replaced_of(manifest))} of its tensors fine-tuned in full"
    lines = [
        *_card_metadata(manifest),
        "",
        f"# {name}",
        "",
        f"A {'LoRA ' if specs else ''}pack for `{base['id']}` ({base['model_type']}, "
        f"{base['num_layers']} blocks), {what}.",
        "",
    ]
    result = manifest.get("eval") or {}
    before, after = (shown_result(result, when) for when in ("before", "after"))
    if before and after:
        change = result["ppl_after"] / result["ppl_before"] - 1
        lines += [
            f"Held-out perplexity: {before} before, {after} with the pack ({change:+.0%}), on "
            f"{result.get('rows', '?')} rows of `{result.get('split', '?')}`.",
            "",
        ]
    elif is_of_encoder(manifest) and (moved := moved_metrics(result)):
        lines += [
            f"Held-out {moved}, on {result.get('rows', '?')} rows of `{result.get('split', '?')}`.",
            "",
        ]
    if phases := manifest.get("phases"):
        lines += ["Learned in phases:", "", *(f"- {line}" for line in phase_lines(phases)), ""]
    lines += [f"{line}\n" for line in shown_graph(manifest.get("objective") or {})]
    lines += ["```", _card_command(manifest), "```", ""]
    lines += [f"Base fingerprint: `{base['fingerprint']}`"]
    if license := manifest.get("license"):
        lines += ["", f"Licence: {license}"]
    lines += _card_data(manifest.get("data") or {})
    return "\n".join(lines) + "\n"


def _card_metadata(manifest: dict) -> list[str]:
    """What the Hub reads of a card, in YAML; a base is named there only if it is a hub id."""
    base = manifest["base"]["id"]
    license, is_lora = manifest.get("license"), bool(manifest["adapters"]["modules"])
    return [
        "---",
        "library_name: mlx",
        *([f"license: {json.dumps(license)}"] if license else []),
        *(
            [
                f"base_model: {json.dumps(base)}",
                f"base_model_relation: {'adapter' if is_lora else 'finetune'}",
            ]
            if re.fullmatch(HUB_ID, base, re.ASCII)
            else []
        ),
        f"pipeline_tag: {'sentence-similarity' if is_of_encoder(manifest) else 'text-generation'}",
        f"tags: [mlx, {'lora, ' * is_lora}mlx-packs]",
        "---",
    ]


def _card_data(data: Mapping) -> list[str]:
    """What it was trained on, by name and fingerprint; the rows stay where they are."""
    prints = data.get("fingerprint")
    if not isinstance(prints, dict) or not prints:
        return []
    rows = data.get("rows") or {}
    lines = ["", f"Data `{data.get('source', '?')}`, by fingerprint:", ""]
    for split, value in prints.items():
        count = f", {rows[split]:,} rows" if split in rows else ""
        lines.append(f"- {split}{count}: `{value}`")
    return lines


def read_pin(folder: Path) -> dict | None:
    """Where a pulled pack comes from (repo, revision, commit); None if it was not pulled.

    ``manifest_sha256``, of the manifest as it came, is there unless an older program wrote it.
    """
    try:
        pin = json.loads((folder / PIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    keys = ("repo", "revision", "commit")
    if not isinstance(pin, dict) or not all(isinstance(pin.get(key), str) for key in keys):
        return None
    return {key: pin[key] for key in (*keys, "manifest_sha256") if isinstance(pin.get(key), str)}


def shown_result(result: Mapping, when: str) -> str | None:
    """The perplexity before or after with its standard error, as far as a manifest has them."""
    ppl, se = result.get(f"ppl_{when}"), result.get(f"ppl_{when}_se")
    return None if ppl is None else shown_perplexity(ppl, se)


def shown_graph(objective: Mapping) -> list[str]:
    """What the loss was taken of, for people, where that was a proxy of the base."""
    graph, stack = objective.get("graph"), objective.get("stack")
    if graph is None or stack is None:
        return []
    before, after = objective.get("ppl_before"), objective.get("ppl_after")
    own = "" if before is None or after is None else f"; its own PPL {before:.2f} → {after:.2f}"
    shown = ", ".join(stack) or "no projection"
    if len(stack) > 3:
        shown = f"{len(stack)} projections ({stack[0]} … {stack[-1]})"
    return [
        f"Trained by {graph} over {shown} and the head "
        f"{objective.get('head')}{own}: {objective.get('note')}."
    ]


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics of embeddings for people."""
    return ", ".join(f"{METRICS[name]} {value:.4f}" for name, value in metrics.items())


def moved_metrics(result: Mapping) -> str:
    """Metrics of embeddings before and after, for people, as far as a manifest has them."""
    names = [n for n in METRICS if all(f"{n}_{when}" in result for when in ("before", "after"))]
    before, after = ({n: result[f"{n}_{when}"] for n in names} for when in ("before", "after"))
    return f"{shown_metrics(before)} → {shown_metrics(after)}" if names else ""


def shown_perplexity(ppl: float, se: float | None, digits: int = 2) -> str:
    """A perplexity for people, with its standard error where there is one."""
    return f"{ppl:.{digits}f}" + ("" if se is None else f" ± {se:.{digits}f}")


def phase_lines(phases: Sequence[Mapping]) -> list[str]:
    """A line a phase for people: what it did to its own held-out rows and to those of others."""
    lines = []
    for phase in phases:
        before, after = phase["before"], phase["after"]
        names = sorted(set(before) & set(after), key=lambda name: (name != phase["name"], name))
        changes = [f"{n} {before[n]['ppl']:.2f} → {after[n]['ppl']:.2f}" for n in names]
        replayed = f", {phase['replay']:.0%} replayed" if phase["replay"] else ""
        lines.append(
            f"{phase['name']}: {phase['steps']:,} updates on {phase['data']}{replayed} · held-out "
            f"PPL of {' · '.join(changes) or '?'}"
        )
    return lines


def _card_command(manifest: dict) -> str:
    """A command that loads the pack: stock mlx-lm's, where that loads base and adapters as here."""
    from ..bases.files import TINY

    base = manifest["base"]["id"]
    if is_of_encoder(manifest):
        return f"packs merge . --model {base} --out merged  # a folder of sentence-transformers"
    if base == TINY:
        return "packs generate --pack . --prompt ..."
    quantize = (manifest.get("recipe") or {}).get("quantize") or "none"
    if quantize == "none" and adapter_config(manifest):
        return f"mlx_lm.generate --model {base} --adapter-path . --prompt ..."
    return f"packs generate --model {base} --pack . --prompt ..."
