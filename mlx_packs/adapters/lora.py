"""Adapters on a base, and how they are taken off again; the base's own modules are never changed.

Attention and SwiGLU of the Llama family are swapped for blocks with grouped projections, and any
other linear is wrapped; detaching puts the very same objects back. In memory adapters are grouped;
their names and shapes on disk are mlx-lm's, per projection (`Attached.tensors`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..errors import PackError
from ..nn.blocks import GROUPED_BLOCKS
from ..nn.lora import (
    AdaptedEmbedding,
    AdaptedLinear,
    AdaptedSwitchLinear,
    AdapterShape,
    EmbeddingLoRA,
    GroupedLoRA,
    adapter_key,
    low_rank_delta,
)
from ..nn.recompute import recomputing
from ..nn.surgery import block_kind, recurrent_layer, replace_modules
from ..runtime import mx
from .spec import ModuleSpec, Specs, check_shapes, factor_names, ranks_of, weights_of

if TYPE_CHECKING:
    from ..bases.geometry import Geometry, Group
    from ..bases.model import BaseModel


@dataclass(frozen=True)
class AdapterPlace:
    """The place of one projection's adapters in memory: in ``lora``, from index ``first`` on."""

    lora: GroupedLoRA
    first: int
    spec: ModuleSpec


class Attached:
    """Adapters on a base; tensors have mlx-lm's names.

    Attributes:
        places: the adapters in memory, by path of the projection.
        frozen: the base's own modules, by path of the projection.
        inference_only: whether there is more on the base, which is applied but not trained.
        score: the head of a reward model, beside the base's own modules; None where there is none.
    """

    method = "lora"

    def __init__(
        self, base: "BaseModel", specs: Specs, groups: "list[Group]", notes: list[str]
    ) -> None:
        self.base = base
        self.model = base.model
        self.specs = specs
        self.groups = groups
        self.notes = notes
        self.replaced: dict[str, tuple[int, ...]] = {}
        self.places: dict[str, AdapterPlace] = {}
        self.frozen: dict[str, nn.Module] = {}
        self.inference_only = False
        self.score: nn.Linear | None = None

        self._originals: list[tuple[str, nn.Module]] = []
        self._suspended: list[tuple[str, nn.Module]] = []

    @property
    def details(self) -> str:
        return f"rank {', '.join(map(str, ranks_of(self.specs)))} · {len(self.specs)} projections"

    def swap(self, modules: list[tuple[str, nn.Module]]) -> None:
        current = dict(self.model.named_modules())
        self._originals += [(path, current[path]) for path, _ in modules]
        replace_modules(self.model, modules)

    def note_replaced(self, originals: list[tuple[str, nn.Module]]) -> None:
        """Let `detach` put back modules that others have replaced already."""
        self._originals += originals

    def recompute(self, policy: str) -> None:
        self.swap(recomputing(self.model, policy))

    def detach(self) -> None:
        """Put the base's own modules back, the same objects."""
        while self._originals:
            replace_modules(self.model, [self._originals.pop()])
        self.model.eval()

    def suspend(self) -> None:
        """Put the base's own modules back and drop the adapters, for `resume` with others."""
        if self.model.training:
            self.model.eval()  # as detaching does; the modules must not come back in training

        self._suspended = self._suspended or self.installed_modules()
        replace_modules(self.model, self._originals)

        empty = mx.zeros(())
        for place in self.places.values():
            for factors in (place.lora.lora_a, place.lora.lora_b):
                factors[:] = [empty] * len(factors)

    def resume(self, tensors: Mapping[str, mx.array], where: str) -> None:
        """Put the modules that `suspend` took off on the base again, with other adapters."""
        self.load(tensors, where)
        replace_modules(self.model, self._suspended)
        if self.model.training:
            self.model.eval()

    def lift(self) -> list[tuple[str, nn.Module]]:
        """Put the base's own modules back, and return those that `replace_modules` puts on again.

        The adapters keep their values.
        """
        installed = self.installed_modules()
        for original in reversed(self._originals):
            replace_modules(self.model, [original])
        return installed

    def installed_modules(self) -> list[tuple[str, nn.Module]]:
        current = dict(self.model.named_modules())
        return [(path, current[path]) for path, _ in self._originals]

    def tensors(self) -> dict[str, mx.array]:
        """Return adapters by name on disk: ``<path>.lora_a`` [in, r], ``<path>.lora_b`` [r, out].

        They are float32; experts' are as mlx-lm has them, [E, r, in] and [E, out, r].
        """
        return place_tensors(self.places)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which the model computes what the base does: every B is zero."""
        with self.altered_b(lambda _, b: mx.zeros_like(b)):
            yield

    @contextmanager
    def altered_b(self, change: Callable[[int, mx.array], mx.array]) -> Iterator[None]:
        """Return a context in which ``change`` replaces every B, given its index and itself."""
        groups = list({id(place.lora): place.lora for place in self.places.values()}.values())
        trained = [list(group.lora_b) for group in groups]

        try:
            for group in groups:
                group.lora_b[:] = [change(i, b) for i, b in enumerate(group.lora_b)]
            yield
        finally:
            for group, b in zip(groups, trained, strict=True):
                group.lora_b[:] = b

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        load_places(self.places, tensors, where)

    def parameter_count(self) -> int:
        return weights_of(place.spec for place in self.places.values())


def _make_lora(
    attached: Attached, members: "list[Geometry | None]", dropout: float, seed: int
) -> GroupedLoRA | None:
    """Make one GroupedLoRA for projections that read the same input; None has no adapter."""
    shapes: list[AdapterShape | None] = []
    keys: list[mx.array | None] = []
    firsts: dict[str, int] = {}

    for geometry in members:
        spec = geometry and attached.specs.get(geometry.path)
        if spec is None:
            shapes.append(None)
            keys.append(None)
            continue

        adapter = spec.in_features, spec.widths, spec.experts
        if (spec.kind == "embedding") != geometry.embeds:
            kinds = ["a linear", "an embedding"]
            raise PackError(
                f"{spec.path}: the adapter is for {kinds[not geometry.embeds]}, but the base has "
                f"{kinds[geometry.embeds]}.",
                "mismatch",
            )

        projection = geometry.in_features, geometry.widths, geometry.experts
        # one adapter over all slices of a fused projection, as other tools train it
        whole = geometry.in_features, [sum(geometry.widths)], geometry.experts
        if adapter not in (projection, whole):
            raise PackError(
                f"{spec.path}: the adapter is for {_sizes(*adapter)}, but the projection is "
                f"{_sizes(*projection)}.",
                "mismatch",
            )

        firsts[spec.path] = sum(shape is not None for shape in shapes)
        for s in spec.slices:
            shape = AdapterShape(s.width, s.rank, s.scale, spec.experts)
            shapes.append(shape if s.rank else None)
            keys.append(adapter_key(seed, f"{spec.path}.{s.name}"))

    if not firsts:
        return None

    first = attached.specs[next(iter(firsts))]
    if first.kind == "embedding":
        (part,) = first.slices
        lora = EmbeddingLoRA(first.in_features, part.width, part.rank, part.scale, keys[0])
    else:
        lora = GroupedLoRA.fresh(first.in_features, shapes, dropout, keys)

    for path, index in firsts.items():
        attached.places[path] = AdapterPlace(lora, index, attached.specs[path])
    return lora


def _sizes(in_features: int, widths: list[int], experts: int | None) -> str:
    sizes = f"{in_features} -> {widths}"
    if experts is not None:
        sizes += f" x {experts} experts"
    return sizes


def _adapted(linear: nn.Module, lora: GroupedLoRA, spec: ModuleSpec) -> nn.Module:
    """Return a module that replaces a lone projection and adds the output of its adapters."""
    if isinstance(lora, EmbeddingLoRA):
        return AdaptedEmbedding(linear, lora, spec.head is not False)
    if spec.experts is not None:
        return AdaptedSwitchLinear(linear, lora)

    own = getattr(linear, "output_dims", None)
    if isinstance(own, list) and spec.widths != own:
        raise PackError(
            f"{spec.path}: splits its output into {own}, and the adapter does not.", "unsupported"
        )
    return AdaptedLinear(linear, lora, spec.widths)


def add_adapters(attached: Attached, dropout: float, seed: int) -> None:
    """Replace modules by ones with fresh adapters, as `Attached.specs` has them.

    Lone projections come first, then whole blocks. Blocks without adapters are replaced too: ours
    never have all T x T scores in memory, nor the states of every token.
    """
    make_lora = partial(_make_lora, attached, dropout=dropout, seed=seed)
    modules = dict(attached.model.named_modules())
    lone = [group.members[0] for group in attached.groups if group.block is None]

    wrapped = []
    for geometry in lone:
        lora = make_lora([geometry])
        if lora is not None:
            path = geometry.path
            wrapped.append((path, _adapted(modules[path], lora, attached.specs[path])))
    attached.swap(wrapped)

    blocks: dict[str, dict[str, Geometry]] = {
        path: {} for path, m in modules.items() if block_kind(m) is not None
    }
    for group in attached.groups:
        if group.block is not None:
            blocks[group.block].update({g.name: g for g in group.members})

    swapped = []
    for path, by_name in blocks.items():
        kind = block_kind(modules[path])
        shared = make_lora([by_name.get(name) for name in kind.shared])
        last = make_lora([by_name.get(kind.last)])
        swapped.append((path, GROUPED_BLOCKS[kind](modules[path], shared, last)))

    recurrent = ((path, recurrent_layer(module)) for path, module in modules.items())
    attached.swap(swapped + [(path, layer) for path, layer in recurrent if layer is not None])

    order = {path: i for i, path in enumerate(attached.specs)}
    attached.places = dict(sorted(attached.places.items(), key=lambda item: order[item[0]]))


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


def place_tensors(places: Mapping[str, AdapterPlace]) -> dict[str, mx.array]:
    """Return adapters by name on disk: A [in, r] and B [r, out], or mlx-lm's of experts."""
    tensors = {}
    for place in places.values():
        adapted = [s for s in place.spec.slices if s.rank]
        a = place.lora.lora_a[place.first : place.first + len(adapted)]
        b = place.lora.lora_b[place.first : place.first + len(adapted)]

        side_by_side = mx.concatenate(a, axis=1) if len(a) > 1 else a[0]
        tensors |= name_factors(place.spec, side_by_side, _block_diagonal(place.spec, b))
    return tensors


def load_places(
    places: Mapping[str, AdapterPlace], tensors: Mapping[str, mx.array], where: str
) -> None:
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

    The delta of experts is [E, out, in], and of an embedding [vocab, dim], as its table.
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
