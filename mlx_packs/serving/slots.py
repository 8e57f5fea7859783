"""Packs over one base, all of them in memory: each has a slot in every projection group.

mlx-lm's `BatchGenerator` joins, splits and filters the caches of its sequences as they come and go.
`PackOfSequence` is one more cache of each, so that packs and sequences stay in line through
whatever it does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..adapters.attach import attach, check_bare
from ..adapters.lora import Attached, sliced_factors
from ..adapters.spec import SCORE_WEIGHT, SliceSpec, Specs
from ..bases.model import BaseModel
from ..errors import PackError
from ..nn.lora import GroupedLoRA
from ..nn.quantized import apply_matmul_path
from ..nn.served_lora import PackFactors, Place, Selection, ServedLoRA
from ..nn.surgery import replace_modules
from ..packs.compatibility import check_activates, check_base
from ..packs.manifest import replaced_of
from ..packs.pack import Pack
from ..runtime import mx

_STEP = 256  # tokens that mlx-lm's caches make room for at once


class PackSlots:
    """The adapters of several packs on one base, which computes each sequence with its own pack.

    Args:
        base: without adapters; `close` leaves it as it was.
        matmul_path: how frozen weights are used: ``quantized``, or ``dense`` where many rows at
            once are worth the memory, as on CPUs.

    Attributes:
        nbytes: bytes of the adapters of all packs.
        attached: the modules that have them, another object where modules were exchanged.
    """

    def __init__(self, base: BaseModel, matmul_path: str = "quantized") -> None:
        check_bare(base)
        self.base = base
        self._originals = apply_matmul_path(base.model, matmul_path)
        mx.eval(base.model.parameters())

        self.selection = Selection()
        self.nbytes = 0
        self._dtype = getattr(mx, base.compute_dtype)
        self._loaded: list[tuple[Specs, PackFactors] | None] = []
        self.attached: Attached | None = None
        self._specs: Specs = {}
        self._groups: list[ServedLoRA] = []

    def add(self, pack: Pack) -> int:
        """Put a pack into a free slot, and return the slot; what is computed meanwhile stays valid.

        A PackError if the pack is of another base, or has adapters that cannot share a batch.
        """
        check_base(pack, self.base)
        if not pack.is_classifier:
            check_activates(pack)
        if reason := _unservable(pack, self._specs):
            raise PackError(
                f"{pack.name}: {reason}, which `packs serve` does not mix with other packs. Merge "
                "it (packs merge) and serve the result.",
                "unsupported",
            )

        loaded = pack.specs, _factors(pack.specs, pack.load_tensors())
        free = (i for i, other in enumerate(self._loaded) if other is None)
        slot = next(free, len(self._loaded))

        before = list(self._loaded)
        self._loaded[slot : slot + 1] = [loaded]
        try:
            self._install()
        except BaseException:
            self._loaded = before
            self._install()
            raise
        return slot

    def remove(self, slot: int) -> None:
        """Empty a slot; no sequence may use it any more."""
        self._loaded[slot] = None
        while self._loaded and self._loaded[-1] is None:
            self._loaded.pop()
        self._install()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Return a context in which the base has no packs, for other adapters on it."""
        installed = self.attached.lift() if self.attached is not None else []
        try:
            yield
        finally:
            replace_modules(self.base.model, installed)
            self.base.model.eval()

    def close(self) -> None:
        if self.attached is not None:
            self.attached.detach()
        self.attached = None
        self._groups = []
        self._specs = {}
        self._loaded = []
        replace_modules(self.base.model, self._originals)
        self._originals = []

    def _install(self) -> None:
        """Let every projection group have the adapters of the packs that are loaded now."""
        specs = _union([loaded[0] for loaded in self._loaded if loaded is not None])
        if _places(specs) != _places(self._specs):
            self._attach(specs)

        packs = [{} if loaded is None else loaded[1] for loaded in self._loaded]
        for served in self._groups:
            served.install(packs, self._dtype)
        self.nbytes = sum(served.nbytes for served in self._groups)

    def _attach(self, specs: Specs) -> None:
        """Put groups for these adapters on the base, in place of those that are there."""
        if self.attached is not None:
            self.attached.detach()
        self.attached = None
        self._groups = []
        self._specs = specs
        if not specs:
            return

        attached = attach(self.base, specs=specs)
        places: dict[int, list[Place]] = {}
        # as the group has them, whatever the order of the packs
        for path, place in sorted(attached.places.items(), key=lambda item: item[1].first):
            adapted = [(path, i) for i, s in enumerate(specs[path].slices) if s.rank]
            places.setdefault(id(place.lora), []).extend(adapted)

        served = [
            (path, ServedLoRA(module, places[id(module)], self.selection))
            for path, module in self.base.model.named_modules()
            if type(module) is GroupedLoRA
        ]
        self._groups = [module for _, module in served]
        attached.swap(served)
        self.base.model.eval()
        self.attached = attached


