"""One table that is embedding and head, as PEFT stores it: once under each name, kept tied.

``ensure_weight_tying`` of its config lets PEFT train and merge both as one.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ..adapters.spec import ModuleSpec, SliceSpec, Specs, factor_names
from ..errors import PackError
from ..runtime import mx
from .external import ExternalAdapter, Tensors

HEAD = "lm_head"
TIED = "ensure_weight_tying"  # of PEFT's config


def with_head(specs: Specs, tensors: Mapping[str, mx.array]) -> tuple[Specs, Tensors]:
    """Return adapters with one for the head, which is that of its table transposed: A is Bᵀ."""
    tensors = dict(tensors)
    head = {}
    for path, spec in specs.items():
        if not spec.head:
            continue
        (part,) = spec.slices
        whole = SliceSpec(HEAD, spec.in_features, part.rank, part.alpha)
        head[HEAD] = ModuleSpec(HEAD, part.width, (whole,))
        a, b = (tensors[name] for name in factor_names(path))
        tensors |= zip(factor_names(HEAD), (b.T, a.T), strict=True)

    untied = {path: replace(spec, head=None) for path, spec in specs.items()}
    return {**untied, **head}, tensors


def drop_head(adapter: ExternalAdapter, where: Path) -> None:
    """Drop what an adapter stores of a tied head; a PackError unless it equals the embedding."""
    adapter.head = True
    factors = [adapter.tensors.pop(name, None) for name in factor_names(HEAD)]
    adapter.scales.pop(HEAD, None)

    table = next((p for p in adapter.scales if p.endswith(("embed_tokens", "wte"))), HEAD)
    of_table = [adapter.tensors.get(name) for name in factor_names(table)]
    expected = [None if factor is None else factor.T for factor in reversed(of_table)]
    if any(f is not None for f in factors) and not _same(factors, expected):
        raise _differ(where, "adapters")

    weight = adapter.full_tensors.get(f"{HEAD}.weight")
    name = table_of(adapter.full_tensors)
    if weight is not None and name is not None:
        if not _same([weight], [adapter.full_tensors[name]]):
            raise _differ(where, "tensors")
        del adapter.full_tensors[f"{HEAD}.weight"]


def table_of(names: Collection[str]) -> str | None:
    return next((n for n in names if n.endswith(("embed_tokens.weight", "wte.weight"))), None)


def _same(some: list[mx.array | None], others: list[mx.array | None]) -> bool:
    return all(
        one is not None and other is not None and mx.array_equal(one, other).item()
        for one, other in zip(some, others, strict=True)
    )


def _differ(where: Path, kind: str) -> PackError:
    return PackError(
        f"{where}: {TIED} is true, but the {kind} of head and embedding differ. One table cannot "
        "be both. Save the adapter again with PEFT.",
        "mismatch",
    )
