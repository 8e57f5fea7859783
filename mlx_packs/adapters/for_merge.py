"""Adapters that are trained and applied on the grid of a quantized merge (``--for-merge``).

`packs merge --requantize FORMAT` rounds W + s B A. In the last fifth of training the same rounding is
in every forward pass; a pack is applied as the quantized weights themselves. So merging changes nothing.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..bases.loading import lazy_base
from ..bases.requantize import requantized_formats
from ..bases.weight_formats import WeightFormat
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import AdaptedLinear, GroupedLoRA
from ..nn.quantized import (
    PATHS,
    QUANTIZED,
    DenseLinear,
    Requantized,
    dense_like,
    is_plain_linear,
    linear_of,
    stored_weight,
)
from ..nn.straight_through import QuantizedSum, StraightThroughLinear, StraightThroughLoRA
from ..runtime import mx
from .attach import attach, check_bare
from .lora import Attached
from .spec import ModuleSpec, Specs
from .tensors import Slot, delta_of
from .variants import install

if TYPE_CHECKING:
    from ..bases.model import BaseModel

# Share of a run before it rounds. While deltas are smaller than a step of the grid, rounding hides
# what they change: runs that rounded earlier were behind (docs/methods.md).
ROUNDED_FROM = 0.8


@dataclass(frozen=True)
class Rounding:
    """How a merge rounds a weight: to a dtype, then to a format, unless it stays dense."""

    dtype: mx.Dtype
    weight_format: WeightFormat | None

    def module(self, own: nn.Module, weight: mx.array) -> nn.Module:
        """Return a module like ``own`` with another dense weight, rounded lazily."""
        return self._rounded(dense_like(own, weight), _compute_dtype(own))

    def linear(self, dtype: mx.Dtype, weight: mx.array) -> nn.Module:
        """Return a linear without bias that computes in ``dtype``; no random number is drawn."""
        return self._rounded(linear_of(weight), dtype)

    def _rounded(self, dense: nn.Module, dtype: mx.Dtype) -> nn.Module:
        if self.weight_format is not None:
            return self.weight_format.module(dense, dtype)
        dense.weight = dense.weight.astype(self.dtype).astype(dtype)
        return dense


Grid = Mapping[str, Rounding]  # by path, of every weight that a merge writes anew


def grid_of(base: "BaseModel", requantize: str, adapted: Collection[str]) -> Grid:
    """Return how `packs merge --requantize` rounds each weight of a base, of which some are adapted."""
    # its code, if it has any, was run with the user's consent when it was loaded before
    stored = lazy_base(base.path, trust_remote_code=True)
    modules = dict(stored.model.named_modules())
    return {
        path: Rounding(frozen_weight(modules[path]).dense().dtype, weight_format)
        for path, weight_format in requantized_formats(stored, requantize, adapted).items()
    }


class ForMerge(Attached):
    """Adapters that are trained on the grid of a merge; ``for_merge`` is its format."""

    def __init__(
        self, attached: Attached, for_merge: str, grid: Grid, matmul_path: str = "transient"
    ) -> None:
        super().__init__(attached.base, attached.specs, attached.groups, attached.notes)
        vars(self).update(vars(attached))
        self.for_merge = for_merge
        self._others: list[Requantized] = []
        self._install(grid)
        self._requantize_others(grid, matmul_path)

    @property
    def details(self) -> str:
        """Return ranks, places and the format of the merge, for one line of output."""
        return f"{super().details} · trained for packs merge --requantize {self.for_merge}"

    def _install(self, grid: Grid) -> None:
        """Put groups that quantize in the place of all groups of adapters."""
        alone = {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, AdaptedLinear)
        }
        sums: dict[int, dict[int, QuantizedSum]] = {}
        for path, slot in self.slots.items():
            place = 0 if path in alone else slot.lora._slots[slot.first]
            total = _quantized_sum(path, slot, self.frozen[path], grid[path])
            sums.setdefault(id(slot.lora), {})[place] = total
        install(self, lambda lora: StraightThroughLoRA(lora, sums[id(lora)]))
        self.swap(
            [
                (path, StraightThroughLinear(module.linear, self.slots[path].lora, module._widths))
                for path, module in alone.items()
            ]
        )

    def _requantize_others(self, grid: Grid, matmul_path: str) -> None:
        """Let modules without adapters be what a merge makes of them."""
        modules, swapped = dict(self.model.named_modules()), []
        replacement = PATHS[matmul_path].replacement
        for path, own in modules.items():
            if path in self.specs or path.removesuffix(".linear") in self.specs:
                continue
            own_used = replacement(own) or own
            if path in grid:
                module = _rounded_module(own, grid[path])
                swapped.append((path, Requantized(own_used, replacement(module) or module)))
                self._others.append(swapped[-1][1])
            elif own_used is not own:
                swapped.append((path, own_used))
        self.swap(swapped)
        self.model.train(self.model.training)

    def at(self, share: float) -> None:
        """Round in training once this share of a run is done; scores are of rounded weights always."""
        rounds = share >= ROUNDED_FROM
        for slot in self.slots.values():
            slot.lora.rounds = rounds  # which lets a compiled step be traced again
        for other in self._others:
            other.unchanged_in_training = not rounds

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which the model computes what the base does, nothing quantized anew.

        Adapters have no rank meanwhile: compiled functions are traced again for other shapes.
        """
        groups: list[GroupedLoRA] = list({id(s.lora): s.lora for s in self.slots.values()}.values())
        trained = [(list(group.lora_a), list(group.lora_b)) for group in groups]
        try:
            for group in groups:
                group.lora_a[:] = [a[:, :0] for a in group.lora_a]
                group.lora_b[:] = [b[:0] for b in group.lora_b]
            for other in self._others:
                other.unchanged = True
            yield
        finally:
            for group, (a, b) in zip(groups, trained, strict=True):
                group.lora_a[:], group.lora_b[:] = a, b
            for other in self._others:
                other.unchanged = False