def _unservable(pack: Pack, served: Specs) -> str:
    """Return what of a pack cannot be mixed with the served ones in a batch; empty if all can."""
    replaced = set(replaced_of(pack.manifest))
    is_head = replaced == {SCORE_WEIGHT}  # which requests have beside it
    if (reason := pack._beyond_lora) and not is_head:
        return reason

    for path, spec in pack.specs.items():
        if spec.kind != "lora":
            return f"{path} is {spec.kind}"
        if spec.experts is not None:
            return f"{path} has an adapter for each expert"
        if path in served and served[path].widths != spec.widths:
            return f"it divides {path} into other parts than a pack that is served"
    return ""


def _factors(specs: Specs, tensors: Mapping[str, mx.array]) -> PackFactors:
    """Return A and scaled B of every adapted slice, from tensors named as on disk."""
    return {
        (path, i): (a, b.astype(mx.float32) * spec.slices[i].scale)
        for path, spec in specs.items()
        for i, (a, b) in sliced_factors(spec, tensors).items()
    }


def _union(packs: Sequence[Specs]) -> Specs:
    """Return where any of the packs has adapters, of the largest rank there."""
    union: Specs = {}
    for path in dict.fromkeys(path for specs in packs for path in specs):
        specs = [specs[path] for specs in packs if path in specs]
        ranks = [max(s.slices[i].rank for s in specs) for i in range(len(specs[0].slices))]
        slices = [
            SliceSpec(s.name, s.width, rank, float(rank))
            for s, rank in zip(specs[0].slices, ranks, strict=True)
        ]
        union[path] = replace(specs[0], slices=tuple(slices))
    return union


def _places(specs: Specs) -> dict[str, list[tuple[int, bool]]]:
    """Return the width of each slice, and whether any pack adapts it."""
    return {path: [(s.width, s.rank > 0) for s in spec.slices] for path, spec in specs.items()}


class PackOfSequence:
    """The slots of the sequences of a batch, with the interface of mlx-lm's caches."""

    nbytes = 0
    state: tuple = ()

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)

    @classmethod
    def merge(cls, caches: Sequence["PackOfSequence"]) -> "PackOfSequence":
        return cls([slot for cache in caches for slot in cache.slots])

    def extend(self, other: "PackOfSequence") -> None:
        self.slots += other.slots

    def filter(self, keep: Sequence[int]) -> None:
        self.slots = [self.slots[i] for i in keep]

    def extract(self, i: int) -> "PackOfSequence":
        return PackOfSequence([self.slots[i]])

    def prepare(self, **_: Any) -> None:
        """Nothing is padded here."""

    def finalize(self) -> None:
        """Nothing was padded here."""


class BatchedModel:
    """The model of a base with packs, called with caches that end with a `PackOfSequence`."""

    def __init__(self, slots: PackSlots) -> None:
        self._model = slots.base.model
        self._selection = slots.selection

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Map tokens [B, T] to logits [B, T, V], each sequence with its own pack."""
        *caches, packs = cache
        self._selection.set(packs.slots)
        return self._model(tokens, cache=caches)

    def new_cache(self) -> list[Any]:
        """Return empty caches of one sequence, without its pack."""
        return make_prompt_cache(self._model)


def cache_bytes(model: BatchedModel) -> tuple[int, int]:
    """Return what a sequence keeps: bytes of whatever its length, and bytes for each token.

    A graph that is never computed has arrays of these sizes.
    """
    sizes = []
    for tokens in (1, _STEP + 1):
        caches = [c.merge([c]) for c in model.new_cache()]
        model(mx.zeros((1, tokens), dtype=mx.int32), [*caches, PackOfSequence([-1])])
        sizes.append(sum(c.nbytes for c in caches))

    first, second = sizes  # after one and after two allocations of so many tokens
    each = max(0, (second - first) // _STEP)
    return max(0, first - each * _STEP), each


def reserved_tokens(tokens: int) -> int:
    """Return the tokens that caches make room for where a sequence has so many."""
    return -(-tokens // _STEP) * _STEP
