"""Several packs of one base into one: linear, SVD, TIES, DARE; compared before it is written.

The combined values are deltas D_i = scale * (A B)^T of whole modules. A linear sum of low-rank
deltas is low-rank itself: it is kept exactly, or reduced from its factors. What TIES and DARE make
is not, and becomes the nearest pack of the requested rank (Eckart and Young, by SVD).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from ..adapters.decomposition import Factors, factors_of_rank, principal_factors
from ..adapters.lora import delta_of, name_factors, read_factors
from ..adapters.spec import SliceSpec, Specs
from ..bases import files as base_files
from ..bases.supported import check_architecture
from ..config.arguments import checked_arguments
from ..config.data import Columns
from ..data.in_memory import Data
from ..display import Display, display_of
from ..errors import PackError
from ..evaluation.rows import comparison_data
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import adapter_key
from ..packs.base import Base, check_no_pack
from ..packs.compatibility import agreed_records, check_base
from ..packs.folder import check_output
from ..packs.making import untrained_pack
from ..packs.manifest import pack_facts
from ..packs.pack import Pack
from ..packs.weighted_sum import check_addable, check_distinct, weighted_sum
from ..runtime import mx
from .external import check_choice
from .fidelity import (
    ROWS,
    FidelityMeter,
    Modules,
    Variant,
    check_max_drift,
    drift_limit,
    first_that_passes,
    load_for_comparison,
    modules_on_call,
)

Weighted = list[tuple[mx.array, float]]  # deltas of one module with the weights of their packs
Packs = Sequence[tuple[Pack, float]]
# by module; made again for each use, since all of them would be as large as a dense base
Deltas = Mapping[str, Callable[[], mx.array]]


def linear(deltas: Weighted, *_) -> mx.array:
    """Return sum_i w_i D_i."""
    return sum(weight * delta for delta, weight in deltas)


def ties(
    deltas: Weighted,
    density: float,
    keys: Sequence[mx.array] = (),
    thresholds: list[float] | None = None,
) -> mx.array:
    """Trim, elect signs, and merge what agrees.

    Semantics: T_i = D_i where |D_i| is among the largest share ``density``, else 0;
        s = sign(sum_i w_i T_i); mean of the T_i of sign s, weighted by w_i, and 0 where none is

    ``thresholds`` of |D_i|: an empty list is filled, so that a later call need not find them.

    TIES-Merging: https://arxiv.org/abs/2306.01708
    """
    thresholds = thresholds if thresholds is not None else []
    if not thresholds:
        thresholds += [_threshold(delta, density) for delta, _ in deltas]
    trimmed = [
        (mx.where(mx.abs(delta) >= threshold, delta, 0), weight)
        for (delta, weight), threshold in zip(deltas, thresholds, strict=True)
    ]
    elected = mx.sign(sum(weight * t for t, weight in trimmed))

    total = mx.zeros(elected.shape)
    weights = mx.zeros(elected.shape)
    for t, weight in trimmed:
        agrees = mx.logical_and(mx.sign(weight * t) == elected, elected != 0)
        total = total + mx.where(agrees, weight * t, 0)
        weights = weights + mx.where(agrees, abs(weight), 0)

    return mx.where(weights > 0, total / mx.maximum(weights, 1e-30), 0)


def _threshold(delta: mx.array, density: float) -> float:
    size = np.abs(np.array(delta)).ravel()
    count = max(1, round(density * size.size))
    return float(np.partition(size, size.size - count)[size.size - count])


def dare(deltas: Weighted, density: float, keys: Sequence[mx.array], *_) -> mx.array:
    """Return sum_i w_i M_i D_i / density, with M_i random zeros and ones, a share ``density`` ones.

    DARE: https://arxiv.org/abs/2311.03099
    """
    return sum(
        weight * mx.where(mx.random.bernoulli(density, delta.shape, key=key), delta / density, 0)
        for (delta, weight), key in zip(deltas, keys, strict=True)
    )


METHODS: dict[str, Callable[..., mx.array]] = {
    "linear": linear,
    "svd": linear,
    "ties": ties,
    "dare": dare,
}


@checked_arguments
def combine_packs(  # noqa: PLR0913 - a public facade
    packs: Sequence[tuple[str | Path | Pack, float]],
    out: str | Path,
    method: str = "linear",
    rank: int | None = None,
    density: float | None = None,
    seed: int = 0,
    base: Base | str | Path | None = None,
    max_drift: float | None = None,
    data: Data | None = None,
    rows: int = ROWS,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    columns: Columns | None = None,
    progress: bool | Display = True,
) -> dict:
    """Combine several packs into one, and write it if it matches the deltas of the method.

    TIES: https://arxiv.org/abs/2306.01708. DARE: https://arxiv.org/abs/2311.03099.

    Args:
        packs: At least two pairs of a pack, or its folder, and its weight.
        out: Folder to write the pack to.
        method: ``"linear"`` adds the deltas and keeps all ranks; ``"svd"``, ``"ties"`` and
            ``"dare"`` reduce the result to ``rank``.
        rank: Rank of the result.
        density: Share of each delta that ``"ties"`` and ``"dare"`` keep; 0.5 by default.
        seed: Random seed of the weights that ``"dare"`` drops.
        base: Their base model, loaded or by its name; None is the one that the first names.
        max_drift: Maximum mean KL divergence of the pack from the deltas at full rank, in nats per
            token; None is as in `merge_pack`.
        data: Examples to compare on; None is the data of the first pack whose data is here.
        rows: Maximum number of these examples.
        overwrite: Whether to replace a pack at ``out``.
        trust_remote_code: Whether to allow executing Python code shipped with the base model.
        columns: Names of the columns of ``data``.
        progress: Whether to show the progress, as in `train_pack`.

    Returns:
        The output of `packs combine --json`. If ``passed`` is false, nothing was written, and
        ``passes`` is the first of the doubled ranks that would pass.

    Raises:
        PackError: If the packs have different base models, or their kinds cannot be added up.
    """
    check_max_drift(max_drift)
    _check_settings([weight for _, weight in packs], method, rank, density)
    check_output(out := Path(out).expanduser(), overwrite)
    opened = _open(packs)

    loaded = load_for_comparison(opened[0][0], base, trust_remote_code)
    combination = _Combination(loaded, opened, method, rank, density or 0.5, seed)
    combined = combination.pack(rank)
    data = "tiny" if data is None and pack_facts(combined.manifest).described else data
    chosen, compared_on = comparison_data(combined, [pack for pack, _ in opened], data)
    meter = FidelityMeter(loaded, combined, columns or chosen, rows, display_of(progress))
    dense = meter.with_modules(combination.modules())
    fidelity = meter.compare(dense, meter.with_pack(combined))

    limit = drift_limit(max_drift, fidelity.kl_of_pack)
    setting = str(rank or "all")
    kl_of = partial(combination.kl_of, meter, dense)
    others = {str(more): partial(kl_of, more) for more in combination.doublings(rank)}
    tried, passes = first_that_passes(setting, fidelity.kl_mean, limit, others)

    report = {
        "out": str(out),
        "model": base_files.public_name(loaded.name),
        **combination.facts,
        **asdict(fidelity),
        "max_drift": limit,
        "passed": passes == setting,
        "passes": int(passes) if passes and passes != "all" else passes,
        "tried": tried,
        "compared_on": compared_on,
    }
    if report["passed"]:
        combined.save(out, overwrite)
        report["pack_mb"] = round(combined.size_mb, 3)
    return report


class _Combination:
    """Packs of one base, their deltas combined by a method, and facts for a manifest."""

    def __init__(
        self,
        base: Base,
        packs: Packs,
        method: str,
        rank: int | None,
        density: float,
        seed: int,
    ) -> None:
        check_no_pack(base)
        check_base(packs[0][0], base)
        self.base = base
        self.packs = packs
        self.method = method
        self.deltas = _deltas(packs, method, density, seed)

        self.facts: dict = {"method": method}
        if rank:
            self.facts["rank"] = rank
        if METHODS[method] is not linear:
            self.facts |= {"density": density, "seed": seed}
        self.facts["packs"] = [
            {
                "name": pack.short_name if pack.path else None,
                "weight": weight,
                "sha256": pack._adapters_hash,
            }
            for pack, weight in packs
        ]

    def pack(self, rank: int | None) -> Pack:
        """Return the pack of a rank; None keeps all ranks."""
        facts = self.facts
        if rank is None:
            total = weighted_sum(self.packs)
            specs = total.specs
            tensors = total.load_tensors()
        else:
            facts = {**facts, "rank": rank}
            specs, tensors = self._low_rank(rank)

        parts = agreed_records([pack for pack, _ in self.packs])
        return untrained_pack(self.base, specs, tensors, **parts, combined=facts)

    def _low_rank(self, rank: int) -> tuple[Specs, dict[str, mx.array]]:
        """Return adapters of scale 1 of this rank.

        A sum has factors already, whose delta need not be made.
        """
        total = weighted_sum(self.packs) if METHODS[self.method] is linear else None
        factors = total.load_tensors() if total else {}
        specs = {}
        tensors = {}
        for path, make_delta in self.deltas.items():
            spec = next(p.specs[path] for p, _ in self.packs if path in p.specs)
            if total:
                pair = read_factors(total.specs[path], factors)
                a, b = _of_rank(factors_of_rank, *pair, rank=rank)
            else:
                a, b = _of_rank(partial(principal_factors, scale=1.0), make_delta(), rank=rank)

            name, r = path.rpartition(".")[2], a.shape[-1]
            part = SliceSpec(name, spec.out_features, r, float(r))
            specs[path] = replace(spec, slices=(part,))
            tensors |= name_factors(specs[path], a, b)
        return specs, tensors

    def modules(self) -> Modules:
        modules = dict(self.base.model.named_modules())

        def weight_of(path: str) -> mx.array:
            return frozen_weight(modules[path]).dense().astype(mx.float32) + self.deltas[path]()

        return modules_on_call(self.base, dict.fromkeys(self.deltas), weight_of)

    def kl_of(self, meter: FidelityMeter, dense: Variant, rank: int) -> float:
        """Return the distance of the pack of a rank from the dense modules, in nats per token."""
        return meter.compare(dense, meter.with_pack(self.pack(rank))).kl_mean

    def doublings(self, rank: int | None) -> list[int]:
        """Return the ranks to try after one: its doublings, up to the largest that there is."""
        largest = max(min(delta().shape[-2:]) for delta in self.deltas.values())
        ranks = []
        while rank and rank < largest:
            rank = min(2 * rank, largest)
            ranks.append(rank)
        return ranks


def _open(packs: Sequence[tuple[str | Path | Pack, float]]) -> Packs:
    opened = [(p if isinstance(p, Pack) else Pack.open(p), weight) for p, weight in packs]
    check_distinct([pack for pack, _ in opened])
    base = opened[0][0].manifest["base"]
    check_architecture("combine", "decoder", base["id"], base["model_type"])
    check_addable([pack for pack, _ in opened])
    return opened


def _check_settings(
    weights: Sequence[float], method: str, rank: int | None, density: float | None
) -> None:
    check_choice("method", method, METHODS)
    if len(weights) < 2:
        raise PackError(
            "combine takes two packs or more, each as PACK=WEIGHT.", flag="weighted_packs"
        )

    if method == "linear" and rank is not None:
        raise PackError(
            "--rank: not with --method linear, which keeps all ranks. Pass --method svd.",
            "conflict",
        )
    if method != "linear" and (rank is None or rank < 1):
        raise PackError(f"--method {method}: needs --rank R of 1 or more.", "conflict", "rank")

    if density is not None and METHODS[method] is linear:
        raise PackError(f"--density: not with --method {method}.", "conflict")
    if density is not None and not 0 < density <= 1:
        raise PackError(f"--density must be above 0 and at most 1, but is {density}.")

    if bad := [weight for weight in weights if not math.isfinite(weight) or weight == 0]:
        raise PackError(
            f"weights must be numbers other than 0, but one is {bad[0]}.", flag="weighted_packs"
        )


def _deltas(opened: Packs, method: str, density: float, seed: int) -> Deltas:
    """Return what makes the method's result for each module, [out, in] or [E, out, in], lazily."""

    def combined(path: str, thresholds: list[float]) -> mx.array:
        deltas = []
        keys = []
        for i, (pack, weight) in enumerate(opened):
            if spec := pack.specs.get(path):
                deltas.append((delta_of(spec, pack.load_tensors()), weight))
                keys.append(adapter_key(seed, f"{i} {path}"))
        return METHODS[method](deltas, density, keys, thresholds)

    paths = dict.fromkeys(path for pack, _ in opened for path in pack.specs)
    return {path: partial(combined, path, []) for path in paths}


def _of_rank(nearest: Callable[..., Factors], *arrays: mx.array, rank: int) -> Factors:
    """Return the nearest factors A [in, r] and B [r, out]; of stacks [E, …] those of each part."""
    if arrays[0].ndim == 2:
        a, b = nearest(*arrays, rank)
    else:
        pairs = [nearest(*parts, rank) for parts in zip(*arrays, strict=True)]
        a, b = (mx.stack(factors) for factors in zip(*pairs, strict=True))
    mx.eval(a, b)
    return a, b
