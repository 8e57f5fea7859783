"""Several packs as one: the weighted sum of their deltas, exact, of any ranks and targets.

A sum of low-rank deltas is one of higher rank: the packs' A are concatenated, and their B, times
weight and scale, one below the other. The result is a pack like any other, with scale 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..adapters.lora import name_factors, read_factors
from ..adapters.spec import ModuleSpec, SliceSpec, Specs
from ..bases.files import quantization_name, short_fingerprint
from ..config.arguments import checked_arguments
from ..errors import PackError
from ..files import to_json
from ..runtime import mx
from .compatibility import agreed_records, check_activates, check_same_use
from .manifest import spec_json
from .pack import Pack

OnePack = str | Path | Pack
Packs = OnePack | Mapping[str | Path, float] | Sequence[tuple[OnePack, float]]

LEAST_WEIGHT = 1e-6
MOST_WEIGHT = 100.0


def as_pack(packs: Packs) -> Pack:
    """One pack from a pack, a folder, or packs with weights (a mapping or pairs)."""
    if isinstance(packs, Pack):
        return packs
    if isinstance(packs, (str, Path)):
        return Pack.open(packs)

    pairs = packs.items() if isinstance(packs, Mapping) else packs
    if not isinstance(pairs, Iterable):
        raise PackError(
            "pack: must be a pack, its folder, or packs with weights, "
            f"but is a {type(packs).__name__}.",
            flag="pack",
        )
    return weighted_sum([(as_pack(pack), weight) for pack, weight in pairs])


def open_weighted(text: str | Path) -> tuple[Pack, float]:
    """A pack and its weight from ``DIR`` or ``DIR=0.7``."""
    folder, sign, weight = str(text).rpartition("=")
    if not sign or Path(text).expanduser().is_dir():
        return Pack.open(text), 1.0

    try:
        value = float(weight)
    except ValueError:
        raise PackError(
            f"--pack {text}: the weight must be a number, as in {folder}=0.7, but got '{weight}'."
        ) from None

    check_weight(value, f"--pack {folder}={weight}")
    return Pack.open(folder), value


def check_weight(weight: float, where: str, flag: str | None = None) -> None:
    """Raise a PackError for a weight that makes nothing or garbage of a pack, also a NaN."""
    if not LEAST_WEIGHT <= abs(weight) <= MOST_WEIGHT:
        raise PackError(
            f"{where}: the weight must be a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, or "
            "its negative.",
            flag=flag,
        )


@dataclass(frozen=True)
class _WeightedPack:
    pack: Pack
    weight: float
    specs: Specs


@checked_arguments
def weighted_sum(packs: Sequence[tuple[Pack, float]]) -> Pack:
    """Return the pack whose delta is the weighted sum of the deltas of several packs.

    Ranks and targets may differ; the sum is exact. A single pack with weight 1 is returned
    unchanged. Of recipe and objective, the sum keeps what all packs have in common.

    Args:
        packs: Pairs of a pack and its weight.

    Raises:
        PackError: If there is no pack, a pack occurs twice, or the packs cannot be added up, for
            example since they are of different tasks.
    """
    if not packs:
        raise PackError("--pack: there is no pack to add up.")
    for pack, weight in packs:
        check_weight(weight, f"--pack {pack.name}={weight:g}")

    parts = [_WeightedPack(pack, float(weight), pack.specs) for pack, weight in packs]
    check_distinct([part.pack for part in parts])

    first = parts[0].pack
    if len(parts) == 1 and parts[0].weight == 1:
        return first

    check_addable([part.pack for part in parts])

    specs = {}
    tensors = {}
    for path in dict.fromkeys(path for part in parts for path in part.specs):
        with_path = [part for part in parts if path in part.specs]
        specs[path] = _sum_spec(path, with_path)
        tensors |= _sum_tensors(specs[path], with_path)

    mx.eval(tensors)

    # the same for every order of the packs
    base = min((part.pack.manifest["base"] for part in parts), key=to_json)

    manifest = {
        "format_version": first.manifest["format_version"],
        "method": "lora",
        "base": base,
        "adapters": {
            "parameters": sum(tensor.size for tensor in tensors.values()),
            "groups": _sum_groups(parts),
            "modules": [spec_json(spec) for spec in specs.values()],
        },
        **agreed_records([part.pack for part in parts]),
        "sum_of": [{"pack": p.pack.short_name, "weight": p.weight} for p in parts],
    }

    return Pack(manifest, tensors, parts=tuple((p.pack._identity, p.weight) for p in parts))


def check_distinct(packs: Sequence[Pack]) -> None:
    seen = set()
    for pack in packs:
        if pack._identity in seen:
            raise PackError(f"--pack {pack.name}: is listed twice.", "conflict")
        seen.add(pack._identity)


def check_addable(packs: Sequence[Pack]) -> None:
    first = packs[0]
    for pack in packs:
        check_activates(pack)
        if reason := pack._beyond_lora:
            raise PackError(
                f"{pack.name}: {reason}, which is not a delta of a linear that can be weighted and "
                "added. Merge it instead.",
                "unsupported",
            )

        bases = [pack.manifest["base"], first.manifest["base"]]
        same_quantization = bases[0]["quantization"] == bases[1]["quantization"]
        if not same_quantization or bases[0]["fingerprint"] != bases[1]["fingerprint"]:
            theirs, ours = (
                f"{base['id']} as {quantization_name(base['quantization'])} (fingerprint "
                f"{short_fingerprint(base['fingerprint'])})"
                for base in bases
            )
            raise PackError(
                f"{pack.name}: was trained on {theirs}, but {first.name} on {ours}. Only packs of "
                "one base can be added up.",
                "mismatch",
            )

    check_same_use(packs)


def _sum_groups(parts: list[_WeightedPack]) -> list[list[str]]:
    groups: list[list[str]] = []
    seen: set[str] = set()
    for group in (g for part in parts for g in part.pack.manifest["adapters"]["groups"]):
        if rest := [path for path in group if path not in seen]:
            groups.append(rest)
        seen |= set(group)
    return groups


def _sum_spec(path: str, parts: list[_WeightedPack]) -> ModuleSpec:
    """One projection's adapter with the ranks of all packs, and scale 1.

    If one pack has slices that another has not, they become one slice with all ranks.
    """
    specs = [part.specs[path] for part in parts]
    first = specs[0]

    for part, spec in zip(parts, specs, strict=True):
        if spec.size != first.size:
            raise PackError(
                f"{part.pack.name}: {path} is {spec.size}, but in {parts[0].pack.name} it is "
                f"{first.size}.",
                "mismatch",
            )

    if all(spec.widths == first.widths for spec in specs):
        places = [(s.name, s.width) for s in first.slices]
        ranks = [sum(spec.slices[i].rank for spec in specs) for i in range(len(places))]
    else:
        places = [(path.rpartition(".")[2], first.out_features)]
        ranks = [sum(spec.rank for spec in specs)]

    slices = [SliceSpec(*place, r, float(r)) for place, r in zip(places, ranks, strict=True)]
    return ModuleSpec(path, first.in_features, tuple(slices), first.experts)


def _sum_tensors(spec: ModuleSpec, parts: list[_WeightedPack]) -> dict[str, mx.array]:
    """A and B as on disk: slice by slice, and in each slice the packs in order."""
    columns: list[list[mx.array]] = [[] for _ in spec.slices]
    rows: list[list[mx.array]] = [[] for _ in spec.slices]

    for part in parts:
        a, b = read_factors(spec, part.pack.load_tensors())
        at = 0
        for i, s in enumerate(part.specs[spec.path].slices):
            ranks = slice(at, at + s.rank)
            to = min(i, len(spec.slices) - 1)
            columns[to].append(a[..., ranks].astype(mx.float32))
            rows[to].append(part.weight * s.scale * b[..., ranks, :].astype(mx.float32))
            at += s.rank

    a = mx.concatenate([x for arrays in columns for x in arrays], axis=-1)
    b = mx.concatenate([x for arrays in rows for x in arrays], axis=-2)
    return name_factors(spec, a, b)
