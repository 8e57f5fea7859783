"""How far two packs lie apart: what they share, and the distance of their deltas layer by layer.

A delta is scale * A @ B, [in, out]. With orthogonal bases Q of both packs' A, side by side, and P
of their B, a delta is Q @ core @ P.T with a core as small as the ranks together; norms, products
and singular vectors are those of the cores, and nothing as large as a weight is made.

Subspace similarity (phi of equation 4): LoRA, section 7.2, https://arxiv.org/abs/2106.09685
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..adapters.spec import ModuleSpec, factor_names
from ..bases.files import quantization_name
from ..errors import PackError
from ..runtime import mx
from .manifest import replaced_of
from .pack import Pack

Factors = tuple[np.ndarray, np.ndarray]  # [E, in, r] with the scale in it, [E, r, out]; E experts


@dataclass(frozen=True)
class _Apart:
    """Squared norms of two deltas and of their difference, and their product; these add up."""

    a: float = 0.0
    b: float = 0.0
    difference: float = 0.0
    product: float = 0.0

    def __add__(self, other: "_Apart") -> "_Apart":
        return _Apart(
            self.a + other.a,
            self.b + other.b,
            self.difference + other.difference,
            self.product + other.product,
        )

    def to_json(self) -> dict:
        """Frobenius norms; ``relative`` to that of A, ``cosine`` None where a delta is zero."""
        norm_a, norm_b, distance = (math.sqrt(v) for v in (self.a, self.b, self.difference))
        both = norm_a * norm_b
        return {
            "norm_a": norm_a,
            "norm_b": norm_b,
            "distance": distance,
            "relative": distance / norm_a if norm_a else None,
            "cosine": max(-1.0, min(1.0, self.product / both)) if both else None,
        }


def diff(a: str | Path | Pack, b: str | Path | Pack) -> dict:
    """Compare two packs: what they share, and how far their deltas lie apart. Loads no base.

    Ranks and targets may differ; a projection that only one adapts counts with its whole delta.
    ``overlap_in`` and ``overlap_out`` are phi of the LoRA paper for the directions that the deltas
    read and write, at both packs' full ranks: 1 where the smaller subspace lies in the larger one,
    ``chance`` (input, output) for random ones.

    Returns: ``a``, ``b``, ``shared`` (same, a, b of each fact), ``same_base``, ``total``,
        ``layers``, ``modules``, ``only_in_a``, ``only_in_b``, ``not_comparable``.
    Raises: PackError if a pack is damaged or cannot be read.
    """
    packs = [p if isinstance(p, Pack) else Pack.open(p) for p in (a, b)]
    specs = [pack.specs for pack in packs]
    tensors = [pack.load_tensors() for pack in packs]
    modules, sums, refused = [], {}, {}
    for path in sorted({*specs[0], *specs[1]}, key=_reading_order):
        spec = [s.get(path) for s in specs]
        if reason := _unlike(*spec):
            refused[path] = reason
            continue
        factors = [_factors(s, t) if s else None for s, t in zip(spec, tensors, strict=True)]
        apart, overlap = _compare(*factors)
        sums.setdefault(_layer(path), []).append(apart)
        ranks = {"rank_a": spec[0].rank if spec[0] else 0, "rank_b": spec[1].rank if spec[1] else 0}
        modules.append({"path": path, **ranks, **apart.to_json(), **overlap})
    for pack, spec, found in zip(packs, specs, tensors, strict=True):
        refused |= dict.fromkeys(replaced_of(pack.manifest), "is brought whole")
        parts = {name for path in spec for name in spec[path].shapes}
        for name in sorted(set(found) - parts - set(refused)):
            refused[name] = "is no factor of a LoRA"
    if not modules:
        path, reason = next(iter(refused.items()))
        raise PackError(
            f"{packs[0].name} and {packs[1].name}: no projection of one fits: {path}: {reason}."
        )
    layers = {name: sum(parts, _Apart()) for name, parts in sums.items()}
    shared = _shared(*packs)
    return {
        "a": _facts(packs[0]),
        "b": _facts(packs[1]),
        "same_base": shared["base"]["same"] and shared["quantization"]["same"],
        "shared": shared,
        "total": sum(layers.values(), _Apart()).to_json() | _mean_overlap(modules),
        "layers": [
            {
                "layer": name,
                **apart.to_json(),
                **_mean_overlap(m for m in modules if _layer(m["path"]) == name),
            }
            for name, apart in layers.items()
        ],
        "modules": modules,
        "only_in_a": [path for path in specs[0] if path not in specs[1]],
        "only_in_b": [path for path in specs[1] if path not in specs[0]],
        "not_comparable": refused,
    }


def _factors(spec: ModuleSpec, tensors: Mapping[str, mx.array]) -> Factors:
    """Both factors in float64, the scale of each slice in the first."""
    arrays = []
    for name in factor_names(spec.path):
        if name not in tensors or tuple(tensors[name].shape) != spec.shapes[name]:
            has = tuple(tensors[name].shape) if name in tensors else "missing"
            raise PackError(f"{name}: is {has}, but the manifest says {spec.shapes[name]}.")
        arrays.append(np.asarray(tensors[name].astype(mx.float32)).astype(np.float64))
    a, b = arrays if spec.experts is not None else (array[None] for array in arrays)
    if spec.experts is not None:
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    scale = np.concatenate([np.full(s.rank, s.scale) for s in spec.slices])
    return a * scale, b


def _compare(a: Factors | None, b: Factors | None) -> tuple[_Apart, dict]:
    """Squared norms, product and subspace overlaps of two deltas; None is a delta of zero."""
    nothing = {"overlap_in": None, "overlap_out": None, "chance": None}
    if a is None or b is None:
        square = _squared_norm(*(a or b))
        alone = _Apart(a=square) if b is None else _Apart(b=square)
        return alone + _Apart(difference=square), nothing
    apart, overlaps = _Apart(), []
    for expert in range(len(a[0])):
        (a_in, a_out), (b_in, b_out) = ((f[expert] for f in pack) for pack in (a, b))
        r = a_in.shape[1]
        left = np.linalg.qr(np.concatenate([a_in, b_in], axis=1), mode="r")  # [k, ra + rb]
        right = np.linalg.qr(np.concatenate([a_out, b_out], axis=0).T, mode="r")  # [l, ra + rb]
        of_a, of_b = left[:, :r] @ right[:, :r].T, left[:, r:] @ right[:, r:].T  # [k, l]
        apart += _Apart(
            float(np.sum(of_a**2)),
            float(np.sum(of_b**2)),
            float(np.sum((of_a - of_b) ** 2)),
            float(np.sum(of_a * of_b)),
        )
        overlaps.append(_overlap(of_a, of_b, a_in.shape[0], a_out.shape[1]))
    measured = [o for o in overlaps if o is not None]
    if not measured:  # no delta, no directions
        return apart, nothing
    means = np.mean(measured, axis=0)
    return apart, {
        "overlap_in": float(means[0]),
        "overlap_out": float(means[1]),
        "chance": means[2:].tolist(),
    }


def _squared_norm(a: np.ndarray, b: np.ndarray) -> float:
    """||A @ B||^2 = sum(A'A * BB'), summed over experts."""
    return float(np.sum((a.swapaxes(-1, -2) @ a) * (b @ b.swapaxes(-1, -2))))


def _overlap(a: np.ndarray, b: np.ndarray, width: int, height: int) -> list[float] | None:
    """phi for inputs and outputs, and what random subspaces of these sizes would have."""
    (a_in, a_out), (b_in, b_out) = _directions(a), _directions(b)
    i, j = a_in.shape[1], b_in.shape[1]
    if not i or not j:
        return None
    phi = [float(np.sum((x.T @ y) ** 2)) / min(i, j) for x, y in ((a_in, b_in), (a_out, b_out))]
    return [*phi, max(i, j) / width, max(i, j) / height]


def _directions(core: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Left and right singular vectors of a core, those that its delta has."""
    u, s, vt = np.linalg.svd(core, full_matrices=False)
    kept = s > 1e-6 * s[0] if s[0] > 0 else np.zeros(len(s), bool)  # factors have 24 bits
    return u[:, kept], vt[kept].T


