"""PiSSA and OLoRA: adapters that begin with factors of the weight, which it is left without.

The base is not changed. A pack has the factors at the end beside those at the beginning, with a
minus, so it is plain LoRA of twice the rank, on the very base.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import mlx.nn as nn

from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import GroupedLoRA
from ..nn.residual_lora import ResidualLoRA
from ..runtime import mx
from .attach import attach
from .initial_factors import Factors, orthonormal_factors, principal_factors
from .lora import Attached
from .spec import ModuleSpec, Specs, factor_shapes
from .tensors import Slot, load_slots, slot_tensors

if TYPE_CHECKING:
    from ..bases.model import BaseModel


class Residual(Attached):
    """Adapters on what is left of a base's weights; ``specs`` and tensors are those of its packs."""

    def __init__(self, attached: Attached, method: str) -> None:
        super().__init__(attached.base, attached.specs, attached.groups, attached.notes)
        vars(self).update(vars(attached))
        self.method = method
        self.specs = {path: _twice(spec) for path, spec in attached.specs.items()}

    def tensors(self) -> dict[str, mx.array]:
        """Return adapters by name on disk, of twice the rank that is trained."""
        return slot_tensors(self._whole())

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        """Set all adapters, those that the weights are left without too."""
        whole = self._whole()
        load_slots(whole, tensors, where)
        factors = {id(self.slots[path].lora): slot.lora for path, slot in whole.items()}
        for slot in self.slots.values():
            if (both := factors.pop(id(slot.lora), None)) is not None:
                slot.lora.set_stored(both.lora_a, both.lora_b)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which the model computes what the base does."""
        trained = self.tensors()
        try:
            self.load({name: mx.zeros_like(t) for name, t in trained.items()}, "base")
            yield
        finally:
            self.load(trained, "trained")

    def _whole(self) -> dict[str, Slot]:
        """Return the slots of all factors, the trained and the removed ones side by side."""
        loras = {id(slot.lora): slot.lora for slot in self.slots.values()}
        whole = {}
        for key, lora in loras.items():
            a, b = lora.stored()
            whole[key] = SimpleNamespace(lora_a=a, lora_b=b)
        return {
            path: Slot(whole[id(slot.lora)], slot.first, self.specs[path])
            for path, slot in self.slots.items()
        }


class ResidualMethod:
    """A method whose adapters begin with factors of the weights, which are left without them.

    Attributes:
        name: in `config.choices.METHODS`.
        factors: of a weight, a rank and a scale.
    """

    name: ClassVar[str]
    factors: ClassVar[Callable[[mx.array, int, float], Factors]]

    def check(self, base: "BaseModel", matmul_path: str) -> None:
        """Accept every base whose weights can be read."""

    def attach(
        self, base: "BaseModel", lora: LoRAConfig, train: TrainConfig, matmul_path: str
    ) -> Residual:
        """Attach adapters that begin with factors of the weights; no output changes."""
        attached = attach(base, lora, None, matmul_path, train.seed, train.train_fp16_fallback)
        try:
            check_linears(attached, self.name)
            begin_with(attached, self.factors, weight_of)
            install(attached, ResidualLoRA)
        except BaseException:
            attached.detach()
            raise
        return Residual(attached, self.name)

    def adapter_shapes(self, specs: Specs) -> list[tuple[int, ...]]:
        """Return the shapes of A [in, r] and B [r, out] of every slice, as they are trained."""
        return factor_shapes(specs)

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


def check_linears(attached: Attached, method: str) -> None:
    """Raise a PackError if an adapter is for an embedding or for a stack of experts."""
    for path, spec in attached.specs.items():
        if spec.kind == "embedding":
            raise PackError(
                f"--method {method}: {path} is an embedding, which has LoRA alone. Leave it out of "
                "--target-modules, name it in --modules-to-save, or take --method lora.",
                "unsupported",
            )
        if spec.experts is not None:
            raise PackError(
                f"--method {method}: {path} is a stack of experts, which it cannot adapt. Leave it out "
                "of --target-modules, or take --method lora.",
                "unsupported",
            )


def begin_with(
    attached: Attached,
    factors: Callable[[mx.array, int, float], Factors],
    weight: Callable[[str, nn.Module], mx.array],
) -> None:
    """Set the factors of all adapters from the weights that they are for.

    Args:
        attached: the adapters.
        factors: of a weight [O, D], a rank and a scale.
        weight: of the module at a path.
    """
    for path, slot in attached.slots.items():
        whole, row, index = weight(path, attached.frozen[path]), 0, slot.first
        for part in slot.spec.slices:
            if part.rank:
                rows = whole[row : row + part.width]
                a, b = factors(rows, part.rank, part.scale)
                mx.eval(a, b)
                slot.lora.lora_a[index], slot.lora.lora_b[index] = a, b
                index += 1
            row += part.width


def install(attached: Attached, make: Callable[[GroupedLoRA], GroupedLoRA]) -> None:
    """Put another kind of group in the place of every group of adapters."""
    modules = attached.model.named_modules()
    loras = [(path, module) for path, module in modules if type(module) is GroupedLoRA]
    others = {id(lora): make(lora) for _, lora in loras}
    attached.swap([(path, others[id(lora)]) for path, lora in loras])
    attached.slots = {
        path: replace(slot, lora=others[id(slot.lora)]) for path, slot in attached.slots.items()
    }


def weight_of(path: str, module: nn.Module) -> mx.array:
    """Return the weight [O, D] of a frozen module in float32.

    Raises:
        PackError: it cannot be dequantized.
    """
    try:
        weight = frozen_weight(module).dense().astype(mx.float32)
        mx.eval(weight)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise PackError(
            f"{path}: cannot be dequantized: {reason}. Take --method lora, which needs no "
            "dense weights.",
            "unsupported",
        ) from None
    return weight


def _twice(spec: ModuleSpec) -> ModuleSpec:
    """Return the adapters of a projection with twice the rank, and the same scale."""
    slices = (replace(s, rank=2 * s.rank, alpha=2 * s.alpha) for s in spec.slices)
    return replace(spec, slices=tuple(slices))
