"""The manifest of a pack: what every key must be."""

import os
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..adapters.spec import SCORE_WEIGHT, ModuleSpec, SliceSpec, Specs
from ..config.choices import (
    ARCHITECTURES,
    METRICS,
    TASKS,
    ArchitectureFacts,
    PackFacts,
    architecture_of,
)
from ..config.data import COLUMN_SETTINGS, JSON_LAYOUT
from ..errors import PackError, older_version, warn_once
from ..files import to_json
from ..kinds import MISSING, check_keys, check_kind
from ..reading import SEAL, check_seal, parse_json, read_json, read_text, sealed, without_seal

FORMAT_VERSION = 1
MANIFEST = "pack.json"
ADAPTERS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CARD = "README.md"
PIN = "hub.json"  # in a pulled pack, beyond what the manifest names: where it comes from
_PINNED = ("repo", "revision", "commit", "manifest_sha256")
HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
MAIN = "main"  # the Hub's branch where none is named
# The tasks of heads that were imported, which no task of ours trained.
_CLASSIFY = "classify"
_REWARD = "reward"
_ADAPTER_KINDS = ("lora", "dora", "embedding")
# Entries of `objective` that single tasks have, and their kinds.
_OBJECTIVES = {
    name: kind for facts in TASKS.values() for name, kind in facts.pack.objective.items()
}

_ENDS = ("before", "after")  # of training
# What every key must be (see `kinds`), by the part of the manifest that it is in.
_PARTS = {
    "": {
        "base": "a mapping",
        "adapters": "a mapping",
        **dict.fromkeys(("method", "profile", "license"), "text?"),
        **dict.fromkeys(("objective", "data", "recipe", "versions", "measured"), "a mapping?"),
        **dict.fromkeys(("gates", "classifier", "eval"), "a mapping?"),
        **dict.fromkeys(("phases", "samples", "sum_of"), "a list?"),
    },
    "base": {
        **dict.fromkeys(("id", "fingerprint", "model_type"), "text"),
        "text_files": "a mapping?",
        "text_files.*": "text",
        "quantization": "a mapping or null",
        "num_layers": "an integer of 0 or more",
        "takes_images": "true or false?",
    },
    "adapters": {
        "parameters": "an integer of 0 or more",
        "dtype": "text?",
        "padded_rank": "an integer above 0?",
        "groups": "a list",
        "groups.*": "a list of texts",
        "modules": "a list",
        "modules.*": "a mapping",
        "replaced": "a list?",
        "replaced.*": "a mapping",
    },
    "adapters.modules.*": {
        "path": "text",
        "in_features": "an integer above 0",
        "base_key": "text or a list of texts?",
        "head": "true or false?",
        "experts": "an integer above 0?",
        "slices": "a list with something in it",
        "slices.*": "a mapping",
    },
    "adapters.modules.*.slices.*": {
        "name": "text",
        "width": "an integer above 0",
        "rank": "an integer of 0 or more",
        "alpha": "a number",
    },
    "adapters.replaced.*": {
        "name": "text",
        "shape": "a list of integers",
        "head": "true or false?",
    },
    "objective": {
        **dict.fromkeys(("loss_on", "task", "loss", "graph", "note"), "text?"),
        **_OBJECTIVES,
        "stack": "a list of texts?",
        "json_layout": "a mapping?",
        **{f"json_layout.{part}": "text?" for part in JSON_LAYOUT},
        "json_layout.keys": "a list of texts?",
        "json_layout.thoughts": "true or false?",
        **dict.fromkeys(("ppl_before", "ppl_after"), "a number?"),
    },
    "data": {
        "source": "text?",
        "images": "an integer above 0?",
        "rows": "a mapping?",
        "rows.*": "an integer of 0 or more",
    },
    "recipe": {
        "max_seq_length": "an integer above 1?",
        "train_fp16_fallback": "true or false?",
        "template_kwargs": "a mapping?",
        "max_pixels": "an integer of 0 or more?",
        **dict.fromkeys(("chat_template", "template_date", "quantize", *COLUMN_SETTINGS), "text?"),
    },
    "measured": {"created": "text?"},
    "gates": {"*": "a mapping"},
    "gates.*": {"limit": "a number", "value": "a number", "passed": "true or false"},
    "classifier": {
        **dict.fromkeys(("problem_type", "head", "input"), "text?"),
        "labels": "a list?",
        "labels.*": "text",
        "temperature": "a number?",
    },
    "phases": {"*": "a mapping"},
    "phases.*": {
        **dict.fromkeys(("name", "data", "optimizer_state"), "text"),
        "steps": "an integer of 0 or more",
        "replay": "a number",
        **dict.fromkeys(_ENDS, "a mapping"),
        **dict.fromkeys((f"{end}.*" for end in _ENDS), "a mapping"),
        **dict.fromkeys((f"{end}.*.ppl" for end in _ENDS), "a number"),
    },
    "samples": {"*": "a mapping"},
    "samples.*": {"prompt": "text", **dict.fromkeys(("wanted", *_ENDS), "text?")},
    "sum_of": {"*": "a mapping"},
    "sum_of.*": {"pack": "text", "weight": "a number"},
    "eval": {
        "split": "text?",
        "rows": "an integer of 0 or more?",
        "commonest_share": "a number?",
        "answers": "a mapping?",
        **dict.fromkeys((f"ppl_{end}_se" for end in _ENDS), "a number?"),
        **dict.fromkeys((f"{n}_{end}" for n in ("ppl", *METRICS) for end in _ENDS), "a number?"),
    },
    "eval.answers": {
        "metric": "text",
        "rows": "an integer of 0 or more",
        "commonest_share": "a number?",
        **dict.fromkeys(_ENDS, "a mapping"),
    },
    **{
        f"eval.answers.{end}": {
            **dict.fromkeys(("share", "se"), "a number"),
            "valid": "a number?",
        }
        for end in _ENDS
    },
}
_KEYS = {
    f"{part}.{key}".removeprefix("."): kind
    for part, keys in _PARTS.items()
    for key, kind in keys.items()
}
_FILES = {
    "files": "a mapping",
    "files.*": "a mapping",
    "files.*.bytes": "an integer of 0 or more",
    "files.*.sha256": "text",
}
_CLASSIFIERS = {
    "problem_type": (
        "single_label_classification",
        "multi_label_classification",
        "regression",
        "ordinal",
    ),
    "head": ("score",),
    "input": ("text", "chat"),
}
_QUANTIZATION = {
    "bits": "an integer above 0",
    "group_size": "an integer above 0",
    "keep": "a list of texts?",
}