def attach_for_merge(
    base: "BaseModel", lora: LoRAConfig, train: TrainConfig, matmul_path: str
) -> ForMerge:
    """Attach fresh adapters on the grid of ``train.for_merge``.

    Raises:
        PackError: an adapted module cannot be quantized with its adapters.
    """
    attached = attach(base, lora, None, "quantized", train.seed)
    try:
        for path, spec in attached.specs.items():
            _check_module(path, spec, attached.frozen[path])
        grid = grid_of(base, train.for_merge, attached.specs)
        return ForMerge(attached, train.for_merge, grid, matmul_path)
    except BaseException:
        attached.detach()
        raise


def attach_merged(
    base: "BaseModel",
    specs: Specs,
    tensors: Mapping[str, mx.array],
    for_merge: str,
    matmul_path: str,
) -> Attached:
    """Put the weights that a merge would write in place of a base's own, until they are detached.

    Args:
        base: without adapters.
        specs: the adapters of a pack.
        tensors: these, by name on disk.
        for_merge: format of the merge.
        matmul_path: how frozen weights are used.
    """
    check_bare(base)
    modules, replaced = dict(base.model.named_modules()), []
    for path, rounding in grid_of(base, for_merge, specs).items():
        delta = delta_of(specs[path], tensors) if path in specs else None
        replaced.append((path, _rounded_module(modules[path], rounding, delta)))
    attached = attach(base, specs={}, matmul_path=matmul_path)
    attached.inference_only = True
    replacement = PATHS[matmul_path].replacement
    attached.swap([(path, replacement(module) or module) for path, module in replaced])
    mx.eval([module.parameters() for _, module in attached.installed_modules()])
    base.model.eval()
    return attached


def _rounded_module(own: nn.Module, rounding: Rounding, delta: mx.array | None = None) -> nn.Module:
    """Return a module as a merge writes it, with a delta added."""
    weight = stored_weight(own, rounding.dtype)
    if delta is not None:
        weight = (weight.astype(mx.float32) + delta).astype(rounding.dtype)
    module = rounding.module(own, weight)
    mx.eval(module.parameters())
    return module


def _quantized_sum(path: str, slot: Slot, own: nn.Module, rounding: Rounding) -> QuantizedSum:
    """Return how an adapted weight and the adapters of a slot are quantized."""
    indices = iter(range(slot.first, len(slot.lora.lora_a)))
    slices = tuple((part.width, next(indices) if part.rank else None) for part in slot.spec.slices)
    quantize = partial(rounding.linear, _compute_dtype(own))
    return QuantizedSum(own, rounding.dtype, quantize, slices)


def _compute_dtype(module: nn.Module) -> mx.Dtype:
    """Return the dtype that scales or weights of a loaded module have."""
    return frozen_weight(module).dtype if isinstance(module, QUANTIZED) else module.weight.dtype


def _check_module(path: str, spec: ModuleSpec, module: nn.Module) -> None:
    """Raise a PackError for a module whose product is not that of one matrix."""
    reason = "is a stack of experts" if spec.experts is not None else ""
    if not reason and type(module) is not DenseLinear and not is_plain_linear(module):
        reason = f"is a {type(module).__name__}, and no plain linear"
    if reason:
        raise PackError(
            f"--for-merge: {path} {reason}. Leave it out of --target-modules, or train without "
            "--for-merge.",
            "unsupported",
        )
