"""What packs record for their use, compared wherever packs meet, whatever their order."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from ..config.choices import TASKS
from ..config.data import COLUMN_SETTINGS
from ..errors import PackError, warn_once
from .manifest import recorded_keys, task_of

if TYPE_CHECKING:
    from .pack import Pack


# Facts of the training and of the examples: packs may differ in them, and use reads none of them.
# Every other checked entry of `objective` and `recipe` is compared.
TRAINING_ONLY = {
    "objective": frozenset(
        "task loss loss_on beta reward class_weights center_rewards_coefficient teacher graph note "
        "stack ppl_before ppl_after".split()
    ),
    # `base.quantization` is compared instead of the option
    "recipe": frozenset(("quantize", "template_date", *COLUMN_SETTINGS)),
}
# Packs that differ in these compute different things; one that records no pooling has its base's.
_SAME = ("task", "classifier", "pooling", "normalize", "head", "chat_template")
_OF_BASE = ("pooling", "normalize")
# What a sum of packs that differ records; other entries are left out, so that the base's hold.
_SUMMED: Mapping[str, Callable[[Iterable], Any]] = {
    "max_seq_length": min,
    "max_pixels": min,
    "train_fp16_fallback": max,
}


def use_records(manifest: Mapping) -> dict[str, Any]:
    """All that a manifest records for the use of its pack, by name; empty values are left out."""
    task = task_of(manifest)
    if task is None or (task in TASKS and not TASKS[task].pack.described):
        task = "text generation"  # such as DPO and SFT

    records = {"task": task, "classifier": manifest.get("classifier")}
    records |= (manifest.get("base") or {}).get("text_files") or {}

    for part, ignored in TRAINING_ONLY.items():
        values = manifest.get(part) or {}
        names = {*recorded_keys(part), *(values if part == "objective" else ())}
        records |= {name: values.get(name) for name in names - ignored}

    return {name: value for name, value in records.items() if value not in (None, {}, "", [])}


def differing_records(all_records: Sequence[Mapping]) -> list[str]:
    """The names of the records that are not equal, in one order."""
    names = {name for records in all_records for name in records}
    first = all_records[0]
    return sorted(n for n in names if any(r.get(n) != first.get(n) for r in all_records))


def check_same_use(packs: Sequence["Pack"], flag: str | None = None) -> None:
    """Raise a PackError if packs are for different uses, and log once where else they differ."""
    all_records = [use_records(pack.manifest) for pack in packs]
    differing = differing_records(all_records)

    where = ", ".join(sorted(pack.name for pack in packs))

    for name in _SAME:
        is_unknown = name in _OF_BASE and not all(name in records for records in all_records)
        if name in differing and not is_unknown:
            raise PackError(
                f"{where}: {_values(name, packs, all_records)}. Use packs together only if they "
                "agree in it.",
                "mismatch",
                flag,
            )

    if differing:
        warn_once(
            "%s: %s. Together they have the smaller length or size; of all else, the base's "
            "default.",
            where,
            " · ".join(_values(name, packs, all_records) for name in differing),
        )


def agreed_records(packs: Sequence["Pack"]) -> dict[str, dict]:
    """The recipe and objective of the sum of packs: what they have in common."""
    parts = {}
    for part in TRAINING_ONLY:
        common = reduce(_common, (pack._part(part) for pack in packs))

        for name, choose in _SUMMED.items():
            values = [v for p in packs if (v := p._part(part).get(name)) is not None]
            if values and name not in common:
                common[name] = choose(values)
        parts[part] = common
    return parts


def _common(one: Mapping, other: Mapping) -> dict:
    """The entries that both have, of mappings inside of them too."""
    common = {}
    for name, value in one.items():
        if name in other and value == other[name]:
            common[name] = value
        elif isinstance(value, Mapping) and isinstance(other.get(name), Mapping):
            common[name] = _common(value, other[name])
    return common


def note_of_start(start: Mapping, manifest: Mapping) -> str:
    """What the pack that a run started from records otherwise than the run's own; often nothing."""
    both = [use_records(start), use_records(manifest)]
    return " · ".join(
        f"{name} is {_shown(name, both[1])}, but was {_shown(name, both[0])} in the pack that the "
        "run started from"
        for name in differing_records(both)
    )


def _values(name: str, packs: Sequence["Pack"], all_records: Sequence[Mapping]) -> str:
    by_value: dict[str, list[str]] = {}
    for pack, records in zip(packs, all_records, strict=True):
        by_value.setdefault(_shown(name, records), []).append(pack.short_name)

    texts = (f"{value} in {', '.join(sorted(names))}" for value, names in sorted(by_value.items()))
    return f"{name} is {' and '.join(texts)}"


def _shown(name: str, records: Mapping) -> str:
    value = records.get(name)
    if value is None:
        return "not recorded"

    text = value if name == "task" else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return f"{text[:59]}…" if len(text) > 60 else text