def read_manifest(file: Path) -> dict:
    """Every key is checked that this program reads."""
    return parse_manifest(read_text(file), str(file))


def parse_manifest(text: str, where: str) -> dict:
    """The manifest, every key and its own hash checked; errors call it ``where``.

    The result is without the hash.
    """
    try:
        manifest = parse_json(text)
        check_kind("it", manifest, "a mapping")
        version = manifest.get("format_version", MISSING)
        check_kind("format_version", version, "an integer above 0")
        if version <= FORMAT_VERSION:
            if SEAL not in manifest:
                raise older_version(where, "Train the pack again.")
            check_seal(manifest)
            manifest = without_seal(manifest)
            check_manifest(manifest)
    except (ValueError, RecursionError) as error:
        raise PackError(f"{where}: is not a manifest ({error}).", "unreadable") from None

    if version > FORMAT_VERSION:
        raise PackError(
            f"{where}: format {version} is newer than this program's ({FORMAT_VERSION}). Upgrade "
            "mlx-packs.",
            "unsupported",
        )
    return manifest


def manifest_text(manifest: dict) -> str:
    return to_json(sealed(manifest))


def check_manifest(manifest: dict, with_files: bool = True) -> None:
    """Raises ValueError if a key is missing or faulty; ``with_files``: files' keys, too."""
    check_keys(manifest, _KEYS)
    if with_files:
        check_keys(manifest, _FILES)
        check_kind(f"files.{ADAPTERS}", manifest["files"].get(ADAPTERS, MISSING), "a mapping")

    if (quantization := manifest["base"]["quantization"]) is not None:
        check_quantization("base.quantization", quantization)

    modules, replaced = (manifest["adapters"].get(key) for key in ("modules", "replaced"))
    if not modules and not replaced:
        raise ValueError("adapters.modules must be a list with something in it, but is []")
    for i, module in enumerate(modules):
        _check_module(f"adapters.modules[{i}]", module)

    _check_head(manifest)
    _check_json_layout(json_layout_of(manifest))

    for i, tensor in enumerate(replaced or []):
        if not tensor["name"].rpartition(".")[0]:
            raise ValueError(
                f"adapters.replaced[{i}].name must be of a module's tensor, but is "
                f"{tensor['name']!r}"
            )


