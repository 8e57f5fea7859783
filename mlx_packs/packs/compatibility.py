"""Whether a pack goes with a base, by its headers, and with other packs, by what they record."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bases.files import (
    CONFIG,
    TINY,
    check_files,
    context_of,
    quantization_name,
    resolve_checkpoint,
    short_fingerprint,
    stored_quantization,
)
from ..bases.fingerprint import changed_texts, fingerprint, say_changed
from ..bases.readers import DENSE, is_local_model, reader_of
from ..bases.weight_formats import format_name
from ..config.choices import TASKS
from ..errors import PackError, file_errors
from ..files import is_hub_id
from ..reading import read_json
from .manifest import (
    check_quantization,
    generates,
    pack_facts,
    task_code,
    task_of,
)
from .pack import Pack

if TYPE_CHECKING:
    from ..bases.model import BaseModel


# Packs that differ in these compute different things; one that records no pooling has its base's.
_SAME = {
    "objective": ("pooling", "normalize", "head", "query_prompt", "instruction"),
    "recipe": ("chat_template", "template_kwargs"),
}
_OF_BASE = ("pooling", "normalize")
# What a sum of packs that differ records; other entries are left out, so that the base's hold.
_SUMMED: Mapping[str, Callable[[Iterable], Any]] = {
    "max_seq_length": min,
    "max_pixels": min,
    "train_fp16_fallback": max,
}


def check_base(pack: Pack, base: "BaseModel") -> None:
    current = base.path, base.fingerprint
    _check_base(pack, base.name, current, base.config, base.quantization)

    trained = pack._part("objective")
    settings = {}
    if read := task_code(pack.manifest, "base_settings"):
        settings = read(base.path, base.architecture == "decoder")

    for name, value in settings.items():
        if trained.get(name, value) != value:
            trained_with = f"with {name} {trained[name]}"
            raise _mismatch(pack, trained_with, f"{base.name} has {name} {value} (modules.json).")


def _check_base(
    pack: Pack, name: str, current: tuple[Path, str], config: dict, quantization: Mapping | None
) -> None:
    """Compare model type, folder and fingerprint, quantization; without one the base is dense."""
    ours = pack.manifest["base"]
    if ours["model_type"] != config["model_type"]:
        trained = f"on a {ours['model_type']} ({ours['id']})"
        raise _mismatch(pack, trained, f"{name} is a {config['model_type']}.")

    path, value = current
    if ours["fingerprint"] != value:
        trained = f"on {ours['id']} (fingerprint {short_fingerprint(ours['fingerprint'])})"
        other = f"{name} is another base (fingerprint {short_fingerprint(value)})."
        raise _mismatch(pack, trained, other)

    was, now = (quantization_name(q) for q in (ours["quantization"], quantization))
    if was != now:
        mode = format_name(ours["quantization"])
        how = f"with load_base(…, quantize='{mode}')" if mode != "none" else "without quantize"
        actual = (
            f"{name} is {now}. Packs of different quantization take a command each; from Python, "
            f"load the base {how}."
        )
        raise _mismatch(pack, f"on {ours['id']} as {was}", actual, "quantize")

    recorded = ours.get("text_files")
    if recorded and (names := changed_texts(path, recorded)):
        say_changed(pack.name, path, names)


def _mismatch(pack: Pack, trained: str, actual: str, flag: str | None = None) -> PackError:
    return PackError(f"{pack.name}: was trained {trained}, but {actual}", "mismatch", flag)


def check_checkpoint(pack: Pack, model: str | Path) -> tuple[Path, dict]:
    """Check a checkpoint by its headers, as `check_base` does; return its folder and config."""
    path = resolve_checkpoint(model)
    config = check_files(path)

    if quantization := config.get("quantization"):
        with file_errors(path / "config.json"):
            check_quantization("quantization", quantization)

    if not quantization and (
        is_converted_on_loading(config) or quantize_for(pack, config) != "none"
    ):
        quantization = pack.manifest["base"]["quantization"]  # as it will be once it is loaded

    _check_base(pack, str(model), (path, fingerprint(path)), config, quantization)
    return path, config


def quantize_for(pack: Pack, config: dict) -> str:
    """The ``quantize`` of `load_base` that makes a checkpoint the pack's base model."""
    if config.get("quantization") or is_converted_on_loading(config):
        return "none"
    return format_name(pack.manifest["base"]["quantization"])


def quantize_options(pack: Pack) -> dict:
    """The other options of `load_base` for `quantize_for`: ``double_quant`` and ``keep``."""
    q = pack.manifest["base"]["quantization"] or {}
    return {"double_quant": bool(q.get("double_quant")), "keep": tuple(q.get("keep") or ())}


def is_converted_on_loading(config: dict) -> bool:
    """Whether a checkpoint is quantized in a format that mlx-lm converts as it loads."""
    return not config.get("quantization") and bool(stored_quantization(config))


def text_limit(manifest: Mapping, config: dict) -> int:
    """The tokens that a pack reads of a text: as in training, within the context of its base.

    ``manifest`` may be empty, for a base without a pack; ``config`` is the base's config.json.
    """
    context = context_of(config)
    return min((manifest.get("recipe") or {}).get("max_seq_length") or context, context)


