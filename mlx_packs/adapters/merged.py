"""Packs that are applied as the weights that their merge writes: those of ``--for-merge``.

`packs merge --requantize FORMAT` rounds W + s B A. Such a pack is applied as the quantized weights
themselves, so merging changes nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..bases.loading import lazy_base
from ..bases.requantize import requantized_formats
from ..bases.weight_formats import WeightFormat
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import PATHS, QUANTIZED, dense_like, linear_of, stored_weight
from ..runtime import mx
from .attach import attach, check_bare
from .lora import Attached
from .spec import Specs
from .tensors import delta_of

if TYPE_CHECKING:
    from ..bases.model import BaseModel


@dataclass(frozen=True)
class Rounding:
    """How a merge rounds a weight: to a dtype, then to a format, unless it stays dense."""

    dtype: mx.Dtype
    weight_format: WeightFormat | None

    def module(self, own: nn.Module, weight: mx.array) -> nn.Module:
        """Return a module like ``own`` with another dense weight, rounded lazily."""
        return self._rounded(dense_like(own, weight), compute_dtype(own))

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
    """Return how `packs merge --requantize` rounds each weight of a base, some of them adapted."""
    # its code, if it has any, was run with the user's consent when it was loaded before
    stored = lazy_base(base.path, trust_remote_code=True)
    modules = dict(stored.model.named_modules())

    return {
        path: Rounding(frozen_weight(modules[path]).dense().dtype, weight_format)
        for path, weight_format in requantized_formats(stored, requantize, adapted).items()
    }


def attach_merged(
    base: "BaseModel",
    specs: Specs,
    tensors: Mapping[str, mx.array],
    for_merge: str,
    matmul_path: str,
) -> Attached:
    """Put the weights that a merge would write in place of a base's own, until they are detached.

    ``tensors`` are the adapters of ``specs`` by name on disk; the base has none.
    """
    check_bare(base)

    modules = dict(base.model.named_modules())
    replaced = []
    for path, rounding in grid_of(base, for_merge, specs).items():
        delta = None
        if path in specs:
            delta = delta_of(specs[path], tensors)
        replaced.append((path, rounded_module(modules[path], rounding, delta)))

    attached = attach(base, specs={}, matmul_path=matmul_path)
    attached.inference_only = True

    replacement = PATHS[matmul_path].replacement
    attached.swap([(path, replacement(module) or module) for path, module in replaced])

    mx.eval([module.parameters() for _, module in attached.installed_modules()])
    base.model.eval()
    return attached


def rounded_module(own: nn.Module, rounding: Rounding, delta: mx.array | None = None) -> nn.Module:
    weight = stored_weight(own, rounding.dtype)
    if delta is not None:
        weight = (weight.astype(mx.float32) + delta).astype(rounding.dtype)
    module = rounding.module(own, weight)
    mx.eval(module.parameters())
    return module


def compute_dtype(module: nn.Module) -> mx.Dtype:
    """Return the dtype that scales or weights of a loaded module have."""
    if isinstance(module, QUANTIZED):
        return frozen_weight(module).dtype
    return module.weight.dtype
