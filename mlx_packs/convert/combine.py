"""Several packs of one base into one: linear, SVD, TIES, DARE; measured before it is kept.

What is combined are deltas D_i = scale * (A B)^T of whole modules, never A and B apart. A linear
sum of low-rank deltas is low-rank itself and kept exactly; what the other methods make is not, and
becomes the nearest pack of the rank that is asked for (Eckart and Young, by SVD).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..adapters.spec import ModuleSpec, SliceSpec, Specs
from ..adapters.tensors import delta_of
from ..bases import files as base_files
from ..bases.model import BaseModel
from ..config.schema import DataConfig
from ..display import QUIET, Display
from ..errors import PackError
from ..evaluation.rows import columns_of
from ..files import sha256
from ..nn.lora import adapter_key
from ..packs.base import load_base_for
from ..packs.manifest import ADAPTERS, is_of_encoder
from ..packs.pack import Pack, check_output, grouped, manifest_of, modules_json, versions_line
from ..packs.weighted_sum import check_addable, check_distinct, weighted_sum
from ..runtime import mx
from .fidelity import (
    ROWS,
    Drift,
    drift_batches,
    fastest_path,
    measure,
    put_base,
    put_modules,
    put_pack,
)
from .merge import Change, check_max_drift, dense_weight, modules_of

METHODS = ("linear", "svd", "ties", "dare")
_EXACT_SVD = 512  # of the smaller side; above it the range is found by random projections
_OVERSAMPLED, _ITERATIONS = 16, 4

Weighted = list[tuple[mx.array, float]]  # deltas of one module with the weights of their packs


def linear(deltas: Weighted, *_) -> mx.array:
    """sum_i w_i D_i"""
    return sum(weight * delta for delta, weight in deltas)


def ties(deltas: Weighted, density: float, *_) -> mx.array:
    """Trim, elect signs, merge what agrees.

    Semantics: T_i = D_i where |D_i| is among the largest share ``density``, else 0;
        s = sign(sum_i w_i T_i); mean of the T_i of sign s, weighted by w_i, and 0 where none is

    TIES-Merging: https://arxiv.org/abs/2306.01708
    """
    trimmed = [(_trimmed(delta, density), weight) for delta, weight in deltas]
    elected = mx.sign(sum(weight * t for t, weight in trimmed))
    total, weights = mx.zeros(elected.shape), mx.zeros(elected.shape)
    for t, weight in trimmed:
        agrees = mx.logical_and(mx.sign(weight * t) == elected, elected != 0)
        total = total + mx.where(agrees, weight * t, 0)
        weights = weights + mx.where(agrees, abs(weight), 0)
    return mx.where(weights > 0, total / mx.maximum(weights, 1e-30), 0)


def _trimmed(delta: mx.array, density: float) -> mx.array:
    size = np.abs(np.array(delta)).ravel()
    kept = max(1, round(density * size.size))
    threshold = float(np.partition(size, size.size - kept)[size.size - kept])
    return mx.where(mx.abs(delta) >= threshold, delta, 0)


def dare(deltas: Weighted, density: float, keys: Sequence[mx.array]) -> mx.array:
    """sum_i w_i M_i D_i / density, M_i of independent zeros and ones, the share ``density`` ones.

    DARE: https://arxiv.org/abs/2311.03099
    """
    return sum(
        weight * mx.where(mx.random.bernoulli(density, delta.shape, key=key), delta / density, 0)
        for (delta, weight), key in zip(deltas, keys, strict=True)
    )


_METHODS: dict[str, Callable[..., mx.array]] = {
    "linear": linear,
    "svd": linear,
    "ties": ties,
    "dare": dare,
}


def combine_packs(
    packs: Sequence[tuple[str | Path | Pack, float]],
    out: str | Path,
    method: str = "linear",
    rank: int | None = None,
    density: float | None = None,
    seed: int = 0,
    model: str | Path = "tiny",
    max_drift: float | None = None,
    data: str | Path = "tiny",
    rows: int = ROWS,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    columns: DataConfig | None = None,
    display: Display | None = None,
) -> dict:
    """Make one pack of several, if it computes what the method makes of them.

    Args:
        packs: at least two with their weights.
        method: ``linear`` keeps all ranks; ``svd``, ``ties`` and ``dare`` come down to ``rank``.
        density: share of each delta that ``ties`` and ``dare`` keep; 0.5.
        max_drift: largest mean KL, nats a token, of the deltas as the method makes them from the
            pack of this rank; None as in `merge_pack`.
    Returns: what `packs combine --json` prints. With ``passed`` false nothing is written, and
        ``passes`` names the smallest doubling of the rank that would pass.
    Raises: PackError if the packs are not of one base, or not of kinds that add up.
    """
    display = display or Display(QUIET)
    _check_request(packs, method, rank, density, max_drift)
    density = 0.5 if density is None else density
    out = Path(out).expanduser()
    check_output(out, overwrite)
    opened = [(p if isinstance(p, Pack) else Pack.open(p), weight) for p, weight in packs]
    check_distinct([pack for pack, _ in opened])
    check_addable([pack for pack, _ in opened])
    first = opened[0][0]
    if is_of_encoder(first.manifest):
        raise PackError(
            f"combine: {first.name} is of an encoder, and what is measured here is the next token; "
            "packs eval --pack A=0.7 --pack B=0.3 adds such packs up."
        )
    base = load_base_for(first, model, trust_remote_code)
    deltas = _deltas(opened, method, density, seed)
    facts = {
        "method": method,
        **({"rank": rank} if rank else {}),
        **({"density": density, "seed": seed} if method in ("ties", "dare") else {}),
        "packs": [
            {
                "name": p.short_name if p.path else None,
                "weight": w,
                "sha256": sha256(p.path / ADAPTERS) if p.path else None,
            }
            for p, w in opened
        ],
    }

    def pack_of(rank: int | None) -> Pack:
        if rank is None:
            summed = weighted_sum(opened)
            specs, tensors = summed.specs, summed.load_tensors()
        else:
            specs, tensors = _factors(opened, deltas, rank)
        return _as_pack(base, first, specs, tensors, {**facts, **({"rank": rank} if rank else {})})

    made = pack_of(rank)
    batches = drift_batches(base, first, columns or columns_of(first, data), rows=rows)
    path = fastest_path(base, batches)
    plain = put_base(base, path)
    dense = put_modules(base, _with_deltas(base, deltas))

    def drift_of(pack: Pack) -> Drift:
        with display.task("drift", len(batches), "batches") as bar:
            attached = put_pack(pack, base, path)
            return measure(base, dense, attached, plain, batches, bar.advance)

    found = drift_of(made)
    limit = found.limit(max_drift)
    tried, passes = {str(rank or "all"): found.kl_mean}, rank or "all"
    if not (passed := found.kl_mean <= limit):
        passes, largest = None, max(min(d.shape[-2:]) for d in deltas.values())
        more = rank
        while passes is None and more and more < largest:
            more = min(2 * more, largest)
            tried[str(more)] = drift_of(pack_of(more)).kl_mean
            passes = more if tried[str(more)] <= limit else None
    if passed:
        made.save(out, overwrite)
    return {
        "out": str(out),
        "model": base_files.public_name(str(model)),
        **facts,
        **found.to_json(),
        "max_drift": limit,
        "passed": passed,
        "passes": passes,
        "tried": tried,
        **({"pack_mb": round(made.size_mb, 3)} if passed else {}),
    }


def _check_request(packs, method, rank, density, max_drift) -> None:
    """Raises: PackError in the words of the command line."""
    if method not in METHODS:
        raise PackError(f"--method {method}: must be one of {', '.join(METHODS)}.")
    if len(packs) < 2:
        raise PackError("combine takes two packs or more, each as PACK=WEIGHT.")
    if bad := [w for _, w in packs if not math.isfinite(w) or w == 0]:
        raise PackError(f"weights must be numbers other than 0, but one is {bad[0]}.")
    if method == "linear" and rank is not None:
        raise PackError("--rank: not with --method linear, which keeps all ranks; say svd.")
    if method != "linear" and (rank is None or rank < 1):
        raise PackError(f"--method {method}: needs --rank R of 1 or more.")
    if density is not None and method not in ("ties", "dare"):
        raise PackError(f"--density: not with --method {method}.")
    if density is not None and not 0 < density <= 1:
        raise PackError(f"--density must be above 0 and at most 1, but is {density}.")
    check_max_drift(max_drift)


def _deltas(opened, method: str, density: float, seed: int) -> dict[str, mx.array]:
    """What the method makes of each module's deltas, [out, in] or [E, out, in], lazily."""
    found: dict[str, Weighted] = {}
    keys: dict[str, list[mx.array]] = {}
    for i, (pack, weight) in enumerate(opened):
        for path, spec in pack.specs.items():
            delta = delta_of(spec, pack.load_tensors())
            found.setdefault(path, []).append((delta, weight))
            keys.setdefault(path, []).append(adapter_key(seed, f"{i} {path}"))
    make = _METHODS[method]
    return {path: make(deltas, density, keys[path]) for path, deltas in found.items()}