def check_generates(pack: Pack) -> None:
    """Check that text can be generated with a pack."""
    if generates(pack.manifest):
        return

    facts = pack_facts(pack.manifest)
    raise PackError(
        f"{pack.name}: is {facts.described} (--task {task_of(pack.manifest)}), which generates no "
        f"text. {facts.instead}",
        "unsupported",
    )


def check_activates(pack: Pack) -> None:
    """Check that a base can have a pack until another one: others are for one call each."""
    if not pack_facts(pack.manifest).activates:
        check_generates(pack)


def check_use(pack: Pack, task: str) -> None:
    """Check that a pack is for a task, or for text: then the task is asked of the LM head."""
    if task_of(pack.manifest) != task and pack_facts(pack.manifest).described:
        raise unsuited(pack, task)


def checked_scorer(pack: Pack, task: str) -> Pack:
    """Return a pack, which must have the head of a task."""
    if task_of(pack.manifest) != task:
        raise unsuited(pack, task)
    return pack


def unsuited(pack: Pack, task: str) -> PackError:
    """Return the error of a pack that is needed for a task, and is not for it."""
    trained = task_of(pack.manifest)
    wanted = TASKS[task].pack.described

    text = f"is not {wanted}. Train one with --task {task}."
    if trained in TASKS and trained != task:
        facts = TASKS[trained].pack
        described = facts.described or "a pack that generates text"
        text = f"is {described} (--task {trained}), not {wanted}. {facts.instead}"
    return PackError(f"{pack.name}: {text}", "unsupported")


def find_base(pack: Pack | None) -> str:
    """The base that a pack was trained on, as `load_base` takes it; ``tiny`` without a pack.

    It is a name of the Hub, or a folder: where the run beside the pack has it, or here under its
    name. Raises PackError if there is no such folder.
    """
    if pack is None:
        return TINY

    name = pack.manifest["base"]["id"]
    if name == TINY or is_hub_id(name) or (is_local_model(name) and DENSE not in name):
        return name

    folders = _bases_of_runs(pack)
    if Path(name).name == name:  # a pack leads to no other place
        folders.append(name)

    for folder in folders:
        path = Path(folder).expanduser()
        if is_local_model(folder) or path.is_dir() or (path.is_file() and reader_of(path)):
            return folder

    raise PackError(
        f"--model: {pack.name} was trained on {name}, which is not here. Name its folder: "
        "--model DIR.",
        "not-found",
        "model",
    )


def _bases_of_runs(pack: Pack) -> list[str]:
    """The base of the run beside a pack, or beside the parts of a sum."""
    folders = [pack.path] if pack.path else [identity for identity, _ in pack.parts]
    recipes = [recipe_of_run(folder) for folder in folders if isinstance(folder, Path)]
    return [str(recipe["model"]) for recipe in recipes if "model" in recipe]


def recipe_of_run(folder: Path) -> Mapping:
    """The recipe in the run folder next to a pack, which has paths; empty without it."""
    with suppress(PackError, OSError, ValueError):
        recipe = read_json(folder.with_name(f"{folder.name}-run") / CONFIG).get("recipe")
        return recipe if isinstance(recipe, Mapping) else {}
    return {}


def _use_of(pack: Pack) -> dict[str, Any]:
    """Return what packs must agree in to be used together, by name."""
    task = task_of(pack.manifest)
    if task is None or (task in TASKS and not TASKS[task].pack.described):
        task = "text generation"  # such as DPO and SFT

    records = {"task": task, "classifier": pack.manifest.get("classifier")}
    for part, names in _SAME.items():
        records |= {name: pack._part(part).get(name) or None for name in names}
    return records


def check_same_use(packs: Sequence[Pack], flag: str | None = None) -> None:
    """Raise a PackError if packs are for different uses."""
    uses = [_use_of(pack) for pack in packs]
    for name in uses[0]:
        values = [use[name] for use in uses]
        is_unknown = name in _OF_BASE and None in values
        if is_unknown or all(value == values[0] for value in values):
            continue

        where = ", ".join(sorted(pack.name for pack in packs))
        places = zip(values, packs, strict=True)
        shown = sorted(f"{_shown(value)} in {pack.short_name}" for value, pack in places)
        raise PackError(
            f"{where}: {name} is {' and '.join(shown)}. Use packs together only if they agree in "
            "it.",
            "mismatch",
            flag,
        )


def agreed_records(packs: Sequence[Pack]) -> dict[str, dict]:
    """The recipe and objective of the sum of packs: what they have in common."""
    parts = {}
    for part in _SAME:
        records = [pack._part(part) for pack in packs]
        first = records[0].items()
        common = {name: v for name, v in first if all(r.get(name) == v for r in records)}

        for name, choose in _SUMMED.items():
            values = [value for record in records if (value := record.get(name)) is not None]
            if values and name not in common:
                common[name] = choose(values)
        parts[part] = common
    return parts


def _shown(value: Any) -> str:
    if value is None:
        return "not recorded"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{text[:59]}…" if len(text) > 60 else text
