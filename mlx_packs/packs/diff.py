"""Differences of two packs: what they share, and the distance of their deltas layer by layer.

A delta is scale * A @ B, [in, out]. With orthogonal bases Q of both packs' A, side by side, and P
of their B, a delta is Q @ core @ P.T with a core as small as the ranks together. Norms and products
are computed from the cores, and nothing as large as a weight is made.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..adapters.lora import read_factors
from ..adapters.spec import ModuleSpec, by_number, check_shapes, leaf_names, ranks_of
from ..bases.files import quantization_name
from ..config.arguments import checked_arguments
from ..errors import PackError
from ..runtime import mx
from .manifest import replaced_of
from .pack import Pack

Factors = tuple[np.ndarray, np.ndarray]  # [E, in, r] with the scale in it, [E, r, out]; E experts

# |A|^2, |B|^2, |A - B|^2 and <A, B> of two deltas, [4]; the sums of several projections add up.
Sums = np.ndarray


@checked_arguments
def diff(a: str | Path | Pack, b: str | Path | Pack) -> dict:
    """Compare two packs: their common settings, and the distance between their deltas.

    No base model is loaded. Ranks and targets may differ; a projection that only one pack adapts
    counts with its full delta.

    Args:
        a: The first pack, or its folder.
        b: The second pack, or its folder.

    Returns:
        A mapping with ``a``, ``b``, ``shared`` (``same``, ``a`` and ``b`` of each fact),
        ``same_base``, ``total``, ``layers``, ``modules``, ``only_in_a``, ``only_in_b`` and
        ``not_comparable``.

    Raises:
        PackError: If a pack is damaged or cannot be read, or no projection can be compared.
    """
    packs = [p if isinstance(p, Pack) else Pack.open(p) for p in (a, b)]
    specs = [pack.specs for pack in packs]
    tensors = [pack.load_tensors() for pack in packs]

    modules = []
    layers = {}
    incomparable = {}
    for path in sorted({*specs[0], *specs[1]}, key=by_number):
        spec = [s.get(path) for s in specs]
        if reason := _unlike(*spec):
            incomparable[path] = reason
            continue

        one = spec[0] or spec[1]
        factors = [_factors(s or one, t if s else None) for s, t in zip(spec, tensors, strict=True)]
        sums = _compare(*factors)

        ranks = {f"rank_{x}": s.rank if s else 0 for x, s in zip("ab", spec, strict=True)}
        modules.append({"path": path, **ranks, **_distances(sums)})
        layers[_layer_of(path)] = layers.get(_layer_of(path), 0) + sums

    for pack, spec, stored in zip(packs, specs, tensors, strict=True):
        incomparable |= dict.fromkeys(replaced_of(pack.manifest), "is stored in full")
        factors = {name for path in spec for name in spec[path].shapes}
        for name in sorted(set(stored) - factors - set(incomparable)):
            incomparable[name] = "is not a factor of a LoRA"

    if not modules:
        path, reason = next(iter(incomparable.items()))
        raise PackError(
            f"{packs[0].name} and {packs[1].name}: no projection can be compared: {path}: "
            f"{reason}.",
            "mismatch",
        )

    shared = _shared(*packs)
    return {
        "a": _facts(packs[0]),
        "b": _facts(packs[1]),
        "same_base": shared["base"]["same"] and shared["quantization"]["same"],
        "shared": shared,
        "total": _distances(sum(layers.values())),
        "layers": [{"layer": name, **_distances(sums)} for name, sums in layers.items()],
        "modules": modules,
        "only_in_a": [path for path in specs[0] if path not in specs[1]],
        "only_in_b": [path for path in specs[1] if path not in specs[0]],
        "not_comparable": incomparable,
    }


def _factors(spec: ModuleSpec, tensors: Mapping[str, mx.array] | None) -> Factors:
    """Both factors in float64, the scale of each slice in the first; of rank 0 without tensors."""
    if tensors is None:
        experts = spec.experts or 1
        return np.zeros((experts, spec.in_features, 0)), np.zeros((experts, 0, spec.out_features))

    stored = {name: tensors[name].shape for name in spec.shapes if name in tensors}
    check_shapes(spec.shapes, stored, spec.path)
    a, b = (np.asarray(x.astype(mx.float32), np.float64) for x in read_factors(spec, tensors))
    if spec.experts is None:
        a = a[None]
        b = b[None]
    scale = np.concatenate([np.full(s.rank, s.scale) for s in spec.slices])
    return a * scale, b


def _compare(a: Factors, b: Factors) -> Sums:
    """Norms and product of two deltas."""
    sums = np.zeros(4)
    for expert in range(len(a[0])):
        (a_in, a_out), (b_in, b_out) = ((f[expert] for f in pack) for pack in (a, b))
        r = a_in.shape[1]

        left = np.linalg.qr(np.concatenate([a_in, b_in], axis=1), mode="r")  # [k, ra + rb]
        right = np.linalg.qr(np.concatenate([a_out, b_out], axis=0).T, mode="r")  # [l, ra + rb]
        of_a = left[:, :r] @ right[:, :r].T  # [k, l]
        of_b = left[:, r:] @ right[:, r:].T
        sums += [np.sum(x) for x in (of_a**2, of_b**2, (of_a - of_b) ** 2, of_a * of_b)]
    return sums


def _distances(sums: Sums) -> dict:
    """Frobenius norms, ``relative`` to A's; ``cosine`` is None if a delta is zero."""
    norm_a, norm_b, distance = np.sqrt(sums[:3]).tolist()
    relative = cosine = None
    if norm_a:
        relative = distance / norm_a
    if norm_a * norm_b:
        cosine = float(np.clip(sums[3] / (norm_a * norm_b), -1, 1))

    return {
        "norm_a": norm_a,
        "norm_b": norm_b,
        "distance": distance,
        "relative": relative,
        "cosine": cosine,
    }