def check_quantization(key: str, quantization: object) -> None:
    """Raises ValueError if what MLX needs to know of quantized weights is missing or faulty."""
    check_kind(key, quantization, "a mapping")
    check_keys(quantization, _QUANTIZATION, key)
    check_kind(f"{key}.mode", quantization.get("mode", "affine"), "text")


def _check_json_layout(layout: dict) -> None:
    for part, pattern in JSON_LAYOUT.items():
        text = layout.get(part) or ""
        if text and not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(
                f"objective.json_layout.{part} must be white space around its mark, but is "
                f"{text[:60]!r}"
            )


def _check_head(manifest: dict) -> None:
    """Raises ValueError if a classifier is faulty, or its head has not a row for each output."""
    shape = replaced_of(manifest).get(SCORE_WEIGHT)
    classifier = manifest.get("classifier")
    outputs = 1
    if classifier is not None:
        outputs = _checked_outputs(classifier)
        if shape is None:
            raise ValueError(f"{SCORE_WEIGHT}, the head of a classifier, is missing")

    if shape is not None and (len(shape) != 2 or shape[0] != outputs):
        raise ValueError(f"{SCORE_WEIGHT} must have {outputs} rows, but is {list(shape)}")


def _checked_outputs(classifier: dict) -> int:
    for key, values in _CLASSIFIERS.items():
        if classifier.get(key) not in values:
            raise ValueError(f"classifier.{key} must be one of {', '.join(values)}")

    labels = classifier.get("labels") or []
    has_labels = classifier["problem_type"] != "regression"
    if len(set(labels)) != len(labels) or has_labels != bool(labels):
        raise ValueError("classifier.labels must be different names, and a score has none")
    check_kind("classifier.temperature", classifier.get("temperature"), "a finite number above 0")
    if classifier["problem_type"] == "ordinal":
        return len(labels) - 1
    return max(1, len(labels))


def _check_module(key: str, module: dict) -> None:
    kind = module.get("kind", "lora")
    if kind not in _ADAPTER_KINDS:
        raise ValueError(f"{key}.kind must be one of {', '.join(_ADAPTER_KINDS)}, but is {kind!r}")

    has_experts = module.get("experts") is not None
    if kind != "lora" and (has_experts or len(module["slices"]) > 1):
        raise ValueError(f"{key}: {kind} has one slice and no experts")
    if has_experts and len(module["slices"]) > 1:
        raise ValueError(f"{key}: a switch linear has one slice, not {len(module['slices'])}")

    for i, part in enumerate(module["slices"]):
        if part["rank"]:
            check_kind(f"{key}.slices[{i}].alpha", part["alpha"], "a finite number above 0")


def spec_json(spec: ModuleSpec, origin: str | list[str] | None = None) -> dict:
    """``origin`` is the tensor of the base's files, if certain."""
    module = {
        "path": spec.path,
        "in_features": spec.in_features,
        "base_key": origin,
        "experts": spec.experts,
        "kind": None if spec.kind == "lora" else spec.kind,
        "head": spec.head,
        "slices": [asdict(s) for s in spec.slices],
    }

    return {key: value for key, value in module.items() if value is not None}


def specs_of(manifest: dict) -> Specs:
    specs = {}
    for module in manifest["adapters"]["modules"]:
        slices = tuple(
            SliceSpec(s["name"], s["width"], s["rank"], float(s["alpha"])) for s in module["slices"]
        )

        optional = module.get("experts"), module.get("kind", "lora"), module.get("head")
        path = module["path"]
        specs[path] = ModuleSpec(path, module["in_features"], slices, *optional)
    return specs


