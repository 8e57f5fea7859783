"""Adapters in memory to and from tensors named as on disk, and what they add to a weight."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PackError
from ..nn.lora import GroupedLoRA, low_rank_delta
from ..runtime import mx
from .spec import ModuleSpec, check_shapes, factor_names


@dataclass(frozen=True)
class AdapterPlace:
    """The place of one projection's adapters in memory: in ``lora``, from index ``first`` on."""

    lora: GroupedLoRA
    first: int
    spec: ModuleSpec


AdapterPlaces = Mapping[str, AdapterPlace]


def read_factors(spec: ModuleSpec, tensors: Mapping[str, mx.array]) -> tuple[mx.array, mx.array]:
    """Return A [in, r] and B [r, out] of tensors named as on disk; of experts [E, …]."""
    a, b = (tensors[name] for name in factor_names(spec.path))
    if spec.experts is not None:
        a = a.swapaxes(-1, -2)
        b = b.swapaxes(-1, -2)
    return a, b


def sliced_factors(
    spec: ModuleSpec, tensors: Mapping[str, mx.array]
) -> dict[int, tuple[mx.array, mx.array]]:
    """Return A [in, r] and B [r, width] of each slice that has an adapter, by its number."""
    a, b = read_factors(spec, tensors)
    factors = {}
    rank = column = 0

    for i, s in enumerate(spec.slices):
        if s.rank:
            rows = slice(rank, rank + s.rank)
            factors[i] = a[..., rows], b[..., rows, column : column + s.width]
        rank += s.rank
        column += s.width
    return factors


def name_factors(spec: ModuleSpec, a: mx.array, b: mx.array) -> dict[str, mx.array]:
    """Return A and B by name, and in the shapes, on disk; undoes `read_factors`."""
    if spec.experts is not None:
        a = a.swapaxes(-1, -2)
        b = b.swapaxes(-1, -2)
    return dict(zip(factor_names(spec.path), (a, b), strict=True))


def place_tensors(places: AdapterPlaces) -> dict[str, mx.array]:
    """Return adapters by name on disk: A [in, r] and B [r, out], or mlx-lm's of experts."""
    tensors = {}
    for place in places.values():
        adapted = [s for s in place.spec.slices if s.rank]
        a = place.lora.lora_a[place.first : place.first + len(adapted)]
        b = place.lora.lora_b[place.first : place.first + len(adapted)]

        side_by_side = mx.concatenate(a, axis=1) if len(a) > 1 else a[0]
        tensors |= name_factors(place.spec, side_by_side, _block_diagonal(place.spec, b))
    return tensors


def load_places(places: AdapterPlaces, tensors: Mapping[str, mx.array], where: str) -> None:
    """Set all adapters from tensors named as on disk; nothing is changed if one does not fit."""
    expected = {n: shape for s in places.values() for n, shape in s.spec.shapes.items()}
    check_shapes(expected, {name: tensor.shape for name, tensor in tensors.items()}, where)

    for path, place in places.items():
        name = factor_names(path)[1]
        if not _is_block_diagonal(place.spec, tensors[name]):
            raise PackError(
                f"{where}: {name} couples the slices of a fused projection.", "unsupported"
            )

    for place in places.values():
        factors = sliced_factors(place.spec, tensors).values()
        for index, (a, b) in enumerate(factors, place.first):
            place.lora.lora_a[index] = a.astype(mx.float32)
            place.lora.lora_b[index] = b.astype(mx.float32)


def delta_of(spec: ModuleSpec, tensors: Mapping[str, mx.array]) -> mx.array:
    """Return the delta of adapters, named as on disk, on their weight: [out, in] in float32.

    The delta of experts is [E, out, in]; that of an embedding [vocab, dim], as its table.
    """
    a, b = read_factors(spec, tensors)
    if spec.experts is not None:
        return low_rank_delta(a, b, spec.slices[0].scale)

    scales = [mx.full((s.rank,), s.scale) for s in spec.slices if s.rank]
    delta = low_rank_delta(a, b * mx.concatenate(scales)[:, None], 1.0)
    if spec.kind == "embedding":
        return delta.T
    return delta


def _block_diagonal(spec: ModuleSpec, parts: list[mx.array]) -> mx.array:
    """Return B of a fused projection: each slice's B in its own rows and columns, else zero."""
    if len(spec.slices) == 1:
        return parts[0]

    rows = []
    remaining = iter(parts)
    column = 0

    for s in spec.slices:
        if s.rank:
            rows.append(
                mx.pad(next(remaining), ((0, 0), (column, spec.out_features - column - s.width)))
            )
        column += s.width
    return mx.concatenate(rows)


def _is_block_diagonal(spec: ModuleSpec, b: mx.array) -> bool:
    """Return whether B [r, out] of a projection is zero outside its slices."""
    if len(spec.slices) == 1:
        return True
    ones = [mx.ones((s.rank, s.width)) for s in spec.slices if s.rank]
    return not mx.any(mx.where(_block_diagonal(spec, ones) == 0, b, 0)).item()