def _mean_overlap(modules: Iterable[dict]) -> dict:
    """Mean overlaps over the projections that both packs adapt."""
    both = [m for m in modules if m["overlap_in"] is not None]
    return {
        key: float(np.mean([m[key] for m in both])) if both else None
        for key in ("overlap_in", "overlap_out")
    }


def _unlike(a: ModuleSpec | None, b: ModuleSpec | None) -> str | None:
    """Why two adapters of one path cannot be compared; None if they can."""
    kinds = [spec.kind for spec in (a, b) if spec]
    if "dora" in kinds or len(set(kinds)) > 1:
        named = [f"{spec.kind} in {of}" for spec, of in ((a, "A"), (b, "B")) if spec]
        return ", ".join(named) + (": its delta is of the base too" if "dora" in kinds else "")
    if a is None or b is None:
        return None
    shapes = [(s.in_features, sum(s.widths), s.experts) for s in (a, b)]
    if shapes[0] == shapes[1]:
        return None
    shown = [f"{i} -> {o}" + (f" x {e} experts" if e else "") for i, o, e in shapes]
    return f"{shown[0]} in A, {shown[1]} in B"


def _layer(path: str) -> str:
    """The path through the number of its block, or all of it."""
    found = re.match(r"(.*?\.\d+)\.", path)
    return found[1] if found else path


def _reading_order(path: str) -> list:
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in path.split(".")
    ]


def _facts(pack: Pack) -> dict:
    base = pack.manifest["base"]
    ranks = sorted({s.rank for spec in pack.specs.values() for s in spec.slices if s.rank})
    return {
        "pack": pack.name,
        "base": base["id"],
        "fingerprint": base["fingerprint"],
        "ranks": ranks,
        "parameters": pack.manifest["adapters"]["parameters"],
    }