def _factors(opened, deltas: dict[str, mx.array], rank: int) -> tuple[Specs, dict]:
    """Adapters of scale 1 of this rank."""
    specs, tensors = {}, {}
    for path, delta in deltas.items():
        spec = next(p.specs[path] for p, _ in opened if path in p.specs)
        a, b = _nearest(np.array(delta), min(rank, *delta.shape[-2:]))
        width, found = sum(spec.widths), a.shape[1]
        part = SliceSpec(path.rpartition(".")[2], width, found, float(found))
        specs[path] = ModuleSpec(path, spec.in_features, (part,), spec.experts)
        tensors |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
    return specs, tensors


def _nearest(delta: np.ndarray, rank: int) -> tuple[mx.array, mx.array]:
    """Factors as on disk of the nearest matrix of a rank, to one [O, D] or to each of a stack."""
    if delta.ndim == 3:
        pairs = [_nearest(part, rank) for part in delta]
        a, b = (mx.stack([pair[i].T for pair in pairs]) for i in (0, 1))
        return a, b
    u, s, vt = _svd(delta, rank)
    root = np.sqrt(s)
    a, b = (vt.T * root).astype(np.float32), (root[:, None] * u.T).astype(np.float32)
    return mx.array(a), mx.array(b)


def _svd(delta: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The leading singular triplets; of large matrices inside a random range, the same each time.

    Halko, Martinsson, Tropp: https://arxiv.org/abs/0909.4061
    """
    if min(delta.shape) <= max(_EXACT_SVD, rank + _OVERSAMPLED):
        u, s, vt = np.linalg.svd(delta, full_matrices=False)
        return u[:, :rank], s[:rank], vt[:rank]
    random = np.random.default_rng(0)
    guess = random.standard_normal((delta.shape[1], rank + _OVERSAMPLED)).astype(delta.dtype)
    span, _ = np.linalg.qr(delta @ guess)
    for _ in range(_ITERATIONS):
        back, _ = np.linalg.qr(delta.T @ span)
        span, _ = np.linalg.qr(delta @ back)
    u, s, vt = np.linalg.svd(span.T @ delta, full_matrices=False)
    return (span @ u)[:, :rank], s[:rank], vt[:rank]


def _as_pack(base: BaseModel, first: Pack, specs: Specs, tensors: dict, facts: dict) -> Pack:
    adapters = {
        "parameters": sum(t.size for t in tensors.values()),
        "groups": [],
        "modules": modules_json(base, specs),
    }
    kept = {key: first.manifest[key] for key in ("recipe", "objective") if key in first.manifest}
    manifest = manifest_of(base, adapters, **kept, combined=facts, versions=versions_line())
    return grouped(Pack(manifest, tensors), base)


def _with_deltas(base: BaseModel, deltas: dict[str, mx.array]):
    modules = dict(base.model.named_modules())
    changes = [
        Change(path, dense_weight(modules[path]).astype(mx.float32) + delta, None)
        for path, delta in deltas.items()
    ]
    return modules_of(base, changes)
