"""PiSSA, OLoRA and LoftQ: LoRA initialized with factors, instead of A at random and B zero.

PiSSA and OLoRA start from factors of the weight, subtracted from the frozen weight. A pack stores
the trained factors and the negated initial ones: plain LoRA of twice the rank, on that base.

LoftQ starts from the best approximation of what quantization has lost: W is about Q + s B A.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import mlx.nn as nn

from ..adapters.attach import LoRA, check_linears, install, weight_of
from ..adapters.decomposition import Factors, principal_factors
from ..adapters.lora import AdapterPlace, Attached, load_places, place_tensors
from ..adapters.spec import ModuleSpec
from ..bases.files import CONFIG, quantized_as, read_config
from ..bases.loading import lazy_base
from ..errors import PackError
from ..nn.lora import GroupedLoRA
from ..nn.quantized import QUANTIZED
from ..runtime import mx

if TYPE_CHECKING:
    from ..bases.model import BaseModel


def orthonormal_factors(weight: mx.array, rank: int, scale: float) -> Factors:
    """Return the first columns of Q as B, and the first rows of R as A, where Q R = W.

    OLoRA: https://arxiv.org/abs/2406.01775
    """
    q, _ = mx.linalg.qr(weight[:, :rank], stream=mx.cpu)
    return weight.T @ q, q.T


class ResidualLoRA(GroupedLoRA):
    """Adapters of a projection group whose initial product is subtracted from the weights.

    Semantics: y = (W - s B0 A0) x + s B A x, where A and B start as A0 and B0

    W is not changed, quantized or not: s B0 A0 is subtracted by extra, negated rows of A and
    columns of B. ``lora`` has A0 and B0 of each adapter.

    PiSSA: https://arxiv.org/abs/2404.02948
    """

    def __init__(self, lora: GroupedLoRA) -> None:
        super().__init__(lora._adapted, lora._scales, lora.lora_a, lora.lora_b, lora.dropout.p)
        self._removed_a = list(lora.lora_a)
        self._removed_b = [-b for b in lora.lora_b]

    @property
    def removed(self) -> list[mx.array]:
        """A0 and -B0 of each adapter, which are not trained."""
        return [*self._removed_a, *self._removed_b]

    def multiplied(self) -> tuple[list[mx.array], list[mx.array]]:
        """Return factors [D, 2R] and [2R, O] whose product is B A - B0 A0.

        They are those of B (A - A0) + (B - B0) A0: in half precision nothing large is subtracted.
        """
        a = zip(self.lora_a, self._removed_a, strict=True)
        b = zip(self.lora_b, self._removed_b, strict=True)
        return (
            [mx.concatenate([own - removed, removed], -1) for own, removed in a],
            [mx.concatenate([own, own + removed], -2) for own, removed in b],
        )

    def stored(self) -> tuple[list[mx.array], list[mx.array]]:
        """Return the same product as factors that have every bit: A with A0, B with -B0."""
        a = zip(self.lora_a, self._removed_a, strict=True)
        b = zip(self.lora_b, self._removed_b, strict=True)
        return [mx.concatenate(p, -1) for p in a], [mx.concatenate(p, -2) for p in b]

    def set_stored(self, lora_a: Sequence[mx.array], lora_b: Sequence[mx.array]) -> None:
        for own, removed, whole, axis in (
            (self.lora_a, self._removed_a, lora_a, -1),
            (self.lora_b, self._removed_b, lora_b, -2),
        ):
            halves = [mx.split(factor, 2, axis) for factor in whole]
            own[:] = [half[0] for half in halves]
            removed[:] = [half[1] for half in halves]


class Residual(Attached):
    """Adapters on what is left of weights; ``specs`` and tensors are those of its packs."""

    def __init__(self, attached: Attached, method: str) -> None:
        super().__init__(attached.base, attached.specs, attached.groups, attached.notes)
        vars(self).update(vars(attached))
        self.method = method
        self.specs = {path: _twice(spec) for path, spec in attached.specs.items()}

    def tensors(self) -> dict[str, mx.array]:
        """Return adapters by name on disk, of twice the rank that is trained."""
        return place_tensors(self._whole())

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        """Set all adapters, those that the weights are left without too."""
        whole = self._whole()
        load_places(whole, tensors, where)
        factors = {id(self.places[path].lora): place.lora for path, place in whole.items()}
        for place in self.places.values():
            if (both := factors.pop(id(place.lora), None)) is not None:
                place.lora.set_stored(both.lora_a, both.lora_b)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        trained = self.tensors()
        try:
            self.load({name: mx.zeros_like(t) for name, t in trained.items()}, "base")
            yield
        finally:
            self.load(trained, "trained")

    def _whole(self) -> dict[str, AdapterPlace]:
        """Return the places of all factors, the trained and the removed ones side by side."""
        loras = {id(place.lora): place.lora for place in self.places.values()}
        whole = {}
        for key, lora in loras.items():
            a, b = lora.stored()
            whole[key] = SimpleNamespace(lora_a=a, lora_b=b)

        return {
            path: AdapterPlace(whole[id(place.lora)], place.first, self.specs[path])
            for path, place in self.places.items()
        }


class ResidualMethod(LoRA):
    """A method whose adapters begin with factors of the weights, which are left without them.

    Attributes:
        name: in `config.choices.METHODS`.
        factors: of a weight, a rank and a scale.
    """

    name: ClassVar[str]
    factors: ClassVar[Callable[[mx.array, int, float], Factors]]

    def initialize(self, attached: Attached) -> Residual:
        check_linears(attached, self.name)
        begin_with(attached, self.factors, weight_of)
        install(attached, ResidualLoRA)
        return Residual(attached, self.name)

    def kept_numbers(self, spec: ModuleSpec) -> int:
        """Return twice the rank: x A and x A0 are kept."""
        return 2 * spec.rank


class PiSSA(ResidualMethod):
    """Adapters that begin with the principal factors of the weights (arXiv:2404.02948)."""

    name = "pissa"
    factors = staticmethod(principal_factors)


class OLoRA(ResidualMethod):
    """Adapters that begin with orthonormal factors of the weights (arXiv:2406.01775)."""

    name = "olora"
    factors = staticmethod(orthonormal_factors)


class LoftQ(LoRA):
    """LoRA that begins with the principal factors of W - Q, as PEFT's LoftQ of one iteration.

    Further iterations would quantize another weight than the checkpoint's, and the pack
    would be of a base of its own.

    LoftQ: https://arxiv.org/abs/2310.08659
    """

    def check(self, base: "BaseModel", matmul_path: str) -> None:
        """Check that a base is quantized, and its checkpoint is not."""
        modules = base.model.modules()
        if not any(isinstance(module, QUANTIZED) for module in modules):
            raise PackError(
                f"--method loftq: {base.name} is not quantized, so no loss is there to start "
                "from. Pass --quantize nf4 or affine4, or use --method pissa or lora.",
                "conflict",
            )

        if quantized_as(base.path, read_config(base.path / CONFIG)) is not None:
            raise PackError(
                f"--method loftq: {base.name} is stored quantized, and what that has lost is not "
                "in it. Use the dense checkpoint with --quantize, or --method lora.",
                "conflict",
            )

    def initialize(self, attached: Attached) -> Attached:
        check_linears(attached, "loftq")
        dense = _dense_weights(attached.base, attached.frozen)

        def lost(path: str, module: nn.Module) -> mx.array:
            # taken out, so that one dense weight at a time is in memory
            return dense.pop(path).astype(mx.float32) - weight_of(path, module)

        begin_with(attached, principal_factors, lost)
        attached.method = "loftq"
        return attached


def begin_with(
    attached: Attached,
    factors: Callable[[mx.array, int, float], Factors],
    weight: Callable[[str, nn.Module], mx.array],
) -> None:
    """Set the factors of all adapters from the weights that they are for.

    ``factors`` are of a weight [O, D], a rank and a scale; ``weight`` is of the module at a path.
    """
    for path, place in attached.places.items():
        whole = weight(path, attached.frozen[path])
        row = 0
        index = place.first
        for part in place.spec.slices:
            if part.rank:
                rows = whole[row : row + part.width]
                a, b = factors(rows, part.rank, part.scale)
                mx.eval(a, b)
                place.lora.lora_a[index] = a
                place.lora.lora_b[index] = b
                index += 1
            row += part.width


def _twice(spec: ModuleSpec) -> ModuleSpec:
    """Return the adapters of a projection with twice the rank, and the same scale."""
    slices = (replace(s, rank=2 * s.rank, alpha=2 * s.alpha) for s in spec.slices)
    return replace(spec, slices=tuple(slices))


def _dense_weights(base: "BaseModel", paths: Iterable[str]) -> dict[str, mx.array]:
    """Return the weights at some paths as the checkpoint has them; none is read yet."""
    # its code, if it has any, was run with the user's consent when it was loaded before
    modules = dict(lazy_base(base.path, trust_remote_code=True).model.named_modules())
    return {path: modules[path].weight for path in paths}