def _shared(a: Pack, b: Pack) -> dict[str, dict]:
    """Facts of both manifests side by side; of a recipe only what differs."""
    found = {}

    def hold(key: str, of_a, of_b) -> None:
        found[key] = {"same": of_a == of_b, "a": of_a, "b": of_b}

    bases = [pack.manifest["base"] for pack in (a, b)]
    hold("base", *(base["fingerprint"] for base in bases))
    hold("quantization", *(quantization_name(base["quantization"]) for base in bases))
    hold("targets", *(_targets(pack) for pack in (a, b)))
    hold("data", *(pack.part("data").get("fingerprint") for pack in (a, b)))
    hold("objective", *(pack.part("objective") for pack in (a, b)))
    recipes = [pack.part("recipe") for pack in (a, b)]
    keys = [k for k in {**recipes[0], **recipes[1]} if recipes[0].get(k) != recipes[1].get(k)]
    hold("recipe", *({k: recipe.get(k) for k in keys} for recipe in recipes))
    hold("versions", *(pack.part("versions") for pack in (a, b)))
    hold("adapters", *(pack.adapters_hash for pack in (a, b)))
    if found["adapters"]["a"] is None:  # neither of two sums lies on a disk
        found["adapters"]["same"] = a.identity == b.identity
    return found


def _targets(pack: Pack) -> list[str]:
    return sorted({path.rpartition(".")[2] for path in pack.specs})


def lines(report: dict) -> list[str]:
    """The report of `diff` as a table that fits 60 columns, the farthest projections below it."""
    shown = [_pack_line(name, report[key]) for name, key in (("A", "a"), ("B", "b"))]
    for key, fact in report["shared"].items():
        shown += _fact_lines(key, fact)
    if not report["same_base"]:
        shown.append("note    other bases: distances are of the deltas alone")
    if report["shared"]["adapters"]["same"]:  # to the byte
        return shown
    shown += ["", f"{'layer':<13}{'|A|':>8}{'|B|':>8}{'|A-B|':>8}{'rel':>6}{'cos':>6}   overlap"]
    shown += [_row(_block(layer["layer"]), layer) for layer in report["layers"]]
    if len(report["layers"]) > 1:
        shown.append(_row("all", report["total"]))
    shown.append("")
    for m in sorted(report["modules"], key=lambda m: -m["distance"])[:3]:
        shown.append(
            f"far     {m['path']}: |A-B| {_norm(m['distance'])}, rel "
            f"{_ratio(m['relative'])}, cos {_ratio(m['cosine'])}"
        )
    for name, key in (("A", "only_in_a"), ("B", "only_in_b")):
        if paths := report[key]:
            shown.append(f"only {name}  {len(paths)} projections: {_some(paths)}")
    if refused := report["not_comparable"]:
        shown += [f"unlike  {path}: {reason}" for path, reason in list(refused.items())[:3]]
        shown.append(f"unlike  {len(refused)} in all, which are in no figure above")
    if chances := [m["chance"] for m in report["modules"] if m["chance"]]:
        read, written = np.mean(chances, axis=0)
        shown.append(f"overlap of what is read/written: 1 same, {read:.2f}/{written:.2f} by chance")
    return shown


def _pack_line(name: str, facts: dict) -> str:
    ranks = ", ".join(map(str, facts["ranks"])) or "0"
    return f"{name:<7} {facts['pack']} · {facts['base']} · rank {ranks}"


def _fact_lines(key: str, fact: dict) -> list[str]:
    label = {"quantization": "quant", "objective": "loss"}.get(key, key)
    if fact["same"]:
        told = "none recorded" if not fact["a"] and key != "recipe" else "same"
        return [f"{label:<9} {told}"]
    of_a, of_b = fact["a"], fact["b"]
    if isinstance(of_a, dict) and isinstance(of_b, dict):
        parts = [
            f"{k} {_told(of_a.get(k))} | {_told(of_b.get(k))}"
            for k in {**of_a, **of_b}
            if of_a.get(k) != of_b.get(k)
        ]
        return [f"{label:<9} {part}" for part in parts]
    return [f"{label:<9} {_told(of_a)} | {_told(of_b)}"]


def _told(value) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:12]
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _row(name: str, apart: dict) -> str:
    norms = "".join(f"{_norm(apart[key]):>8}" for key in ("norm_a", "norm_b", "distance"))
    ratios = "".join(f"{_ratio(apart[key]):>6}" for key in ("relative", "cosine"))
    overlap = [apart["overlap_in"], apart["overlap_out"]]
    both = "-" if overlap[0] is None else "/".join(f"{v:.2f}" for v in overlap)
    return f"{name:<13}{norms}{ratios}{both:>10}"


def _norm(value: float) -> str:
    return f"{value:.3g}" if value == 0 or 1e-3 <= value < 1e4 else f"{value:.1e}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if abs(value) < 100 else ">99"


def _block(layer: str) -> str:
    """The last part of a block's path with its number, what fits."""
    name = ".".join(layer.rsplit(".", 2)[-2:])
    return name if len(name) < 13 else "…" + name[-11:]


def _some(paths: list[str]) -> str:
    names = sorted({path.rpartition(".")[2] for path in paths})
    return ", ".join(names)