def replaced_json(name: str, shape: tuple[int, ...], head: bool) -> dict:
    """``head``: the tensor is both table and head."""
    tensor = {"name": name, "shape": list(shape)}
    if head:
        tensor["head"] = True
    return tensor


def replaced_of(manifest: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of tensors stored in full (PEFT's modules_to_save)."""
    return {t["name"]: tuple(t["shape"]) for t in manifest["adapters"].get("replaced") or []}


def has_score_head(manifest: dict) -> bool:
    """A pack with a head of its own scores and generates no text."""
    return SCORE_WEIGHT in replaced_of(manifest)


def is_classifier(manifest: dict) -> bool:
    return manifest.get("classifier") is not None


def is_reward_model(manifest: dict) -> bool:
    return has_score_head(manifest) and task_of(manifest) == _REWARD


def task_of(manifest: dict) -> str | None:
    """The task that trained a pack, or would have; None if nothing tells."""
    if is_classifier(manifest):
        return _CLASSIFY

    task = (manifest.get("objective") or {}).get("task")
    if has_score_head(manifest):
        is_scored = task in TASKS and task != _CLASSIFY and "score" in TASKS[task].heads
        return task if is_scored else _REWARD

    model_type = (manifest.get("base") or {}).get("model_type")
    if architecture_of(model_type) == "encoder":
        return "embedding"
    return task


def generates(manifest: dict) -> bool:
    """Whether a pack generates text: it has no head of its own, and gives no vectors."""
    task = task_of(manifest)
    gives_vectors = task in TASKS and TASKS[task].heads == ("none",)
    return not has_score_head(manifest) and not gives_vectors


def pack_facts(manifest: dict) -> PackFacts:
    """The facts of the packs of a task; the default facts if the task is not known here."""
    task = task_of(manifest)
    if task not in TASKS:
        return PackFacts()
    return TASKS[task].pack


def task_code(manifest: dict, fact: str) -> Any:
    """Return the code that a fact of a pack's task names, imported now; None where it has none."""
    code = getattr(pack_facts(manifest), fact)
    if code is None:
        return None

    return TASKS.resolve(task_of(manifest), code)


def head_tables_of(manifest: dict) -> set[str]:
    """Tensors of `replaced_of` that are the table of an embedding and the head as well."""
    return {t["name"] for t in manifest["adapters"].get("replaced") or [] if t.get("head")}


def shapes_of(manifest: dict) -> dict[str, tuple[int, ...]]:
    shapes = replaced_of(manifest)
    for spec in specs_of(manifest).values():
        shapes |= spec.shapes
    return shapes


def architecture_facts(manifest: dict) -> ArchitectureFacts:
    return ARCHITECTURES[architecture_of(manifest["base"]["model_type"])]


def read_pin(folder: Path) -> dict | None:
    """Where a pulled pack comes from (repo, revision, commit), and the hash of its manifest.

    None if it was not pulled. The pack does not need it: a line names a damaged file.
    """
    file = folder / PIN
    if not os.path.lexists(file):
        return None

    pin: dict = {}
    with suppress(PackError, OSError):
        pin = read_json(file)
    pin = {key: pin[key] for key in _PINNED if isinstance(pin.get(key), str)}
    if pin.keys() >= {"repo", "revision", "commit"}:
        return pin
    warn_once("%s: is ignored, since it is damaged. Pull the pack again.", file)
    return None


def chat_template_of(manifest: dict) -> str | None:
    """Return the chat template that a pack was trained with; None if it is the base model's."""
    return (manifest.get("recipe") or {}).get("chat_template")


def template_kwargs_of(manifest: dict) -> dict:
    return dict((manifest.get("recipe") or {}).get("template_kwargs") or {})


def json_layout_of(manifest: dict) -> dict:
    """Return the layout of JSON in the answers that a pack was trained on; empty if unknown."""
    return (manifest.get("objective") or {}).get("json_layout") or {}


def is_hub_name(path: str | Path) -> bool:
    """Whether a pack's name can only be meant for the Hub: nothing here begins like it."""
    is_id = re.fullmatch(HUB_ID + r"(@[\w./-]+)?", str(path), re.ASCII) is not None
    return is_id and not Path(Path(path).parts[0]).exists()
