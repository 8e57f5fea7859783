"""Several packs as one: the weighted sum of their deltas, exact, of any ranks and targets.

A sum of low-rank deltas is one of higher rank: the packs' A stand side by side, and their B, times
weight and scale, one below the other. The result is a pack like any other, with scale 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..adapters.spec import ModuleSpec, SliceSpec, Specs
from ..bases.files import quantization_name
from ..errors import PackError
from ..runtime import mx
from .manifest import spec_json
from .pack import Pack

Weighted = list[tuple[Pack, float]]


def open_weighted(text: str | Path) -> tuple[Pack, float]:
    """A pack and its weight from ``DIR`` or ``DIR=0.7``.

    Raises: PackError for what is no weight, or no pack.
    """
    folder, sign, weight = str(text).rpartition("=")
    if not sign or Path(text).expanduser().is_dir():
        return Pack.open(text), 1.0
    try:
        value = float(weight)
    except ValueError:
        raise PackError(
            f"--pack {text}: the weight must be a number, as in {folder}=0.7, but got '{weight}'."
        ) from None
    return Pack.open(folder), _checked(value, folder)


def _checked(weight: float, name: str | Path) -> float:
    if not math.isfinite(weight) or weight == 0:
        raise PackError(
            f"--pack {name}={weight:g}: the weight must be a finite number other than 0."
        )
    return float(weight)


def as_pack(given: "str | Path | Pack | Mapping[str | Path, float] | Weighted") -> Pack:
    """A pack, a folder, or packs with weights (``{"a": 0.7, "b": 0.3}`` or pairs), as one pack."""
    if isinstance(given, Pack):
        return given
    if isinstance(given, (str, Path)):
        return Pack.open(given)
    pairs = given.items() if isinstance(given, Mapping) else given
    return weighted_sum([(as_pack(pack), weight) for pack, weight in pairs])


@dataclass(frozen=True)
class _Part:
    """One pack of a sum."""

    pack: Pack
    weight: float
    specs: Specs
    name: str

    @classmethod
    def of(cls, pack: Pack, weight: float) -> "_Part":
        return cls(pack, _checked(weight, pack.name), pack.specs, pack.name)


def weighted_sum(packs: Sequence[tuple[Pack, float]]) -> Pack:
    """The pack whose delta is the sum of the packs' deltas, each times its weight.

    One pack with weight 1 is given back as it is. Recipe and objective keep what all agree on.

    Raises: PackError if there is none, one is given twice or is for another base than the first, or
        one is not a sum of low-rank deltas.
    """
    if not packs:
        raise PackError("--pack: there is no pack to add up.")
    parts = [_Part.of(pack, weight) for pack, weight in packs]
    check_distinct([part.pack for part in parts])
    first = parts[0].pack
    if len(parts) == 1 and parts[0].weight == 1:
        return first
    check_addable([part.pack for part in parts])
    specs, tensors = {}, {}
    for path in dict.fromkeys(path for part in parts for path in part.specs):
        held = [part for part in parts if path in part.specs]
        specs[path] = _sum_spec(path, held)
        tensors |= _sum_tensors(specs[path], held)
    mx.eval(tensors)
    manifest = {
        "format_version": first.manifest["format_version"],
        "method": "lora",
        "base": first.manifest["base"],
        "adapters": {
            "parameters": sum(tensor.size for tensor in tensors.values()),
            "groups": _sum_groups(parts),
            "modules": [spec_json(spec) for spec in specs.values()],
        },
        **{name: _agreed([p.pack.part(name) for p in parts]) for name in ("recipe", "objective")},
        "sum_of": [{"pack": p.pack.short_name, "weight": p.weight} for p in parts],
    }
    return Pack(manifest, tensors, parts=tuple((p.pack.identity, p.weight) for p in parts))


def check_distinct(packs: Sequence[Pack]) -> None:
    """Raises: PackError if two of the packs are one folder, one object, or the same sum."""
    seen = set()
    for pack in packs:
        if pack.identity in seen:
            raise PackError(f"--pack {pack.name}: is given twice.")
        seen.add(pack.identity)


def check_addable(packs: Sequence[Pack]) -> None:
    """Raises: PackError if one is for another base than the first, or no sum of low-rank deltas."""
    first = packs[0]
    for pack in packs:
        if found := pack.beyond_lora:
            raise PackError(
                f"{pack.name}: {found}, which is no delta of a linear that can be "
                "weighted and added; merge it instead."
            )
        ours, theirs = first.manifest["base"], pack.manifest["base"]
        if any(ours[key] != theirs[key] for key in ("fingerprint", "quantization")):
            told = [
                f"{b['id']} as {quantization_name(b['quantization'])} (fingerprint "
                f"{b['fingerprint'][:12]})"
                for b in (theirs, ours)
            ]
            raise PackError(
                f"{pack.name}: was trained on {told[0]}, but {first.name} on "
                f"{told[1]}; only packs of one base can be added up."
            )


def _agreed(parts: list[dict]) -> dict:
    """What all mappings say alike."""
    first, *others = parts
    return {k: v for k, v in first.items() if all(k in o and o[k] == v for o in others)}


def _sum_groups(parts: list[_Part]) -> list[list[str]]:
    groups: list[list[str]] = []
    seen: set[str] = set()
    for group in (g for part in parts for g in part.pack.manifest["adapters"]["groups"]):
        if rest := [path for path in group if path not in seen]:
            groups.append(rest)
        seen |= set(group)
    return groups


def _sum_spec(path: str, parts: list[_Part]) -> ModuleSpec:
    """One projection's adapter with the ranks of all packs, and scale 1.

    Where one pack has slices that another has not, they become one slice with all ranks.
    """
    found = [part.specs[path] for part in parts]
    first = found[0]
    for part, spec in zip(parts, found, strict=True):
        if (spec.in_features, sum(spec.widths), spec.experts) != (
            first.in_features,
            sum(first.widths),
            first.experts,
        ):
            raise PackError(f"{part.name}: {path}: its shape differs from that in {parts[0].name}.")
    if any(spec.widths != first.widths for spec in found):
        rank, leaf = sum(spec.rank for spec in found), path.rpartition(".")[2]
        whole = SliceSpec(leaf, sum(first.widths), rank, float(rank))
        return ModuleSpec(path, first.in_features, (whole,), first.experts)
    slices = []
    for same in zip(*(spec.slices for spec in found), strict=True):
        rank = sum(s.rank for s in same)
        slices.append(SliceSpec(same[0].name, same[0].width, rank, float(rank)))
    return ModuleSpec(path, first.in_features, tuple(slices), first.experts)


def _sum_tensors(spec: ModuleSpec, parts: list[_Part]) -> dict[str, mx.array]:
    """A and B of one projection on disk: slice by slice, and in each slice the packs in order."""
    names = f"{spec.path}.lora_a", f"{spec.path}.lora_b"
    experts = spec.experts is not None
    columns: list[list[mx.array]] = [[] for _ in spec.slices]
    rows: list[list[mx.array]] = [[] for _ in spec.slices]
    for part in parts:
        tensors = part.pack.load_tensors()
        a, b = (tensors[name].astype(mx.float32) for name in names)
        if experts:
            a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
        at = 0
        for i, s in enumerate(part.specs[spec.path].slices):
            own, to = slice(at, at + s.rank), min(i, len(spec.slices) - 1)
            columns[to].append(a[..., own])
            rows[to].append(part.weight * s.scale * b[..., own, :])
            at += s.rank
    a = mx.concatenate([x for found in columns for x in found], axis=-1)
    b = mx.concatenate([x for found in rows for x in found], axis=-2)
    if experts:
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    return dict(zip(names, (a, b), strict=True))