def _unlike(a: ModuleSpec | None, b: ModuleSpec | None) -> str | None:
    """Why two adapters of one path cannot be compared; None if they can."""
    kinds = [spec.kind for spec in (a, b) if spec]
    if "dora" in kinds or len(set(kinds)) > 1:
        places = [f"{spec.kind} in {of}" for spec, of in ((a, "A"), (b, "B")) if spec]
        reason = ", ".join(places)
        if "dora" in kinds:
            reason += ": its delta is of the base too"
        return reason

    if a is None or b is None or a.size == b.size:
        return None
    return f"{a.size} in A, {b.size} in B"


def _layer_of(path: str) -> str:
    """The path through the number of its block, or all of it."""
    match = re.match(r"(.*?\.\d+)\.", path)
    return match[1] if match else path


def _facts(pack: Pack) -> dict:
    base = pack.manifest["base"]
    return {
        "pack": pack.name,
        "base": base["id"],
        "fingerprint": base["fingerprint"],
        "ranks": ranks_of(pack.specs),
        "parameters": pack.manifest["adapters"]["parameters"],
    }


def _shared(a: Pack, b: Pack) -> dict[str, dict]:
    """Only settings that differ are in ``recipe``."""
    packs = (a, b)
    bases = [pack.manifest["base"] for pack in packs]
    recipes = [pack._part("recipe") for pack in packs]

    keys = [k for k in {**recipes[0], **recipes[1]} if recipes[0].get(k) != recipes[1].get(k)]

    values = {
        "base": [base["fingerprint"] for base in bases],
        "quantization": [quantization_name(base["quantization"]) for base in bases],
        "targets": [leaf_names(pack.specs) for pack in packs],
        "data": [pack._part("data").get("fingerprint") for pack in packs],
        "objective": [pack._part("objective") for pack in packs],
        "recipe": [{k: recipe.get(k) for k in keys} for recipe in recipes],
        "versions": [pack._part("versions") for pack in packs],
        "adapters": [pack._adapters_hash for pack in packs],
    }

    facts = {key: {"same": x == y, "a": x, "b": y} for key, (x, y) in values.items()}
    if a._adapters_hash is None:  # neither of two sums is on disk
        facts["adapters"]["same"] = a._identity == b._identity
    return facts


def lines(report: dict) -> list[str]:
    """The report of `diff` as a table of 50 columns."""
    table = []
    for name, facts in (("A", report["a"]), ("B", report["b"])):
        ranks = ", ".join(map(str, facts["ranks"])) or "0"
        table.append(f"{name:<7} {facts['pack']} · {facts['base']} · rank {ranks}")

    for key, fact in report["shared"].items():
        table += _fact_lines(key, fact)

    if not report["same_base"]:
        table.append("note    other bases: distances are only of the deltas")
    if report["shared"]["adapters"]["same"]:  # to the byte
        return table

    table += ["", f"{'layer':<13}{'|A|':>8}{'|B|':>8}{'|A-B|':>8}{'rel':>6}{'cos':>6}"]
    for layer in report["layers"]:  # the last part of a path with the number of its block
        table.append(_row(".".join(layer["layer"].rsplit(".", 2)[-2:])[:12], layer))
    if len(report["layers"]) > 1:
        table.append(_row("all", report["total"]))

    for name, key in (("A", "only_in_a"), ("B", "only_in_b")):
        if paths := report[key]:
            table.append(f"only {name}  {len(paths)} projections: {', '.join(leaf_names(paths))}")

    if reasons := report["not_comparable"]:
        table += [f"unlike  {path}: {reason}" for path, reason in list(reasons.items())[:3]]
        table.append(f"unlike  {len(reasons)} in all, which are in no figure above")
    return table


def _fact_lines(key: str, fact: dict) -> list[str]:
    label = {"quantization": "quant", "objective": "loss"}.get(key, key)
    if fact["same"]:
        answer = "none recorded" if not fact["a"] and key != "recipe" else "same"
        return [f"{label:<9} {answer}"]

    of_a = fact["a"]
    of_b = fact["b"]
    if isinstance(of_a, dict) and isinstance(of_b, dict):
        parts = [
            f"{k} {_text(of_a.get(k))} | {_text(of_b.get(k))}"
            for k in {**of_a, **of_b}
            if of_a.get(k) != of_b.get(k)
        ]
        return [f"{label:<9} {part}" for part in parts]
    return [f"{label:<9} {_text(of_a)} | {_text(of_b)}"]


def _text(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:12]
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _row(name: str, difference: dict) -> str:
    line = f"{name:<13}"
    for key in ("norm_a", "norm_b", "distance"):
        line += f"{difference[key]:>8.3g}"
    for key in ("relative", "cosine"):
        value = difference[key]
        line += "     -" if value is None else f"{value:>6.2f}"
    return line
